"""Pairs without models: made-up target tokens and a draft of known quality.

``build_synthetic`` draws the draft's quality from a law (``model=synthetic``); ``ReplayModels``
(``specdec.pairs.replay``) takes it from a record.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from specdec.clocks.meter import Meter
from specdec.errors import UserError
from specdec.executors.answerer import AnsweredRequest, Answerer
from specdec.executors.exits import ExitStage
from specdec.executors.stage import NullStage, Stage
from specdec.models.runner import ModelRunner
from specdec.parts.fields import Count, Index, Share, Text
from specdec.sampling.keyed_draws import KeyedDraws
from specdec.sources.hit_law import (
    Decays,
    HiddenPair,
    Odds,
    Shares,
    Stays,
    SyntheticPair,
    VocabSize,
)
from specdec.sources.pair import A
from specdec.types import Answers, Batch, Commit, HiddenName, IntArray

DRAFT_MODEL = "specdec.sources.DraftModelSource"
SYNTHETIC = "specdec.sources.SyntheticSource"

_TABLE = 512  # positions tabulated at a time
_REAL = "use model=tiny, model=hf or model=random"


class HiddenModels:
    """A pair whose target is a hidden token sequence per request.

    Attributes:
        hidden: the sequences and the draft's law.
        hidden_middle: the same sequences with the law of a middle model; None without one.
        option: the value of ``model=`` in messages.
    """

    is_synthetic = True
    hidden_middle: HiddenPair | None = None
    option = "synthetic"
    dtype = "float32"
    tokenizer = None
    eos_ids: frozenset[int] = frozenset()
    max_positions = None
    head_cost = 0.0

    def __init__(
        self,
        *,
        pair: HiddenPair,
        num_layers: int = 80,
        weight_bytes: tuple[int, int] = (0, 0),
        about: Mapping[str, Any] | None = None,
    ) -> None:
        """Wraps hidden sequences.

        Args:
            pair: the sequences and the draft's law.
            num_layers: of the target; the largest possible number of stages.
            weight_bytes: of target and draft.
            about: origin of a record: models, data, sampling; None for none.
        """
        self.about = dict(about or {})
        self.hidden = pair
        self.num_layers = num_layers
        self.weight_bytes = dict(zip(("target", "draft"), weight_bytes, strict=True))

    @property
    def vocab_size(self) -> int:
        """Size of the made-up vocabulary."""
        return self.hidden.vocab_size

    def stage(
        self, first: int, last: int, meter: Meter, *, capture: Sequence[HiddenName] = ()
    ) -> Stage:
        """A stage that computes nothing."""
        return NullStage()

    def answerer(self, *, draws: KeyedDraws, needs_probs: bool) -> Answerer:
        """Answers with the hidden sequences.

        Raises:
            UserError: ``needs_probs``; there are no distributions.
        """
        if needs_probs:
            raise UserError(
                f"model={self.option} has target tokens but no target distributions; use"
                " verifier=match"
            )
        return SyntheticAnswerer(self.hidden)

    @property
    def exit_layer(self) -> int:
        """Raises ``UserError``: there are no hidden states."""
        raise UserError(
            f"source=early_exit reads the target's hidden states, which model={self.option} does"
            f" not have; {_REAL}"
        )

    def exit_stage(self, first: int, last: int, meter: Meter, exits: Sequence[int]) -> ExitStage:
        """Raises ``UserError``, as ``exit_layer``."""
        raise AssertionError(self.exit_layer)

    def artefact(self, kind: type[A], **options: Any) -> A:
        """Raises ``UserError``: there are no weights and no text."""
        raise UserError(
            f"{kind.__name__} needs a model or text, which model={self.option} does not have;"
            f" {_REAL}, or source=draft_model"
        )

    def runner(self, name: str, meter: Meter) -> ModelRunner:
        """Raises ``UserError``: ``fitted_source`` replaces the draft model."""
        raise UserError(f"model={self.option} has no {name} model; choose source=synthetic")

    def fitted_source(self, source: Any, policy: Mapping[str, Any]) -> Any:
        """The source node with the pair's own draft in place of draft models.

        Args:
            source: configuration node of the source.
            policy: configuration node of the policy.
        """
        if isinstance(source, list):
            return [self.fitted_source(item, policy) for item in source]
        if not isinstance(source, Mapping):
            return source
        if source.get("_target_") == DRAFT_MODEL:
            return {"_target_": SYNTHETIC, "model": source.get("model", "draft")}
        return {key: self.fitted_source(value, policy) for key, value in source.items()}


class SyntheticModels(HiddenModels):
    """Plays a law of hits."""

    def __init__(self, *, covers: Literal["chain", "tree"], **keys: Any) -> None:
        """Takes what a hit means (``build_synthetic``) and the keys of ``HiddenModels``."""
        super().__init__(**keys)
        self._covers = covers

    def fitted_source(self, source: Any, policy: Mapping[str, Any]) -> Any:
        """See ``HiddenModels``.

        Raises:
            UserError: a policy other than chains for a law whose hits are those of a tree.
        """
        kind = str(policy.get("_target_"))
        if self._covers == "tree" and not kind.endswith((".Chain", ".RootOnly")):
            raise UserError(
                f"the law of model=synthetic has model.covers=tree: it says how often a whole tree"
                f" of its draft had the right token, so {kind} cannot grow another from it; use"
                " policy=chain with policy.gamma as deep as that tree"
            )
        return super().fitted_source(source, policy)


def build_synthetic(
    *,
    vocab_size: VocabSize = 32000,
    num_layers: Count = 80,
    weights: Shares = (0.4, 0.3, 0.3),
    top1: Shares = (0.95, 0.6, 0.3),
    decay: Decays = (2.5, 2.2, 1.8),
    miss: Shares = (0.0, 0.0, 0.0),
    stay: Stays = (),
    depth: Odds = (),
    group_shares: Sequence[Share] = (),
    group_weights: Sequence[Shares] = (),
    middle_top1: Sequence[Share] = (),
    covers: Literal["chain", "tree"] = "chain",
    draft_name: Text | None = None,
    origin: Text = "assumed",
    requests: Index = 0,
    seed: Index = 0,
) -> HiddenModels:
    """The models of ``SyntheticPair``, which has the other keys.

    Args:
        num_layers: of the target; the largest possible number of stages.
        middle_top1: ``top1`` of a model between draft and target, which is right wherever the draft
            is if its chances are larger; where both are wrong they agree. Empty: there is none.
        covers: what a hit is: the token of a chain, or some node of a measured tree.
        draft_name: of the draft that the law was measured with; the profile must have its time.
        origin: of the law, for result files.
        requests: that the law was fitted to, for the intervals of a plan; 0: not known.
    """
    law = partial(
        SyntheticPair,
        vocab_size=vocab_size,
        weights=weights,
        decay=decay,
        miss=miss,
        stay=stay,
        depth=depth,
        group_shares=group_shares,
        group_weights=group_weights,
        seed=seed,
    )
    about = {"law": origin, "draft": draft_name, "requests": requests or None}
    models = SyntheticModels(covers=covers, pair=law(top1=top1), num_layers=num_layers, about=about)
    models.hidden_middle = law(top1=middle_top1) if middle_top1 else None
    return models


class SyntheticAnswerer:
    """Answers from hidden sequences instead of a model."""

    def __init__(self, hidden: HiddenPair) -> None:
        """Takes the sequences."""
        self._hidden = hidden
        self._tokens: dict[int, IntArray] = {}  # request id -> hidden tokens by position

    def open(self, request: AnsweredRequest) -> None:
        """Does nothing: the sequence is keyed by the request's id."""

    def answer(self, batch: Batch, logits: torch.Tensor | None) -> tuple[Answers, ...]:
        """The hidden token after every row's position.

        A node off the target's path gets the same answer as the node on it. It is never used: a
        verifier follows matching children from the root and reads only answers on the path.
        """
        return tuple(
            Answers(
                request=rows.request,
                node_ids=rows.node_ids,
                tokens=self._at(rows.request, rows.positions + 1),
            )
            for rows in batch.trees
        )

    def _at(self, request_id: int, positions: IntArray) -> IntArray:
        """int64[n]: the hidden tokens at absolute positions."""
        last = int(positions.max(initial=0))
        known = self._tokens.get(request_id)
        if known is None or last >= len(known):
            known = self._hidden.tokens(request_id, np.arange(last + _TABLE))
            self._tokens[request_id] = known
        return known.take(positions)

    def commit(self, commits: Sequence[Commit]) -> None:
        """Does nothing."""

    def close(self, request_id: int) -> None:
        """Drops the request's tokens."""
        self._tokens.pop(request_id, None)
