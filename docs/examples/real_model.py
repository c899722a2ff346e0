"""A real language model: one answer, an own source beside the library's, and a frame of both.

Needs `specdec models install smollm2` (98 MB). The source is in echo.py, its preset in
conf/strategy/echo.yaml. The same on the command line:

    specdec compare --config-dir conf 'strategies=[ar,suffix,echo]' model=smollm2 data=jsonl \
        data.path=questions.jsonl data.field=question data.limit=2 max_new_tokens=64
"""

# %% One answer, streamed
from pathlib import Path

import specdec

here = Path(__file__).parent
model = ["model=smollm2", "max_new_tokens=64"]
with specdec.Decoder([*model, "strategy=suffix"]) as decoder:
    for step in decoder.stream("What is a prime number?", chat=True):
        print(step.text, end="", flush=True)
print()

# %% Plain decoding, suffixes and the own source on the same questions
data = ["data=jsonl", f"data.path={here / 'questions.jsonl'}", "data.field=question"]
found = specdec.compare(
    ["ar", "suffix", "echo"],
    [*model, *data, "data.limit=2", "repeats=1"],
    config_dirs=[here / "conf"],
)
print(found)

# %% The rows as a frame
columns = ["strategy", "lossless", "acceptance_length", "speedup_wall"]
print(found.frame()[columns].round(2).to_string(index=False))
assert all(row["lossless"] is not False for row in found.rows)

# %% Is it lossless with this model? The quick one of the checks of `specdec verify`
report = specdec.verify([*model, "strategy=echo"], config_dirs=[here / "conf"], checks=["numerics"])
print(report.frame()[["check", "result"]].to_string(index=False))
assert report.lossless
