from __future__ import annotations

from collections.abc import Sequence

from specdec.cli.arguments import read_arguments
from specdec.errors import UserError
from specdec.parts.fields import did_you_mean
from specdec.rivals.environments import RUNTIMES, install, python_of, rivals_dir

HELP = """\
specdec rivals [install NAME...]

Other CPU runtimes as rows of `specdec compare`: NAME_generate, NAME_draft and
NAME_lookup for NAME = ort (ONNX Runtime GenAI) and openvino (OpenVINO GenAI).
Each has a Python environment of its own below SPECDEC_CACHE (~/.cache/specdec),
made once from the package registry. Without arguments: what is installed.
"""


def main(words: Sequence[str]) -> int:
    given = read_arguments(words, flags=()).overrides
    if not given:
        for name, runtime in RUNTIMES.items():
            print(f"{name:<10} {runtime.title:<20} {_state(name)}")
        print(f"environments and converted models: {rivals_dir()}")
        return 0
    action, *names = given
    if action != "install" or not names:
        raise UserError(f"specdec rivals {' '.join(given)}: use `specdec rivals install NAME`")
    for name in names:
        if name not in RUNTIMES:
            raise UserError(f"{name} is no runtime: {did_you_mean(name, RUNTIMES)}")
        install(name, print)
    return 0


def _state(name: str) -> str:
    try:
        python_of(name)
        python_of(name, converter=True)
    except UserError:
        return f"not installed: specdec rivals install {name}"
    return "installed"
