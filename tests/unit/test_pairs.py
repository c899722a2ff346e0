"""Model pairs built in Python."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from specdec.compose.workbench import Workbench, build
from specdec.config.hydra import compose_config
from specdec.errors import UserError
from specdec.pairs import PretrainedPair, build_pair
from specdec.pairs.pretrained import build_pretrained
from specdec.pairs.recorded import RecordedPair
from specdec.sampling.transform import SamplingParams
from specdec.sources.katz import KatzModel
from specdec.state import StopRules
from specdec.testing import Case, decode_cases
from tests.shapes import saved_llama


def saved(folder: Path, seed: int) -> str:
    saved_llama(folder, 2, seed=seed)
    return str(folder)


def test_two_paths_make_a_pair(tmp_path: Path) -> None:
    pair = PretrainedPair(target=saved(tmp_path / "a", 1), draft=saved(tmp_path / "b", 2))
    cases = [
        Case(i, "", (1, 2 + i), SamplingParams(), StopRules(max_new_tokens=8)) for i in range(2)
    ]
    fast = decode_cases(build("speculative", Workbench(pair)), cases)
    plain = decode_cases(build("ar", Workbench(pair)), cases)
    assert [fast[i].output for i in range(2)] == [plain[i].output for i in range(2)]


def test_the_defaults_are_those_of_the_configuration() -> None:
    """``model=hf`` states each default again, for its comment."""
    model = compose_config(["model=hf", "model.target=somewhere"]).values["model"]
    parameters = dict(inspect.signature(build_pretrained).parameters)
    del parameters["path"]  # of model=gguf alone
    assert set(model) - {"kind"} == set(parameters)
    for name, parameter in parameters.items():
        if name != "target":
            assert model[name] == parameter.default, name


def test_pairs_without_models_refuse_artefacts() -> None:
    pair = build_pair({"kind": "synthetic"})
    assert isinstance(pair, RecordedPair)
    with pytest.raises(UserError, match="KatzModel needs a model or text"):
        pair.artefact(KatzModel)
