"""Model pairs given by tables of logits: the next token depends only on the last one, so all
distributions are known exactly. They have stages, caches and tree nodes as other pairs do.

Shape letters: V vocabulary, S rows of a table (token t has row t modulo S), R rows of a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import torch

from specdec.attention.tree_attention import BlockPool, CacheSpec, Paged, Rows, TreeCache
from specdec.clocks.meter import Meter
from specdec.errors import UserError
from specdec.executors.exits import ExitStage
from specdec.executors.models import A, ModelPair
from specdec.executors.stage import ModelStage
from specdec.models.block import BlockRunner, Context
from specdec.models.eagle_runner import EagleRunner, HeadOutput
from specdec.models.exits import HeadWeights
from specdec.models.medusa import MedusaHeads
from specdec.models.runner import ModelRunner, RunnerOutput
from specdec.models.vocabulary import (
    TranslatedDraft,
    Translation,
    Vocabulary,
    fast_tokenizer,
    other_tokenizer,
    simple_tokenizer,
)
from specdec.sources.katz import KatzModel
from specdec.types import HiddenName, IntArray

_NUM_LAYERS = 64  # the largest number of stages
_NUM_SAMPLES = 64
_SAMPLE_LENGTH = 16


class TablePair(ModelPair):
    """Target and draft as tables of logits given the last token. The exit at ``exit_layer`` has
    the draft's table; deeper ones interpolate to the target's, halfway at twice that layer.
    """

    option = "table"
    dtype = "float64"
    num_layers = _NUM_LAYERS
    exit_layer = _NUM_LAYERS // 8
    max_positions = 1 << 20
    weight_bytes = MappingProxyType({"target": 0, "draft": 0})

    def __init__(
        self, *, target: Sequence[Sequence[float]], draft: Sequence[Sequence[float]]
    ) -> None:
        """Takes two tables [S, V], S <= V: logits of the next token (column) after tokens that are
        equal modulo S (row).
        """
        self.target_table = torch.tensor(target, dtype=torch.float64)
        self.draft_table = torch.tensor(draft, dtype=torch.float64)
        shape = self.target_table.shape
        if shape != self.draft_table.shape or len(shape) != 2 or not 0 < shape[0] <= shape[1]:
            raise UserError(
                f"model.target of shape {tuple(shape)} and model.draft of shape"
                f" {tuple(self.draft_table.shape)} must be tables of one size, with at most as many"
                " rows as columns"
            )
        self.vocab_size = shape[1]

    def stage(
        self, first: int, last: int, meter: Meter, capture: Sequence[HiddenName] = ()
    ) -> ModelStage:
        is_last = last == self.num_layers
        return _stage(TableRunner(self.target_table, "target", is_last, capture))

    def exit_stage(self, first: int, last: int, meter: Meter, exits: Sequence[int]) -> ExitStage:
        heads = {}
        for layer in exits:
            table = self.draft_table.lerp(self.target_table, 1 - self.exit_layer / layer)
            heads[layer] = _stage(TableRunner(table, "exit"))
        captured = [HiddenName(layer - 1) for layer in exits]
        return ExitStage(body=self.stage(first, last, meter, captured), heads=heads)

    def artefact(self, kind: type[A], **options: Any) -> A:
        layer = self.num_layers - 1
        makers: dict[type, Callable[..., Any]] = {
            HeadWeights: lambda layer: HeadWeights("table", layer, {}),
            MedusaHeads: lambda num_heads, **_: TableHeads(self.draft_table, num_heads, layer),
            BlockRunner: lambda untrained, **_: TableBlock(self.draft_table, layer, untrained),
            EagleRunner: lambda **_: TableEagle(self.draft_table, layer),
            TranslatedDraft: lambda **_: _translated(self.draft_table),
            KatzModel: lambda: KatzModel.from_pair(self),
        }
        make = makers.get(kind) or partial(super().artefact, kind)
        return cast("A", make(**options))

    def runner(self, name: str, meter: Meter) -> ModelRunner:
        if name != "draft":
            return super().runner(name, meter)
        return cast("ModelRunner", TableRunner(self.draft_table, "draft"))

    def token_samples(self) -> IntArray:
        shape = (_SAMPLE_LENGTH, _NUM_SAMPLES, self.vocab_size)
        noise = np.random.default_rng(0).gumbel(size=shape)
        tokens = [np.arange(_NUM_SAMPLES) % self.vocab_size]
        for step in noise:
            rows = tokens[-1] % len(self.draft_table)
            tokens.append((self.draft_table.numpy()[rows] + step).argmax(axis=1))
        return np.stack([*tokens, np.zeros(_NUM_SAMPLES, np.int64)], axis=1).ravel()


def _stage(runner: TableRunner) -> ModelStage:
    return ModelStage(runner=cast("ModelRunner", runner))


def _translated(table: torch.Tensor) -> TranslatedDraft:
    """Returns a draft of table [S, V] with another vocabulary: other ids, without some tokens."""
    size = table.shape[1]
    described = simple_tokenizer(size)
    num = len(described["model"]["merges"])
    other, parts = other_tokenizer(described, merges=num - max(1, num // 4))
    runner = TableRunner(table[:, [tokens[0] for tokens in parts]], "translated")
    sides = ((described, size, "model.target"), (other, len(parts), "model.translated"))
    target, draft = (Vocabulary(fast_tokenizer(d), size=n, end=None, name=m) for d, n, m in sides)
    return TranslatedDraft(
        cast("ModelRunner", runner), Translation(target, draft), vocab_size=size, weight_bytes=0
    )


class TableHeads:
    """Replaces ``MedusaHeads`` by exact distributions of later tokens, from transition matrices."""

    head_bytes = 0
    trained = True

    def __init__(self, table: torch.Tensor, num_heads: int, layer: int) -> None:
        self.num_heads, self.layer, self.vocab_size = num_heads, layer, table.shape[1]
        law = table.softmax(dim=1)
        rows = torch.arange(table.shape[1]) % len(table)
        between = torch.zeros(len(table), len(table), dtype=law.dtype).index_add(1, rows, law)
        self._laws = [law.log()]
        for _ in range(num_heads):
            law = between @ law
            self._laws.append(law.log())

    def logits(self, number: int, hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden[:, 0].to(torch.int64) % len(self._laws[number])
        return self._laws[number][rows]


class _Drafter:
    weight_bytes = 0
    target_ids: torch.Tensor | None = None

    def __init__(self, table: torch.Tensor, layer: int) -> None:
        self.vocab_size, self.names = table.shape[1], (HiddenName(layer),)
        self._table = table

    def target_logits(self, logits: torch.Tensor) -> torch.Tensor:
        return logits


class TableBlock(_Drafter):
    """Stand-in for ``BlockRunner`` with four draft tokens, by powers of the transition matrix.

    The logits depend on the anchor token, on the last state of the context and, for a DSpark
    drafter, on the token before.
    """

    trained = True
    has_confidence = False
    num_drafts = 4

    def __init__(self, table: torch.Tensor, layer: int, kind: str) -> None:
        super().__init__(table, layer)
        self.conditional = kind == "dspark"
        self._heads = TableHeads(table, self.num_drafts - 1, layer)

    def new_context(self) -> Context:
        return Context([])

    def read(self, context: Context, features: torch.Tensor) -> None:
        context.pairs = [(features[-1:], features[-1:])]
        context.length += len(features)

    def rows(self, context: Context, anchor: int) -> torch.Tensor:
        """Returns the logits of the draft tokens, [M, V], in place of hidden states."""
        token = torch.tensor([[anchor]])
        logits = [self._heads.logits(number, token) for number in range(self.num_drafts)]
        before = int(context.pairs[0][0]) % len(self._table)
        return torch.cat(logits) + self._table[before] / 2

    def logits(self, rows: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        bias = self._table[before % len(self._table)] / 2
        return rows + bias if self.conditional else rows


class TableEagle(_Drafter):
    """Stand-in for ``EagleRunner`` whose states are tokens. Its logits depend on the states, so
    that a wrong state changes the output.
    """

    def new_cache(self, capacity: int) -> TreeCache:
        return TableRunner(self._table, "eagle").new_cache(capacity)

    def forward(
        self,
        rows: Sequence[Rows],
        *,
        features: torch.Tensor,
        feature_rows: IntArray,
        states: torch.Tensor,
        logits_rows: IntArray,
    ) -> HeadOutput:
        tokens = torch.from_numpy(np.concatenate([part.tokens for part in rows]))
        before = torch.zeros(len(tokens), dtype=torch.int64)
        is_own = torch.ones(len(tokens), dtype=torch.bool)
        is_own[torch.from_numpy(feature_rows)] = False
        before[~is_own] = features.flatten().long()
        before[is_own] = states.flatten().long()
        num_rows = len(self._table)
        logits = self._table[tokens % num_rows] + self._table[before % num_rows] / 2
        return HeadOutput(tokens[:, None].double(), logits[torch.from_numpy(logits_rows)])


class TableRunner:
    """Stand-in for ``ModelRunner`` that reads logits from a table, with the same methods, caches
    and shapes; its hidden states are the tokens.
    """

    def __init__(
        self,
        table: torch.Tensor,
        name: str,
        is_last: bool = True,
        captured: Sequence[HiddenName] = (),
    ) -> None:
        self._captured = tuple(captured)
        self.name = name
        self.is_last = is_last
        self.vocab_size = table.shape[1]
        self.hidden_size = 1
        self.max_positions = 1 << 20
        self.dtype, self.device = table.dtype, table.device
        self.spec = CacheSpec(
            num_layers=1, num_kv_heads=1, head_dim=1, dtype=table.dtype, device=table.device
        )
        self._table = table

    def new_cache(self, capacity: int, pool: BlockPool | None = None) -> TreeCache:
        storage = None if pool is None else Paged(pool=pool)
        return TreeCache(spec=self.spec, capacity=capacity, storage=storage)

    def forward(
        self,
        rows: Sequence[Rows],
        *,
        hidden: torch.Tensor | None = None,
        logits_rows: np.ndarray | None = None,
    ) -> RunnerOutput:
        if hidden is None:
            tokens = torch.from_numpy(np.concatenate([part.tokens for part in rows]))
        else:
            tokens = hidden[:, 0].to(torch.int64)
        logits = None
        if self.is_last and (logits_rows is None or len(logits_rows)):
            selected = tokens if logits_rows is None else tokens[torch.from_numpy(logits_rows)]
            logits = self._table[selected % len(self._table)]
        passed = tokens[:, None].to(self.dtype)
        captured = dict.fromkeys(self._captured, passed)
        return RunnerOutput(hidden=passed, logits=logits, captured=captured)
