"""Passes in which no row's result depends on the other rows: ``model.exact=true``.

Libraries choose kernels by the number of rows, and kernels add in different orders. The row counts
at which a row's bits stay equal depend on operator, shape, type, device and threads, so they are
found by tests when a runner is made: an operator's rows in a pass of 64 rows are the reference, and
a number of rows is *proved* if passes of that many, at several offsets and in several orders, give
equal bits. A test is no proof for all inputs, but kernels do not choose their order of additions by
values. A pass is then cut into passes of at most 64 rows in packing order, each padded with zero
rows to a proved number. Attention takes each row's keys in the order of their positions
(``specdec.attention.exact``); activations run in pieces; rotary tables are always computed for the
same number of rows. Plain decoding, trees, prompts and any number of requests use the same passes.

Results of the tests are cached in the process.

Shape letters: R rows, A rows whose logits are computed, E hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from specdec.attention.exact import (
    BLOCK,
    Context,
    ExactPlan,
    exact_attention,
    in_pieces,
    row_ranges,
)
from specdec.attention.tree_attention import EMPTY, Rows, ScoreOptions, TreeCache
from specdec.device import to_device
from specdec.errors import UserError
from specdec.models.config_values import config_value
from specdec.models.inspection import CERTIFIED
from specdec.models.runner import (
    ROW_COUNTS,
    Backend,
    Eager,
    ModelSlice,
    RunnerOutput,
    in_parts,
    round_up,
)
from specdec.types import IntArray, TreeRows

MOST_ROWS = ROW_COUNTS[-1]
"""The number of rows of the reference pass, and the largest number that one pass may have."""

_ACTIVATIONS = ("transformers.activations", "torch.nn.modules.activation")
_DISTINCT = 1024  # distinct columns of a matrix product's sample; further columns repeat them
_NORM_ELEMENTS = 1 << 19  # total size of the samples on which a norm is tested
_FOLLOWING = ("dynamic", "longrope")  # rope types whose frequencies depend on the last position


class Exact(Backend):
    """Runs exact passes; ``counts``, ascending, are the proved row counts, to which it pads."""

    def __init__(self, eager: Eager) -> None:
        """Tests operators and passes to find ``counts``; call ``use_exact_modules`` before."""
        self.layers = layers = eager.layers
        self._eager = eager
        self._group = None  # ranks must not wait for each other during proofs
        setting = Setting(layers.spec.dtype, layers.spec.device, torch.get_num_threads())
        self.counts = proved_counts(_operators(layers, setting), setting)
        whole = proved_counts([self._whole_pass()], setting)
        self.counts = tuple(count for count in self.counts if count in whole)
        self._group = layers.group

    def run(
        self, rows: Sequence[Rows], hidden: Tensor | None, logits_rows: IntArray | None
    ) -> RunnerOutput:
        if self._group is not None:
            self._agree(self._group)
        parts = list(row_ranges(rows, self.counts[-1]))
        return in_parts(parts, hidden, logits_rows, self._pass)

    def _pass(
        self, parts: Sequence[Rows], hidden: Tensor | None, logits_rows: IntArray
    ) -> RunnerOutput:
        device, num = self.layers.spec.device, sum(map(len, parts))
        num_rows = round_up(num, self.counts)
        if hidden is not None:
            hidden = pad(hidden.to(device), (0, 0, 0, num_rows - num))[None]
        step = ExactPlan(
            parts=parts, num_rows=num_rows, first_layer=self.layers.first_layer, hidden=hidden
        )
        packed = ([part.tokens for part in parts], [part.positions for part in parts])
        tokens, positions = (
            to_device(np.pad(np.concatenate(arrays), (0, num_rows - num)), device)
            for arrays in packed
        )
        num_logits, keep = len(logits_rows), None
        if self.layers.wants_logits(logits_rows):
            padding = round_up(num_logits, self.counts) - num_logits
            keep = to_device(np.pad(logits_rows, (0, padding)), device)
        output = self._eager.compute(step, tokens, positions, keep)
        return RunnerOutput(
            hidden=output.hidden[:num],
            logits=None if output.logits is None else output.logits[:num_logits],
            captured={name: states[:num] for name, states in output.captured.items()},
        )

    def _agree(self, group: Any) -> None:
        mine = torch.zeros(MOST_ROWS + 1, device=self.layers.spec.device)
        mine[list(self.counts)] = 1.0
        common = group.gather(mine).view(group.size, -1).amin(0)
        self.counts = tuple(common.nonzero().flatten().tolist())
        self._group = None

    def _whole_pass(self) -> Operator:
        layers, spec = self.layers, self.layers.spec
        config = layers.model.config.get_text_config()
        num_rows = min(MOST_ROWS, config.max_position_embeddings)
        tokens = np.arange(num_rows) % layers.vocab_size
        hidden: Tensor | None = None
        if not layers.is_first:
            generator = torch.Generator().manual_seed(0)
            drawn = torch.randn(num_rows, layers.hidden_size, generator=generator)
            hidden = drawn.to(dtype=spec.dtype, device=spec.device)
        cache = TreeCache(spec=spec, capacity=num_rows)
        logits_rows = None if layers.is_last else EMPTY

        def run(rows: Rows, start: int, stop: int) -> list[Tensor]:
            own = None if hidden is None else hidden[start:stop]
            output = self.run([rows], own, logits_rows)
            return [output.hidden, *([] if output.logits is None else [output.logits])]

        def fill(start: int) -> None:
            cache.truncate(0)
            if start:
                run(cache.rows(prefix_tokens=tokens[:start]), 0, start)

        def prompt(start: int, stop: int) -> list[Tensor]:
            fill(start)
            return run(cache.rows(prefix_tokens=tokens[start:stop]), start, stop)

        def chain(start: int, stop: int) -> list[Tensor]:
            fill(start)
            nodes, own = np.arange(start, stop), tokens[start:stop]
            tree = TreeRows.within(
                prefix_len=start, node_ids=nodes, tokens=own, parent_ids=nodes - 1
            )
            return run(cache.rows(tree=tree), start, stop)

        shapes = [(n, tuple(p.shape), p.stride()) for n, p in layers.model.named_parameters()]
        key = (config.to_json_string(), layers.first_layer, len(layers.options), *shapes)
        return Operator("the whole pass", key, num_rows, (prompt, chain))


# Modules.


class _Activation(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._inner = inner

    def forward(self, hidden: Tensor) -> Tensor:
        return in_pieces(self._inner, hidden)


class _Rotary(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._inner = inner

    def forward(self, hidden: Tensor, position_ids: Tensor, *args: Any) -> tuple[Tensor, ...]:
        num_rows = position_ids.shape[1]
        padded = pad(position_ids, (0, max(0, ROW_COUNTS[-1] - num_rows)))
        tables: tuple[Tensor, ...] = self._inner(hidden, padded, *args)
        return tuple(table[:, :num_rows] for table in tables)


class _CappedOutput(nn.Module):
    def __init__(self, inner: nn.Module, softcap: float) -> None:
        super().__init__()
        self.weight = inner.weight
        self._inner = inner
        self._softcap = softcap

    def forward(self, hidden: Tensor) -> Tensor:
        capped: Tensor = in_pieces(torch.tanh, self._inner(hidden) / self._softcap)
        return capped * self._softcap


def use_exact_modules(model: Any) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RotaryEmbedding"):
                setattr(parent, name, _Rotary(child))
            elif type(child).__module__ in _ACTIVATIONS:
                setattr(parent, name, _Activation(child))
    config = model.config.get_text_config()
    softcap = config_value(config, "final_logit_softcapping")
    if softcap:
        config.final_logit_softcapping = None
        for name, child in list(model.named_children()):
            if child is model.get_output_embeddings():
                setattr(model, name, _CappedOutput(child, softcap))


# Numbers of rows.

Layout = Callable[[int, int], Sequence[Tensor]]
"""Function (start, stop) that runs rows ``start`` .. ``stop`` - 1 of a sample, returns results."""


@dataclass(frozen=True, slots=True)
class Operator:
    """A part of a forward pass that must give a row the same bits whatever the other rows."""

    name: str  # for messages, such as "linear 192 x 512"
    key: Hashable  # everything that may decide which kernel runs, besides dtype, device and threads
    num_rows: int  # size of the sample, at most ``MOST_ROWS``
    # ways to run rows of the sample; the first one defines the reference
    layouts: tuple[Layout, ...]


@dataclass(frozen=True, slots=True)
class Setting:
    dtype: torch.dtype
    device: torch.device
    threads: int


_PROVED: dict[tuple[Setting, str, Hashable], tuple[int, ...]] = {}


def proved_counts(operators: Iterable[Operator], setting: Setting) -> tuple[int, ...]:
    """Returns, ascending, the row counts at which all operators give the reference pass's bits;
    UserError if an operator's bits depend on a row's index or layout even at ``MOST_ROWS`` rows.
    """
    counts = set(ROW_COUNTS)
    for operator in operators:
        key = (setting, operator.name, operator.key)
        if key not in _PROVED:
            with torch.inference_mode():
                _PROVED[key] = tuple(_proved(operator))
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
    return f"{dtype} on {setting.device} with {setting.threads} threads"


def _proved(operator: Operator) -> Iterator[int]:
    """Yields each of ``ROW_COUNTS`` at which all layouts equal the reference pass bit for bit."""
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


# Operators of transformers' modules.


def _operators(layers: ModelSlice, setting: Setting) -> Iterator[Operator]:
    _refuse_dependent(layers.model)
    spec = layers.spec
    yield attention_operator(layers.num_heads, spec.num_kv_heads, spec.head_dim, setting)
    yield from module_operators(layers.model, setting)


def _refuse_dependent(model: PreTrainedModel) -> None:
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
        yield make(module, weight, key, setting)


def _linear_operator(module: Any, weight: Tensor, key: Hashable, setting: Setting) -> Operator:
    """Builds the test of a linear layer, on samples whose results are nothing but rounding errors.

    Half of the terms of every sum are the negatives of the other half, in random order, so another
    order of additions changes most results; with the model's own values, rounding to 16 bits would
    hide the change.
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
    split = getattr(module, "split", None)  # inputs of a ``RowLinear`` that receives all of them
    if split is not None:
        sample = pad(sample[:, : split.stop - split.start], (split.start, 0))
    probe = copy.copy(module)
    probe.__dict__["weight"] = torch.empty_like(weight).copy_(matrix.T if transposed else matrix)
    if getattr(module, "bias", None) is not None:
        probe.__dict__["bias"] = torch.zeros_like(module.bias)
    name = f"linear {inputs} x {outputs}"
    return _row_operator(name, key, probe.forward, [sample], setting)


def _norm_operator(module: Any, weight: Tensor, key: Hashable, setting: Setting) -> Operator:
    """Builds the test of a norm on many samples, as only few reveal another order of additions."""
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
    """Builds the test of ``run``, a function of rows [1, R, I], in given and in rotated order."""
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
    """Builds the test of ``exact_attention``: rows run as a prompt, and again as tree nodes, for
    which the last keys are in shuffled slots and every row gathers its own keys.
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
    return Operator(name, shape, MOST_ROWS, (prompt, tree))
