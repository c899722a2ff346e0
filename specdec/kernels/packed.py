"""Linear layers on a CPU whose weights are stored in oneDNN's own layout.

torch multiplies 1 to 64 rows more slowly by a plain weight [N, E] than oneDNN by a packed one
(``experiments.benchmarks.packed``). torch's compiler uses the same operators for frozen weights.

Shape letters: E inputs, N outputs.
"""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

DTYPES: Mapping[torch.dtype, Callable[[], bool]] = {
    torch.float32: lambda: True,
    torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
    torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
}
"""Maps each dtype of weights to a check whether this CPU has instructions for it."""

_PAGE_OUT = 21  # MADV_PAGEOUT of Linux 5.4
_PAGE = 4096
_MAPS = Path("/proc/self/maps")
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
    """Replaces all linear layers of a runner's own copy in place and returns their number.

    The plain weights stay in the copied model; Linux frees those that are mapped from a file.
    """
    found = [
        (child, parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Linear) and not child.weight.is_meta
    ]
    files = _mapped_files()
    # The largest first: for a moment both of its layouts take memory.
    for child, parent, name in sorted(found, key=lambda item: -item[0].weight.numel()):
        linear = PackedLinear(child)
        _release(child.weight, files)
        setattr(parent, name, linear)
    return len(found)


def _mapped_files() -> list[range]:
    try:
        lines = _MAPS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        span, _, path = line.partition(" ")
        if "/" in path:
            start, stop = (int(edge, 16) for edge in span.split("-"))
            found.append(range(start, stop))
    return found


def _release(weight: Tensor, files: Sequence[range]) -> None:
    """Asks Linux to free the memory of a weight in a mapped file; other memory would go to swap."""
    start, stop = weight.data_ptr(), weight.data_ptr() + weight.nbytes
    if any(start in file and stop <= file.stop for file in files):
        first = -(-start // _PAGE) * _PAGE
        size = max(0, stop // _PAGE * _PAGE - first)
        # madvise is a hint, so its result is ignored: failure costs memory only.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), _PAGE_OUT)
