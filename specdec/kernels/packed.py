"""Linear layers on a CPU whose weights are stored in oneDNN's own layout.

torch multiplies 1 to 64 rows more slowly by a plain weight [N, E] than oneDNN by a packed one
(``experiments.benchmarks.packed``). torch's compiler uses the same operators for frozen weights.

Shape letters: E inputs, N outputs.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

DTYPES: Mapping[torch.dtype, Callable[[], bool]] = {
    torch.float32: lambda: True,
    torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
    torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
}
"""Maps each dtype of weights to a check whether this CPU has instructions for it."""

_LEAST_ROWS = {torch.bfloat16: 4}
"""In bfloat16, 4 rows took 0.7 to 0.9 times as long as 1 (AMD EPYC), so passes are padded to 4."""

_ROWS = 1  # for which oneDNN chooses the layout; it was as fast with 4, 16 and 64
_packed: WeakTensorKeyDictionary = (
    WeakTensorKeyDictionary()
)  # plain weight -> packed one, shared by slices


def packed_problem(device: torch.device | str, dtype: torch.dtype) -> str | None:
    if torch.device(device).type != "cpu":
        return f"weights are packed for a CPU, and the models are on {device}"
    if not torch.backends.mkldnn.is_available():
        return "this build of torch has no oneDNN"
    if dtype not in DTYPES or not DTYPES[dtype]():
        name = str(dtype).removeprefix("torch.")
        return f"oneDNN does not multiply {name} on this CPU: use model.dtype=float32"
    return None


class PackedLinear(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight
        if weight not in _packed:
            _packed[weight] = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS)
        self._weight: Tensor = _packed[weight]
        self._bias: Tensor | None = None if linear.bias is None else linear.bias.detach()
        self._least = _LEAST_ROWS.get(weight.dtype, 0)

    def forward(self, hidden: Tensor) -> Tensor:
        if hidden.numel() >= self._least * hidden.shape[-1]:
            return self._product(hidden)
        rows = hidden.flatten(0, -2)
        padded = rows.new_zeros(self._least, rows.shape[1])
        padded[: len(rows)] = rows
        return self._product(padded)[: len(rows)].unflatten(0, hidden.shape[:-1])

    def _product(self, hidden: Tensor) -> Tensor:
        output: Tensor = torch.ops.mkldnn._linear_pointwise(
            hidden, self._weight, self._bias, "none", [], ""
        )
        return output


def pack(model: nn.Module) -> int:
    """Replaces all linear layers of ``model`` by ``PackedLinear`` in place; returns their number.

    ``model`` must be a runner's own copy; the model that was copied keeps its plain layers.
    """
    found = [
        (child, parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Linear) and not child.weight.is_meta
    ]
    for child, parent, name in found:
        setattr(parent, name, PackedLinear(child))
    return len(found)
