"""Passes in which no row's result depends on the others: ``model.exact=true``.

A pass is cut into passes of at most 64 rows in packing order, and each is padded with zero rows to
a proved number of rows (``specdec.models.row_counts``). Attention takes each row's keys in the
order of their positions (``specdec.attention.exact``). Plain decoding, trees, prompts and any
number of requests use the same passes.

Shape letters: R rows, A rows whose logits are computed, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec.attention.exact import ExactStep, RowRange, packed, row_ranges
from specdec.attention.kv_cache import EMPTY, Rows, TreeCache
from specdec.attention.kv_storage import CacheSpec
from specdec.device import to_device
from specdec.kernels.graphs import round_up
from specdec.models.captured import RunnerOutput, concatenate
from specdec.models.row_counts import MOST_ROWS, Operator, Setting, proved_counts
from specdec.tensor_parallel.collective import Collective
from specdec.types import IntArray

Compute = Callable[[ExactStep, Tensor, Tensor, bool, Tensor], RunnerOutput]
"""The model's forward: (step, tokens int64[R], positions int64[R], whether to compute logits, rows
int64[A] whose logits are computed)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """What a runner's slice of a model takes and gives.

    Attributes:
        key: everything that distinguishes its passes from another model's, for the cache of proofs.
        first_layer: global index of its first layer.
        hidden_size: E for a slice that is not the first; None for the first.
        vocab_size, max_positions: of the model.
        has_logits: whether it ends with the output head.
    """

    key: Hashable
    first_layer: int
    hidden_size: int | None
    vocab_size: int
    max_positions: int
    has_logits: bool


class ExactPasses:
    """Runs the passes of one runner.

    Attributes:
        counts: proved numbers of rows, ascending.
    """

    def __init__(
        self,
        *,
        spec: CacheSpec,
        layers: Slice,
        compute: Compute,
        operators: Iterable[Operator],
        setting: Setting,
        group: Collective | None = None,
    ) -> None:
        """Proves the operators, then whole passes.

        Args:
            spec: shape and type of the runner's caches.
            layers: the runner's slice.
            compute: its forward.
            operators: what the forward consists of.
            setting: type, device, threads and backend.
            group: tensor-parallel ranks, which must use the same numbers of rows.

        Raises:
            UserError: an operator, or the whole pass, cannot be proved.
        """
        self._spec = spec
        self._layers = layers
        self._compute = compute
        self._group: Collective | None = None  # ranks do not wait for each other during proofs
        self.counts = proved_counts(operators, setting)
        whole = proved_counts([self._whole_pass()], setting)
        self.counts = tuple(count for count in self.counts if count in whole)
        self._group = group

    def run(
        self,
        rows: Sequence[Rows],
        hidden: Tensor | None,
        logits_rows: IntArray | None,
        wants_logits: bool,
    ) -> RunnerOutput:
        """One or more passes; arguments as for ``ModelRunner.forward``."""
        if self._group is not None:
            self._agree(self._group)
        hidden = None if hidden is None else hidden.to(self._spec.device)
        total = sum(map(len, rows))
        wanted = np.zeros(total, np.bool_)
        if wants_logits:
            wanted[slice(None) if logits_rows is None else logits_rows] = True
        outputs, start = [], 0
        for parts in row_ranges(rows, self.counts[-1]):
            stop = start + sum(map(len, parts))
            own = None if hidden is None else hidden[start:stop]
            outputs.append(self._pass(parts, stop - start, own, np.flatnonzero(wanted[start:stop])))
            start = stop
        output = outputs[0] if len(outputs) == 1 else concatenate(outputs)
        if output.logits is None or logits_rows is None:
            return output
        order = np.searchsorted(np.flatnonzero(wanted), logits_rows)
        if np.array_equal(order, np.arange(len(output.logits))):
            return output
        return replace(output, logits=output.logits[to_device(order, self._spec.device)])

    def _pass(
        self, parts: Sequence[RowRange], num: int, hidden: Tensor | None, logits_rows: IntArray
    ) -> RunnerOutput:
        """One padded pass over ``num`` rows; results of the padding are dropped."""
        device = self._spec.device
        num_rows = round_up(num, self.counts)
        if hidden is not None:
            hidden = pad(hidden, (0, 0, 0, num_rows - num))[None]
        step = ExactStep(
            parts=parts, num_rows=num_rows, first_layer=self._layers.first_layer, hidden=hidden
        )
        tokens, positions = (
            to_device(packed(parts, name, num_rows), device) for name in ("tokens", "positions")
        )
        num_logits = len(logits_rows)
        if num_logits:
            logits_rows = np.pad(logits_rows, (0, round_up(num_logits, self.counts) - num_logits))
        output = self._compute(
            step, tokens, positions, num_logits > 0, to_device(logits_rows, device)
        )
        return RunnerOutput(
            hidden=output.hidden[:num],
            logits=None if output.logits is None else output.logits[:num_logits],
            captured={name: states[:num] for name, states in output.captured.items()},
        )

    def _agree(self, group: Collective) -> None:
        """Keeps the counts that every rank of the group has proved; once."""
        mine = torch.zeros(MOST_ROWS + 1, device=self._spec.device)
        mine[list(self.counts)] = 1.0
        common = group.gather(mine).view(group.size, -1).amin(0)
        self.counts = tuple(common.nonzero().flatten().tolist())
        self._group = None

    def _whole_pass(self) -> Operator:
        """Rows of one prompt in a pass, and the same rows as a chain of a tree."""
        layers = self._layers
        num_rows = min(MOST_ROWS, layers.max_positions)
        tokens = np.arange(num_rows) % layers.vocab_size
        hidden: Tensor | None = None
        if layers.hidden_size is not None:
            generator = torch.Generator().manual_seed(0)
            drawn = torch.randn(num_rows, layers.hidden_size, generator=generator)
            hidden = drawn.to(dtype=self._spec.dtype, device=self._spec.device)
        cache = TreeCache(spec=self._spec, capacity=num_rows)
        logits_rows = None if layers.has_logits else EMPTY

        def run(rows: Rows, start: int, stop: int) -> list[Tensor]:
            own = None if hidden is None else hidden[start:stop]
            output = self.run([rows], own, logits_rows, layers.has_logits)
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
            nodes = np.arange(start, stop)
            rows = cache.rows(
                node_ids=nodes,
                node_tokens=tokens[start:stop],
                parent_ids=nodes - 1,
                node_positions=nodes,
            )
            return run(rows, start, stop)

        return Operator("the whole pass", layers.key, num_rows, (prompt, chain))
