"""Model pairs built in Python."""

import inspect

import numpy as np
import pytest

from specdec.clocks.meter import Meter
from specdec.config.hydra import compose_config
from specdec.errors import UserError
from specdec.pairs import PretrainedPair, build_pair
from specdec.pairs.pretrained import build_pretrained
from specdec.pairs.recorded import RecordedPair
from specdec.sources.katz import KatzModel


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


def test_runners_of_one_model_share_its_passes_and_not_their_meters() -> None:
    """Five rows of a comparison held five copies of the weights in ONNX Runtime."""
    pair = PretrainedPair(target="bundled:target")
    meters = Meter(), Meter()
    first, second = (pair.runner("target", meter) for meter in meters)
    assert second.backend is first.backend
    second.forward([second.new_cache(8).rows(prefix_tokens=np.arange(4))])
    assert [meter.calls["target"] for meter in meters] == [0, 1]
