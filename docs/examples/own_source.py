"""A source outside the library, from Python, through the configuration tree.

The source is in echo.py beside this file, its YAML in conf/source/. The same on the command line:

    specdec run --config-dir conf source=echo policy=chain data=stdlib
"""

# %% A decoder takes the overrides of the command line, and the tree in config_dirs
from pathlib import Path

import specdec
from specdec.testing import assert_lossless

tree = Path(__file__).parent / "conf"
prompt = "def add(first, second):\n    return first + second\n\n\ndef sub(first, second):\n    "

for overrides in (
    ["strategy=ar"],
    ["source=echo", "policy=chain"],
    ["source=echo", "policy=chain", "policy.gamma=6"],
):
    with specdec.Decoder([*overrides, "max_new_tokens=48"], config_dirs=[tree]) as decoder:
        generation = decoder.generate(prompt)
    accepted = generation.metrics["acceptance_length"]
    print(f"{accepted:.2f} tokens per target pass with {' '.join(overrides)}")

# %% Certify it: all checks of `specdec verify`, or some of them
report = assert_lossless(
    ["source=echo", "policy=chain", "model=random"],
    config_dirs=[tree],
    checks=["greedy_parity", "tree_invariant"],
)
for check in report.checks:
    print(f"{check.name:16} {check.detail}")
