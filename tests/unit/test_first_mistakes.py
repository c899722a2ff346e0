"""What a new user meets first: one clear line each, and results as they are made."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from specdec.cli import sweep as sweep_module
from specdec.cli.main import main
from specdec.cli.trace import draw
from specdec.config.comparison import compose_comparison
from specdec.config.hydra import compose_config
from specdec.config.job import run_job_of
from specdec.config.options import flatten
from specdec.errors import UserError
from specdec.metrics import RequestResult, RunTotals
from specdec.pairs import RandomPair
from specdec.runs.runners import PartsRunner, TokenPrompt
from specdec.state import StopRules

pytestmark = pytest.mark.slow


def test_an_unknown_launcher_is_named_with_those_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["run", "-m", "strategy=ar,speculative", "hydra/launcher=jobllib"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("specdec: hydra/launcher=jobllib is unknown: did you mean joblib?")


def test_a_launcher_that_is_not_installed_names_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sweep_module, "_has_plugin", lambda name: False)
    assert main(["run", "-m", "strategy=ar,speculative", "hydra/launcher=joblib"]) == 2
    assert "pip install 'specdec-lab[joblib]'" in capsys.readouterr().err


def test_a_hint_for_an_unknown_key_names_keys_of_that_command() -> None:
    of_run = flatten(compose_config([]).values)
    of_compare = flatten(compose_config([], name="compare").values).keys() - of_run.keys()
    assert "repeats" in of_compare
    with pytest.raises(UserError, match="repeatz is not a key") as caught:
        run_job_of(["repeatz=3"])
    assert not [key for key in of_compare if f" {key}," in str(caught.value)]
    with pytest.raises(UserError, match="did you mean repeats"):
        compose_comparison(["strategies=[ar]", "repeatz=3"])


@pytest.mark.parametrize("target", ["nomodule.Foo", "specdec.polices.Chain", "Foo", "os.getcwd"])
def test_a_wrong_target_is_named_with_the_remedy(target: str, tmp_path: Path) -> None:
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "mine.yaml").write_text(f"_target_: {target}\n")
    with pytest.raises(UserError, match=f"policy._target_={target}") as caught:
        run_job_of(["policy=mine"], [tmp_path])
    assert "\n" not in str(caught.value)


def test_the_trace_of_a_run_without_one_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="run with trace=true"):
        draw(tmp_path)


@pytest.mark.parametrize(
    ("strategy", "names"),
    [
        ("prompt_lookup", "PromptLookupSource copies"),
        ("suffix", "SuffixSource copies"),
        ("mixture", "PromptLookupSource copies"),
        ("adaptive", "SuffixSource copies"),
    ],
)
def test_methods_that_copy_text_say_that_synthetic_tokens_have_none(
    strategy: str, names: str
) -> None:
    words = [f"strategy={strategy}", "clock=simulated"]
    (notice,) = run_job_of([*words, "model=synthetic"]).notices
    assert names in notice
    assert "model=tiny" in notice
    assert not run_job_of([*words, "model=replay"]).notices
    assert not run_job_of(["strategy=best_first", "clock=simulated", "model=synthetic"]).notices


def test_results_of_a_batch_are_handed_out_as_each_request_ends() -> None:
    """The first of four requests is booked before the last one has a token."""
    pair = RandomPair()
    config = run_job_of(["strategy=ar", "model=random", "batch_size=2", "max_new_tokens=6"]).config
    runner = PartsRunner(cfg=config, pair=pair, stop=StopRules(max_new_tokens=6))
    prompts = [TokenPrompt(i, np.array([1 + i, 2])) for i in range(4)]
    ends: list[float] = []
    starts: dict[int, float] = {}

    def book(result: RequestResult, totals: RunTotals) -> None:
        ends.append(runner.parts.clock.now())
        starts[result.id] = result.emitted_s[0]

    runner.run(prompts, lambda _: None, book)
    runner.close()
    assert len(ends) == 4
    assert ends[0] < starts[3]
