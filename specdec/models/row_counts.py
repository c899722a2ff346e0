"""Proofs that the bits of a row do not depend on the pass: ``model.exact=true``.

Libraries choose kernels by the number of rows, and kernels add in different orders. Which numbers
of rows give a row the same bits depends on operator, shape, type, device, number of threads and
backend, so it is tried: an operator's rows in a pass of 64 rows are the reference, and a number of
rows is *proved* if passes of that many of them, at several places and in several layouts, give
equal bits. Passes are then padded to proved numbers only. A trial is no proof for all inputs, but
kernels do not choose their order of additions by values.

Proofs are cached in the process; those of matrix products, norms and attention also on disk
(``proofs``).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from specdec.attention.exact import BLOCK, Context, exact_attention
from specdec.attention.kv_storage import CacheSpec
from specdec.attention.tree_attention import ScoreOptions
from specdec.errors import UserError
from specdec.kernels.graphs import ROW_COUNTS
from specdec.models.inspection import CERTIFIED
from specdec.models.proofs import store_counts, stored_counts

MOST_ROWS = ROW_COUNTS[-1]
"""Rows of the reference pass, and of the largest pass."""

EAGER = "torch eager"
"""Name of the backend that runs transformers' modules operation by operation."""

_DISTINCT = 1024  # distinct columns of a matrix product's sample, repeated beyond
_NORM_ELEMENTS = 1 << 19  # of a norm's samples
_FOLLOWING = ("dynamic", "longrope")  # rope types
_LIBRARIES = ("specdec", "torch", "transformers")  # whose modules a proof on disk knows by name

Layout = Callable[[int, int], Sequence[Tensor]]
"""(start, stop) -> results of the sample's rows ``start`` .. ``stop`` - 1, from one pass."""


@dataclass(frozen=True, slots=True)
class Operator:
    """A part of a forward pass whose rows must not depend on each other's number and place.

    A backend proves itself by the operators that it runs.

    Attributes:
        name: in messages, such as "linear 192 x 512".
        key: everything that may decide which kernel runs, besides type, device and threads.
        num_rows: size of the sample, at most ``MOST_ROWS``.
        layouts: ways to run rows of the sample; the first one defines the reference.
        on_disk: name and key identify the operator completely, so that its proof is valid in other
            processes.
    """

    name: str
    key: Hashable
    num_rows: int
    layouts: tuple[Layout, ...]
    on_disk: bool = False


@dataclass(frozen=True, slots=True)
class Setting:
    """Where operators run.

    Attributes:
        dtype, device: of weights and activations.
        threads: torch's intra-op threads.
        backend: name of what runs the forward pass.
    """

    dtype: torch.dtype
    device: torch.device
    threads: int
    backend: str

    @staticmethod
    def here(dtype: torch.dtype, device: torch.device, backend: str = EAGER) -> Setting:
        """The setting of this process."""
        return Setting(dtype, device, torch.get_num_threads(), backend)


_PROVED: dict[tuple[Setting, str, Hashable], tuple[int, ...]] = {}


def proved_counts(operators: Iterable[Operator], setting: Setting) -> tuple[int, ...]:
    """The numbers of rows that all operators are proved for, ascending; never empty.

    Raises:
        UserError: in a pass of ``MOST_ROWS`` rows, an operator's result for a row depends on its
            place or layout.
    """
    counts = set(ROW_COUNTS)
    for operator in operators:
        key = (setting, operator.name, operator.key)
        if key not in _PROVED:
            found = stored_counts(key, setting.device) if operator.on_disk else None
            if found is None:
                with torch.inference_mode():
                    found = tuple(_proved(operator))
                if operator.on_disk:
                    store_counts(key, setting.device, found)
            _PROVED[key] = found
        if MOST_ROWS not in _PROVED[key]:
            raise UserError(
                f"model.exact=true cannot be kept here: {operator.name} in {_name(setting)} gives a"
                f" row other bits at another place in a pass of {MOST_ROWS} rows; use another"
                " model.dtype, model.device or threads, or model.exact=false"
            )
        counts &= {*_PROVED[key]}
    return tuple(sorted(counts))


