"""Passes through a frozen model's parts equal transformers' own forward, for every family."""

import copy

import pytest
import torch

from specdec.models.frozen import FrozenModel
from specdec.models.inspection import CERTIFIED
from specdec.models.random import random_model

TOKENS = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", sorted(CERTIFIED))
def test_parts_equal_the_whole(family: str) -> None:
    """Layer by layer from the first stream, then the output head: the model's logits."""
    model = random_model(family, dtype="float32", num_layers=3)
    frozen = FrozenModel(model)
    with torch.no_grad():
        expected = model(input_ids=TOKENS, use_cache=False)
        streams = frozen.residuals(TOKENS, {1, 2})
        states = model(input_ids=TOKENS, output_hidden_states=True).hidden_states
        x = streams[1]
        torch.testing.assert_close(x, states[1].float())
        for number in (1, 2):
            x = frozen.run_layer(copy.deepcopy(frozen.layers[number]), x, number)
            torch.testing.assert_close(x, streams[number + 1])
        torch.testing.assert_close(frozen.logits(x), expected.logits)
        assert torch.equal(model(input_ids=TOKENS).logits, expected.logits), "it is not changed"


def test_gradients_reach_a_layer_that_is_put_in_and_no_other() -> None:
    model = random_model("llama", num_layers=2)
    frozen = FrozenModel(model)
    layer = copy.deepcopy(frozen.layers[1]).requires_grad_(True)
    frozen.logits(frozen.run_layer(layer, frozen.residuals(TOKENS, {1})[1], 1)).sum().backward()
    assert all(p.grad is not None and bool((p.grad != 0).any()) for p in layer.parameters())
    assert all(p.grad is None for p in model.parameters())
