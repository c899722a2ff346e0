"""A comparison in Python: its table, its rows as pandas frames, and a certificate.

The same on the command line: `specdec compare` and `specdec verify`.
"""

# %% Three strategies on the same prompts, with the bundled models
import specdec

found = specdec.compare(
    ["ar", "speculative", "prompt_lookup"], ["data.limit=2", "max_new_tokens=24", "repeats=1"]
)
print(found)
assert all(row["lossless"] is not False for row in found.rows)

# %% Frames: one row per strategy, per prompt, or per token
lengths = found.frame().set_index("strategy")["acceptance_length"]
print(lengths.round(2).to_dict())
drafted = found.token_frame().query("origin >= 0").groupby("strategy").size()
print(drafted.to_dict())

# %% Several prompts at once, four sharing the target's passes
with specdec.Decoder(["max_new_tokens=24", "batch_size=4"]) as decoder:
    generations = decoder.generate(["def one():", "def two():", "import os"])
print([len(generation.tokens) for generation in generations])

# %% A certificate, of two checks to be quick
report = specdec.verify(["strategy=speculative"], checks=["greedy_parity", "tree_invariant"])
print(report.frame()[["check", "result"]].to_string(index=False))
assert report.lossless