def _name(setting: Setting) -> str:
    dtype = str(setting.dtype).removeprefix("torch.")
    return f"{dtype} on {setting.device} with {setting.threads} threads ({setting.backend})"


def _proved(operator: Operator) -> Iterator[int]:
    """Those of ``ROW_COUNTS`` that give the reference's bits in every layout."""
    size = operator.num_rows
    reference = operator.layouts[0](0, size)
    for count in ROW_COUNTS:
        num = min(count, size)
        starts = {0, (size - num) // 2, size - num}
        if all(
            _equal(layout(start, start + num), [part[start : start + num] for part in reference])
            for layout in operator.layouts
            for start in starts
        ):
            yield count


def _equal(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    return all(
        torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True)
        for a, b in zip(ours, theirs, strict=True)
    )


# ------------------------------------------------------------ operators of transformers' modules


def eager_operators(
    model: PreTrainedModel, num_heads: int, spec: CacheSpec, setting: Setting
) -> Iterator[Operator]:
    """The operators of a runner's model: attention, matrix products and norms.

    Args:
        model: the runner's own copy.
        num_heads: query heads.
        spec: of the runner's caches.
        setting: where it runs.

    Raises:
        UserError: rows depend on each other outside attention.
    """
    _refuse_dependent(model)
    yield attention_operator(num_heads, spec.num_kv_heads, spec.head_dim, setting)
    yield from module_operators(model, setting)


def _refuse_dependent(model: PreTrainedModel) -> None:
    """Refuses untested families, and frequencies that follow the largest position of a pass."""
    kind = model.config.get_text_config().model_type
    if kind not in CERTIFIED:
        raise UserError(
            f"model.exact=true is proved for the families {', '.join(sorted(CERTIFIED))}, not for"
            f" {kind!r}: use one of these, or model.exact=false"
        )
    for module in model.modules():
        names = getattr(module, "rope_type", ())
        for name in names.values() if isinstance(names, dict) else [names]:
            if name in _FOLLOWING:
                raise UserError(
                    f"model.exact=true does not go with rope_type={name}, whose frequencies follow"
                    " the largest position of a pass: use a model without it, or model.exact=false"
                )


def module_operators(model: nn.Module, setting: Setting) -> Iterator[Operator]:
    """The matrix products and norms of a model, each shape once."""
    seen = set()
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Tensor) or weight.is_meta or isinstance(module, nn.Embedding):
            continue
        biased = getattr(module, "bias", None) is not None
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        layout = (tuple(weight.shape), weight.stride(), str(weight.dtype))
        key = (kind, *layout, biased, repr(getattr(module, "split", None)))
        if weight.dim() > 2 or key in seen:
            continue
        seen.add(key)
        make = _linear_operator if weight.dim() == 2 else _norm_operator
        own = "forward" in vars(module) or kind.split(".")[0] not in _LIBRARIES
        yield replace(make(module, weight, key, setting), on_disk=not own)


def _linear_operator(module: Any, weight: Tensor, key: Hashable, setting: Setting) -> Operator:
    """A matrix product, on matrices whose results are nothing but rounding errors.

    Half of the terms of every sum are the others' negatives, in random order. The sum would be 0 in
    exact arithmetic, so another order of additions shows in most results. With the model's own
    values, the rounding of a result to 16 bits hides it almost always.
    """
    transposed = type(module).__name__ == "Conv1D" or getattr(module, "transposed", False)
    outputs, inputs = weight.T.shape if transposed else weight.shape
    half, generator = inputs // 2, torch.Generator().manual_seed(0)
    order = torch.randperm(2 * half, generator=generator)

    def drawn(num: int) -> Tensor:
        return torch.randn(num, half, generator=generator) * 16.0

    terms = drawn(min(outputs, _DISTINCT))[torch.arange(outputs) % _DISTINCT]
    matrix = pad(torch.cat([terms, -terms], 1)[:, order], (0, inputs - 2 * half))
    sample = pad(drawn(MOST_ROWS).repeat(1, 2)[:, order], (0, inputs - 2 * half))
    split = getattr(module, "split", None)  # of a share that receives all inputs
    if split is not None:
        sample = pad(sample[:, : split.stop - split.start], (split.start, 0))
    probe = copy.copy(module)
    probe.__dict__["weight"] = torch.empty_like(weight).copy_(matrix.T if transposed else matrix)
    if getattr(module, "bias", None) is not None:
        probe.__dict__["bias"] = torch.zeros_like(module.bias)
    name = f"linear {inputs} x {outputs}"
    return _row_operator(name, key, probe.forward, [sample], setting)


