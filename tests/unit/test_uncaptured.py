"""Faster passes that were asked for and cannot be had are named, with the reason."""

import pytest

from specdec.config.hydra import compose_config
from specdec.pairs import RandomPair
from specdec.pairs.options import ModelOptions
from specdec.runs.jobs import limits, notes_on_models, run_job
from specdec.runs.progress import Progress

pytestmark = pytest.mark.slow

SHARES = ["executor=pipeline", "executor.target_degree=2", "executor.transport=distributed"]


@pytest.mark.parametrize(
    "overrides, device, told",
    [
        (["model.graphs=auto"], "cpu", []),  # auto captures nothing here
        (["model.graphs=auto", *SHARES], "cuda:1", ["executor.target_degree=2"]),
        (["model.kernels=packed", *SHARES], "cpu", ["model.kernels=packed: not used for shares"]),
        (["model.kernels=triton", *SHARES[:2], "clock=simulated"], "cuda", []),  # one process
        (["model.graphs=replay", "serving=paged"], "cpu", ["serving.kv_tokens="]),
        (["model.kernels=triton", "serving=paged"], "cuda", []),  # fused modules hold there
        (["model.graphs=cuda", "serving=paged", *SHARES], "cuda", ["shares", "paged caches"]),
        (["model.graphs=cuda", "strategy=hf_generate"], "cuda", ["not used by another program"]),
    ],
)
def test_what_has_no_effect_is_named(overrides, device, told):
    config = compose_config(["model=random", *overrides]).values
    found = limits(config, device)
    assert len(found) == len(told)
    assert all(words in limit for words, limit in zip(told, found, strict=True))


@pytest.mark.parametrize(("flags", "notes"), [("flags: avx2", 1), ("avx512_bf16", 0), ("", 0)])
def test_a_type_without_instructions_is_slow(monkeypatch, flags, notes):
    monkeypatch.setattr("specdec.runs.jobs.cpu_info", lambda: flags)
    pair = RandomPair(options=ModelOptions(dtype="bfloat16"))
    assert len([n for n in notes_on_models([], pair) if "model.dtype=bfloat16" in n]) == notes
    assert not notes_on_models([], RandomPair())


def test_a_run_says_so(tmp_path):
    """Once, before it decodes."""
    notes: list[str] = []

    class Heard(Progress):
        def note(self, text):
            notes.append(text)

    words = ["strategy=ar", "model=random", "model.graphs=replay", "serving=paged"]
    words += ["data=stdlib", "data.limit=1", "max_new_tokens=2", "logger=none"]
    config = compose_config([*words]).values
    run_job(config, tmp_path, Heard())
    assert len(notes) == 1
    assert notes[0].startswith("ar: model.graphs=replay: not used for the target")
