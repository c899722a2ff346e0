"""Pairs whose target tokens are given: by an acceptance model, a record or a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from specdec.clocks.meter import Meter
from specdec.errors import UserError
from specdec.executors.models import ModelPair
from specdec.executors.stage import Answerer, Stage
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
from specdec.types import Answers, Batch, HiddenName, IntArray

DRAFT_MODEL = "specdec.sources.DraftModelSource"
SYNTHETIC = "specdec.sources.SyntheticSource"

_TABLE = 512  # positions tabulated at a time


class RecordedPair(ModelPair):
    """A pair whose target is a token sequence per request that is given instead of computed.

    The draft is represented by its ranks of the target's tokens (``hidden``), drawn from an
    acceptance model or recorded. ``SyntheticSource`` proposes from these; other sources with a
    draft are refused. ``hidden_middle`` has a middle model's ranks of the same tokens.
    """

    is_synthetic = True
    option = "synthetic"
    dtype = "float32"
    hidden_middle: HiddenPair | None = None

    def __init__(
        self,
        hidden: HiddenPair,
        *,
        num_layers: int = 80,
        weight_bytes: tuple[int, int] = (0, 0),
        about: Mapping[str, Any] | None = None,
    ) -> None:
        """Stores the sequences; ``weight_bytes`` are those of target and draft."""
        self.hidden, self.vocab_size = hidden, hidden.vocab_size
        self.num_layers = num_layers
        self.weight_bytes = dict(zip(("target", "draft"), weight_bytes, strict=True))
        self.about = dict(about or {})

    def sequences(self, model: str) -> HiddenPair:
        if model != "middle":
            return self.hidden
        if self.hidden_middle is None:
            raise UserError(
                "this strategy needs a middle model, whose law model=synthetic has under"
                " model.middle_top1: give one chance per class of positions"
            )
        return self.hidden_middle

    def stage(
        self, first: int, last: int, meter: Meter, *, capture: Sequence[HiddenName] = ()
    ) -> Stage:
        return Stage()

    def answerer(self, *, draws: KeyedDraws, needs_probs: bool) -> Answerer:
        if needs_probs:
            raise UserError(
                f"model={self.option} has target tokens but no target distributions; use"
                " verifier=match"
            )
        return SyntheticAnswerer(self.hidden)

    def fitted_source(self, source: Any, policy: Mapping[str, Any]) -> Any:
        if isinstance(source, list):
            return [self.fitted_source(item, policy) for item in source]
        if not isinstance(source, Mapping):
            return source
        if source.get("_target_") == DRAFT_MODEL:
            return {"_target_": SYNTHETIC, "model": source.get("model", "draft")}
        return {key: self.fitted_source(value, policy) for key, value in source.items()}


class SyntheticModels(RecordedPair):
    """Draws target tokens and the draft's ranks from an acceptance model.

    Attributes:
        covers: whose acceptance the model describes: "chain" for the token of a chain, "tree" for
            any node of a measured tree.
    """

    covers: Literal["chain", "tree"] = "chain"

    def fitted_source(self, source: Any, policy: Mapping[str, Any]) -> Any:
        kind = str(policy.get("_target_"))
        if self.covers == "tree" and not kind.endswith((".Chain", ".RootOnly")):
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
) -> SyntheticModels:
    """Builds the models of ``model=synthetic``; ``SyntheticPair`` describes the other keys.

    Args:
        num_layers: layers of the target, the largest possible number of stages.
        middle_top1: ``top1`` of a model between draft and target, which is right wherever the draft
            is if its chances are larger; where both are wrong they agree. Empty: there is none.
        covers: see ``SyntheticModels``.
        draft_name: the draft with which the acceptance was measured; the profile must have its
            time.
        origin: origin of the values, for result files.
        requests: number of requests that the values were fitted to, for the confidence intervals of
            a plan; 0: not known.
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
    models = SyntheticModels(law(top1=top1), num_layers=num_layers, about=about)
    models.covers = covers
    models.hidden_middle = law(top1=middle_top1) if middle_top1 else None
    return models


class SyntheticAnswerer(Answerer):
    def __init__(self, hidden: HiddenPair) -> None:
        self._hidden = hidden
        self._tokens: dict[int, IntArray] = {}  # request id -> hidden tokens by position

    def answer(self, batch: Batch, logits: torch.Tensor | None) -> tuple[Answers, ...]:
        """Answers with the given token after every row's position.

        A node off the target's path gets the same answer as the node on it. This answer is never
        used: a verifier follows matching children from the root and reads only answers on the path.
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
        last = int(positions.max(initial=0))
        known = self._tokens.get(request_id)
        if known is None or last >= len(known):
            known = self._hidden.tokens(request_id, np.arange(last + _TABLE))
            self._tokens[request_id] = known
        return known.take(positions)

    def close(self, request_id: int) -> None:
        self._tokens.pop(request_id, None)