def _norm_operator(module: Any, weight: Tensor, key: Hashable, setting: Setting) -> Operator:
    """A norm, on many samples: another order of additions changes few results after rounding."""
    generator, width = torch.Generator().manual_seed(0), len(weight)
    num = max(1, _NORM_ELEMENTS // (MOST_ROWS * width))
    samples = [torch.randn(MOST_ROWS, width, generator=generator) for _ in range(num)]
    return _row_operator(f"norm of {width}", key, module.forward, samples, setting)


def _row_operator(
    name: str,
    key: Hashable,
    run: Callable[[Tensor], Tensor],
    samples: Sequence[Tensor],
    setting: Setting,
) -> Operator:
    """An operator on rows [1, R, I]: as they are, and with the rows of the pass rotated."""
    samples = [sample.to(dtype=setting.dtype, device=setting.device) for sample in samples]

    def straight(start: int, stop: int) -> list[Tensor]:
        return [run(sample[None, start:stop].clone())[0] for sample in samples]

    def rotated(start: int, stop: int) -> list[Tensor]:
        shift = max(1, (stop - start) // 3)
        rolled = [sample[None, start:stop].roll(shift, 1) for sample in samples]
        return [run(rows)[0].roll(-shift, 0) for rows in rolled]

    return Operator(name, key, MOST_ROWS, (straight, rotated))


def attention_operator(
    num_heads: int, num_kv_heads: int, head_dim: int, setting: Setting
) -> Operator:
    """``exact_attention``: rows of a prompt's end, and the same rows as nodes of a tree.

    As a tree, the keys of the last positions lie in shuffled slots, so the context is cut at
    another position, and every row gathers its own keys.
    """
    generator = torch.Generator().manual_seed(0)
    length, first = 2 * BLOCK + MOST_ROWS // 2, 2 * BLOCK - MOST_ROWS // 2

    def sample(*shape: int) -> Tensor:
        drawn = torch.randn(*shape, generator=generator)
        # In 16 bits the rounding of the output would hide what is summed in float32.
        dtype = torch.float64 if setting.dtype == torch.float64 else torch.float32
        return drawn.to(dtype=dtype, device=setting.device)

    query = sample(num_heads, MOST_ROWS, head_dim)
    key, value = sample(2, num_kv_heads, length, head_dim)
    border = BLOCK + BLOCK // 3
    order = torch.arange(length)  # slot of each position
    order[border:] = border + torch.randperm(length - border, generator=generator)
    order = order.to(setting.device)
    shuffled = [torch.empty_like(part).index_copy_(1, order, part) for part in (key, value)]

    def positions(start: int, stop: int) -> Tensor:
        return torch.arange(first + start, first + stop, device=setting.device)

    def prompt(start: int, stop: int) -> list[Tensor]:
        end = first + stop
        context = Context(positions(start, stop), -(-end // BLOCK), end)
        return [exact_attention(query[:, start:stop], key, value, context, ScoreOptions())]

    def tree(start: int, stop: int) -> list[Tensor]:
        num_blocks = border // BLOCK
        slots = order[num_blocks * BLOCK : first + stop]
        slots = pad(slots, (0, -len(slots) % BLOCK)).repeat(stop - start, 1)
        context = Context(positions(start, stop), num_blocks, num_blocks * BLOCK, slots)
        own = query[:, start:stop]
        return [exact_attention(own, shuffled[0], shuffled[1], context, ScoreOptions())]

    name = f"attention of {num_heads} x {head_dim}"
    shape = (num_heads, num_kv_heads, head_dim)
    return Operator(name, shape, MOST_ROWS, (prompt, tree), on_disk=True)
