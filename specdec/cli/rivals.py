from specdec.cli.arguments import Arguments, install_named
from specdec.rivals.runtimes import RUNTIMES, install, is_installed, rivals_dir

HELP = """\
specdec rivals [install NAME...]

Other CPU runtimes as rows of `specdec compare`: llamacpp_generate, llamacpp_draft
and llamacpp_ngram (llama.cpp, with GGUF files), NAME_generate, NAME_draft and
NAME_lookup for NAME = ort (ONNX Runtime GenAI) and openvino (OpenVINO GenAI).
Each has a Python environment of its own below SPECDEC_CACHE (~/.cache/specdec),
made once from the package registry. Without arguments: what is installed.
"""


def main(arguments: Arguments) -> int:
    if install_named(arguments.overrides, "rivals", RUNTIMES, install):
        return 0
    for name, runtime in RUNTIMES.items():
        missing = f"not installed: specdec rivals install {name}"
        print(f"{name:<10} {runtime.title:<20} {'installed' if is_installed(name) else missing}")
    print(f"environments and converted models: {rivals_dir()}")
    return 0
