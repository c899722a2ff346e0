"""Fits an acceptance model to logs, and checks it on requests that it has not seen."""

import json
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specdec.errors import UserError
from specdec.fitting.estimate import (
    choose_size,
    draft_tokens,
    fit_model,
    measured,
    observe,
    predicted,
)
from specdec.fitting.model import AcceptanceModel, RankTail, class_decays, tail_of
from specdec.fitting.requests import AcceptanceLog, RequestLog, with_draft_tokens

_LEAST = 20  # verified draft tokens, fewer are refused


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutCheck:
    name: str
    requests: int
    draft_tokens: float  # mean number per pass
    measured: float
    predicted: float
    margin: float  # half of the 95 % interval of what such requests would measure; NaN: unknown

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1.0

    @property
    def is_inside(self) -> bool:
        return abs(self.predicted - self.measured) <= self.margin

    def __str__(self) -> str:
        text = (
            f"{self.name}: {self.requests} requests, {self.draft_tokens:.1f} draft tokens per pass:"
            f" measured {self.measured:.3f} tokens per pass, predicted {self.predicted:.3f},"
            f" {self.error:+.1%}"
        )
        if math.isnan(self.margin):
            return text
        low, high = self.predicted - self.margin, self.predicted + self.margin
        verdict = "inside" if self.is_inside else "outside"
        return f"{text} (95 % interval {low:.3f} to {high:.3f}, {verdict})"


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedModel:
    model: AcceptanceModel
    tail: RankTail  # ranks of the target's token where the first candidate is wrong
    covers_tree: bool = False  # a hit means that any node of a tree was right
    requests: int = 0
    draft_tokens: float = 0.0
    held_out: HeldOutCheck | None = None  # of a model of this size, fitted to the other requests
    checks: tuple[HeldOutCheck, ...] = ()  # of this model, with further logs
    notes: tuple[str, ...] = ()  # what was inferred rather than stated in the logs

    def model_option(self) -> dict[str, Any]:
        model = self.model
        option = {
            "weights": model.weights,
            "top1": model.top1,
            "decay": class_decays(model.top1, self.tail),
            "miss": np.full(len(model.top1), self.tail.miss),
            **({"stay": model.stay} if model.stay.any() else {}),
            **({"depth": model.depth} if model.depth.any() else {}),
        }
        plain = {key: np.round(values, 4).tolist() for key, values in option.items()}
        return {**plain, "covers": "tree"} if self.covers_tree else plain

    def option_text(self, command: str, draft: str | None, source: str, terms: str) -> str:
        """Returns YAML for the option group ``model``; comments state the data's source, terms."""
        about = [
            f"Acceptance model by `specdec fit`: {source}",
            f"{self.requests} requests, {self.draft_tokens:.0f} draft tokens;"
            f" ranks: regression over 16 rank vectors",
            *([f"licence of the data: {terms}"] if terms else []),
            *([str(self.held_out)] if self.held_out else []),
            *self.notes,
            command,
        ]
        # A single request is a summary, which has no spread between requests.
        requests = {"requests": self.requests} if self.requests > 1 else {}
        option = {**self.model_option(), **requests, "draft_name": draft, "origin": source}
        wrapper = textwrap.TextWrapper(96, break_on_hyphens=False, break_long_words=False)
        lines = [f"# {part}" for line in about for part in wrapper.wrap(line)]
        lines += ["defaults:", "  - synthetic", "  - _self_"]
        return "\n".join(
            [*lines, *(f"{key}: {json.dumps(value)}" for key, value in option.items()), ""]
        )

    def report(self, lengths: Sequence[int]) -> str:
        model, classes = self.model, len(self.model.top1)
        by_depth = "hit rates by depth" if model.depth.any() else "no dependence on the depth"
        lines = [
            *(f"note: {note}" for note in self.notes),
            f"fitted to {self.requests} requests, {self.draft_tokens:.0f} draft tokens: {classes}"
            f" class{'es' * (classes > 1)} of positions, {by_depth}",
            f"hit rate of the first draft token {model.hit_rate():.3f}; ranks by regression over 16"
            f" rank vectors: decay {self.tail.decay:.2f}, beyond 64 {self.tail.miss:.1%} of"
            " the misses",
            *map(str, ([self.held_out] if self.held_out else []) + [*self.checks]),
            "draft tokens per pass -> tokens per pass:",
        ]
        if self.covers_tree:
            lengths, lines[-1] = [len(model.depth)], "depth of the tree -> tokens per pass:"
        cells = [f"{k}: {model.tokens_per_pass(k):.3f}" for k in lengths]
        rows = ["  " + "  ".join(cells[at : at + 7]) for at in range(0, len(cells), 7)]
        return "\n".join([*lines, *rows])


def fit_logs(
    logs: Sequence[AcceptanceLog],
    *,
    covers_tree: bool = False,
    holdout: int = 3,
    checks: Sequence[AcceptanceLog] = (),
) -> FittedModel:
    """Fits an acceptance model to logs of one target and draft.

    A second model of the same size, fitted without every ``holdout``-th request, predicts the
    tokens per pass of these requests; the first model predicts those of the logs ``checks``.
    """
    requests = [request for log in logs for request in with_draft_tokens(log)]
    if not requests:
        raise UserError("the logs have no target passes: there is nothing to fit")
    known = observe(requests).num_known
    if known < _LEAST:
        raise UserError(
            f"the logs have {known:g} verified draft tokens, too few to fit: give at least {_LEAST}"
        )
    size = choose_size(requests, chains=not covers_tree)
    model, held_out = fit_model(requests, size)[0], None
    if len(requests) > 3:
        kept = [request for at, request in enumerate(requests, start=1) if at % holdout]
        held = requests[holdout - 1 :: holdout]
        held_out = _check(fit_model(kept, size)[0], "held-out requests", kept, held)
    return FittedModel(
        model=model,
        tail=tail_of(model.hit_rate()),
        covers_tree=covers_tree,
        requests=len(requests),
        draft_tokens=known,
        held_out=held_out,
        checks=tuple(_check(model, log.path, requests, with_draft_tokens(log)) for log in checks),
        notes=tuple(dict.fromkeys(note for request in requests for note in request.notes)),
    )


def _check(
    model: AcceptanceModel, name: str, fitted: Sequence[RequestLog], new: Sequence[RequestLog]
) -> HeldOutCheck:
    if not new:
        raise UserError(f"{name!r} has no target passes, so it cannot be a check")
    value, (mean, _) = predicted(model, new), measured(new)
    errors = [error / mean for mean, error in (measured(fitted), measured(new))]
    known = [error for error in errors if not math.isnan(error)]
    numbers, passes = draft_tokens(new)
    return HeldOutCheck(
        name=name,
        requests=len(new),
        draft_tokens=float(np.average(numbers, weights=passes)),
        measured=mean,
        predicted=value,
        margin=1.96 * value * math.hypot(*known) if known else math.nan,
    )
