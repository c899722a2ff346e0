"""A source of one's own, alone and under a tree policy, through the configuration tree.

The source is in echo.py beside this file, its YAML in conf/source/. On the command line the same is

    specdec run --config-dir conf source=echo policy=chain data=stdlib
"""

# %% A decoder finds the YAML through config_dirs; everything else is the command line's
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
        found = decoder.generate(prompt)
    accepted = found.metrics["acceptance_length"]
    print(f"{accepted:.2f} tokens per target pass with {' '.join(overrides)}")

# %% Certify it: every check that `specdec verify` runs, or some of them
report = assert_lossless(
    ["source=echo", "policy=chain", "model=random"],
    config_dirs=[tree],
    checks=["greedy_parity", "tree_invariant"],
)
for check in report.checks:
    print(f"{check.name:16} {check.detail}")
