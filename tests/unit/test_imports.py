"""A program imports the modules of what it uses; a subprocess each, so that nothing is loaded."""

import subprocess
import sys

import pytest

AR_AND_SUFFIX = """
import numpy as np
from specdec.config.job import run_job_of
from specdec.pairs import build_pair
from specdec.runs.runners import PartsRunner, TokenPrompt
from specdec.state import StopRules

for strategy in ("ar", "suffix"):
    config = run_job_of([f"strategy={strategy}", "model=random", "model.num_layers=2"]).config
    pair = build_pair(config["model"])
    runner = PartsRunner(cfg=config, pair=pair, stop=StopRules(max_new_tokens=8))
    runner.run([TokenPrompt(0, np.array([1, 2, 3]))], lambda result: None)
"""
NOT_USED = {
    *("distributed", "planning", "fitting", "train"),
    *("rivals", "kernels", "tensor_parallel"),
}


def modules_after(program: str) -> set[str]:
    """Modules of specdec that a program has loaded."""
    program += "\nimport sys\nprint(*sys.modules)"
    shown = subprocess.check_output([sys.executable, "-c", program], text=True)
    return {name for name in shown.split() if name.split(".")[0] == "specdec"}


@pytest.mark.slow
def test_the_loop_needs_few_modules() -> None:
    assert len(modules_after("import specdec.loop")) <= 28


@pytest.mark.slow
def test_plain_decoding_and_suffix_load_what_they_use() -> None:
    loaded = modules_after(AR_AND_SUFFIX)
    assert not NOT_USED & {name.split(".")[1] for name in loaded if "." in name}
    assert len(loaded) <= 110


def test_packages_list_and_import_their_exports() -> None:
    import specdec.policies

    assert {"Chain", "Static"} <= set(dir(specdec.policies))
    assert specdec.policies.Chain.__module__ == "specdec.policies.chain"
    assert not hasattr(specdec.policies, "Chian")


def test_list_answers_without_the_packages_of_models() -> None:
    """Importing torch takes seconds."""
    program = "from specdec.cli.main import main\nmain(['list', 'strategies'])\n"
    shown = f"{program}import sys\nassert not {{'torch', 'transformers'}} & {{*sys.modules}}"
    subprocess.run([sys.executable, "-c", shown], capture_output=True, check=True)


@pytest.mark.slow
def test_a_job_is_checked_before_models_are_imported() -> None:
    """Importing ``modeling_utils`` takes seconds, which refused commands would take too."""
    program = (
        "import sys\nimport specdec.runs.jobs\nfrom specdec.config.job import run_job_of\n"
        "for strategy in ('specpipe', 'suffix', 'swiftspec', 'staged', 'ppsd'):\n"
        "    run_job_of([f'strategy={strategy}', 'model=tiny'])\n"
        "assert 'transformers.modeling_utils' not in sys.modules\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert not ended.returncode, ended.stderr.decode()
