"""Prints the flattened default configuration, which is kept in flat.yaml and checked for drift.

    python tests/config/flat.py > tests/config/flat.yaml

First every key of `specdec run` with its default; then, per preset, the keys that it changes.
"""

from __future__ import annotations

import json

from specdec.config.hydra import compose_config
from specdec.config.options import flatten, options

HEADER = """\
# Every key of `specdec run` with its default, then what each preset changes.
# Kept in git so that a change of a default is seen; made by: python tests/config/flat.py
"""


def flat_text() -> str:
    """The file's content."""
    default = _flat([])
    lines = [HEADER + "default:"]
    lines += [f"  {key}: {json.dumps(value)}" for key, value in default.items()]
    for name in options("strategy"):
        lines.append(f"{name}:")
        preset = _flat([f"strategy={name}"])
        for key in sorted({*default, *preset}):
            if key not in preset:
                lines.append(f"  {key}: absent")
            elif preset[key] != default.get(key, "absent"):
                lines.append(f"  {key}: {json.dumps(preset[key])}")
    comparison = flatten(compose_config([], name="compare").values)
    lines.append("compare:")
    lines += [f"  {k}: {json.dumps(v)}" for k, v in comparison.items() if k not in default]
    return "\n".join(lines) + "\n"


def _flat(overrides: list[str]) -> dict[str, object]:
    return dict(sorted(flatten(compose_config(overrides).values).items()))


if __name__ == "__main__":
    print(flat_text(), end="")
