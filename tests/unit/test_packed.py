"""Linear layers with packed weights (``model.kernels=packed``)."""

import gc
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from specdec.config.hydra import compose_config
from specdec.kernels.packed import DTYPES, PackedLinear, pack, packed_problem
from specdec.pairs import build_pair
from specdec.runs.runners import PartsRunner, TokenPrompt
from specdec.state import StopRules

pytestmark = pytest.mark.fast
HERE = [dtype for dtype in DTYPES if packed_problem("cpu", dtype) is None]
if not HERE:
    pytest.skip("this build of torch has no oneDNN", allow_module_level=True)


def _linear(dtype: torch.dtype, bias: bool) -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(96, 160, bias=bias, dtype=dtype).requires_grad_(False)


@pytest.mark.parametrize("rows", [1, 7, 33])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", HERE)
def test_outputs_equal_those_of_float64_up_to_rounding(
    dtype: torch.dtype, bias: bool, rows: int
) -> None:
    """A sum of 96 products, rounded once to the type; its terms are added in float32."""
    linear = _linear(dtype, bias)
    hidden = torch.randn(1, rows, 96, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = PackedLinear(linear)(hidden)
    exact = linear.double()(hidden.double())
    assert found.shape == (1, rows, 160)
    assert found.dtype == dtype
    bound = torch.finfo(dtype).eps * exact.abs() + 96 * torch.finfo(torch.float32).eps * 4
    assert ((found.double() - exact).abs() <= bound).all()


def test_slices_share_packed_weights_which_end_with_the_plain_ones() -> None:
    """Rows of a comparison have runners of their own, but one copy of the weights."""
    linear = _linear(torch.float32, bias=False)
    first, second = PackedLinear(linear), PackedLinear(linear)
    assert first._weight is second._weight
    assert PackedLinear(_linear(torch.float32, bias=False))._weight is not first._weight
    alive = weakref.ref(first._weight)
    del first, second, linear
    gc.collect()
    assert alive() is None


@pytest.mark.slow
def test_tokens_equal_those_with_plain_weights() -> None:
    """The whole path: target and draft of the bundled pair are packed; no two tokens nearly tie."""
    outputs = []
    for kernels in ("torch", "packed"):
        overrides = ["strategy=best_first", "model=tiny", f"model.kernels={kernels}"]
        cfg = compose_config(overrides).values
        runner = PartsRunner(
            cfg=cfg, pair=build_pair(cfg["model"]), stop=StopRules(max_new_tokens=12)
        )
        results = []
        runner.run([TokenPrompt(0, np.arange(5, 40))], results.append)
        runner.close()
        outputs.append(list(results[0].output))
    assert outputs[0] == outputs[1]


def test_every_linear_layer_is_replaced() -> None:
    model = nn.Sequential(_linear(torch.float32, True), nn.Sequential(nn.ReLU(), nn.Linear(160, 4)))
    hidden = torch.randn(3, 96, generator=torch.Generator().manual_seed(2))
    expected = model(hidden)
    assert pack(model) == 2
    assert not list(model.parameters())
    assert torch.allclose(model(hidden), expected, atol=1e-5)
