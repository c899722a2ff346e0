"""Checks the configured models with their dtype, backend and transport, greedy and sampled.

Batched and single-token passes round differently, so outputs may differ where two tokens are
equally good up to rounding. Each token is compared with that of plain decoding after the same
tokens. Where it differs, the distance by which plain decoding missed it is compared with the
measured effect of batching on the logits: up to it the difference is a *tie*, beyond it a fault.

Plain decoding is that of the torch model. A quantised target in ONNX Runtime rounds activations
too, which no torch model does: its reference is its own session with one row per pass, and the
effect of batching is measured at the position of the difference.

Under sampling the law is checked as well (``configured_law``): each token's place in the CDF of its
prefix, by the e-values of ``laws``.

Shape letters: V vocabulary, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, RepetitionPenaltyLogitsProcessor

from specdec.certify.cases import GREEDY, Case
from specdec.certify.laws import NUM_PLACE_TESTS, ORDERS, Evidence, place_evidence, places
from specdec.certify.oracle import (
    processed,
    reference_probs,
    reference_reason,
    reference_token,
    target_draw,
)
from specdec.certify.report import Check, joined_details
from specdec.certify.subject import Decoded, Subject, decode_cases, rank_groups
from specdec.clocks.meter import Meter
from specdec.compose.workbench import Parts
from specdec.device import on_host
from specdec.errors import UserError
from specdec.metrics.compare import first_difference
from specdec.models.slicing import cache_argument
from specdec.pairs import HuggingFacePair
from specdec.runs.jobs import prepare, stop_rules
from specdec.runs.runners import TokenPrompt
from specdec.sampling.transform import SamplingParams
from specdec.state import DecodeState, RequestState, StopRules
from specdec.types import BoolArray, FloatArray, Lossless, Verdict

_NUM_PROMPTS = 3
ROW_COUNTS = (2, 4, 8)  # of passes that are compared with passes of one row
_MAX_NEW_TOKENS = 24
_MAX_PROMPT_TOKENS = 64
_LAW_REQUESTS = 30  # of each sampling; half as many of large models, or over processes
_LAW_TOKENS = 10
_SMALL_BYTES = 1 << 27  # of weights
_LONG_PROMPT = 330
_LAW_BATCH = 6
_LAW_IDS = 7000  # of the first request

NUM_EXACT_PROMPTS = 2
NUM_EXACT_TOKENS = 160  # per prompt and sampling
_MAX_EXACT_PROMPT = 96
_EXACT_SAMPLING = SamplingParams(temperature=1.0)  # draws near a CDF edge show small differences


@dataclass(frozen=True, slots=True)
class Distance:
    """How far plain decoding was from choosing another token.

    The distance is a "top-two gap" in logits or a "CDF edge" in probability; for a token that a
    filter removed it is a "filter boundary and CDF edge". ``allowance`` is the largest distance
    that rounding explains, in the same unit.
    """

    kind: str
    value: float
    allowance: float

    @property
    def is_tie(self) -> bool:
        return self.value <= self.allowance


class SingleToken:
    """Computes logits of plain decoding: one token per pass, with transformers' own cache.

    ``rows`` has the float64[V] logits after each position so far.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.rows: list[FloatArray] = []
        self._model = model
        self._cache: Any = None

    def __call__(self, tokens: tuple[int, ...]) -> FloatArray:
        """Returns float64[V], the logits after ``tokens``, which must extend the last call's."""
        device, name = next(self._model.parameters()).device, cache_argument(self._model)
        with torch.inference_mode():
            for token in tokens[len(self.rows) :]:
                out = self._model(
                    torch.tensor([[token]], device=device),
                    use_cache=True,
                    **{name: self._cache},
                )
                self._cache = getattr(out, name)
                self.rows.append(out.logits[0, -1].to(torch.float64).cpu().numpy())
        return self.rows[-1]


def _whole_pass(model: PreTrainedModel, tokens: tuple[int, ...]) -> FloatArray:
    """Returns float64[T, V], the logits after each token, by one pass over all."""
    device = next(model.parameters()).device
    with torch.inference_mode():
        out = model(torch.tensor([list(tokens)], device=device), use_cache=False)
    found: FloatArray = out.logits[0].to(torch.float64).cpu().numpy()
    return found


def distance(
    logits: FloatArray, params: SamplingParams, draw: float, token: int, error: float
) -> Distance:
    """Measures how far plain decoding was from choosing ``token``, as the strategy did.

    Args:
        logits: float64[V] after the processors.
        draw: the uniform draw of plain decoding.
        error: the largest change of a logit by batching.
    """
    if params.greedy:
        return Distance("top-two gap", float(logits.max() - logits[token]), 2.0 * error)
    probs = reference_probs(logits, params)
    cdf = probs.cumsum()
    low, high = float(cdf[token] - probs[token]), float(cdf[token])
    lowest, highest = _possible_share(logits, params, token, error)
    kind = "CDF edge" if probs[token] > 0.0 else "filter boundary and CDF edge"
    if draw < low:
        return Distance(kind, low - draw, low - lowest)
    return Distance(kind, max(draw - high, 0.0), highest - high)


def _possible_share(
    logits: FloatArray, params: SamplingParams, token: int, error: float
) -> tuple[float, float]:
    """Bounds ``token``'s part of the CDF (lowest start, highest end) for logits within ``error``.

    Returns (inf, -inf) if no such logits let ``token`` pass the filters.
    """
    certain, possible = _filtered(logits, params, error)
    if not possible[token]:
        return np.inf, -np.inf
    least, most = _weights(logits, params, error, certain, possible)
    lowest = float(_share(least[:token].sum(), most[token:].sum()))
    highest = float(_share(most[: token + 1].sum(), least[token + 1 :].sum()))
    return lowest, highest


def _weights(
    logits: FloatArray,
    params: SamplingParams,
    error: float,
    certain: BoolArray,
    possible: BoolArray,
) -> tuple[FloatArray, FloatArray]:
    """Bounds the unnormalised probabilities, float64[V] each; 0 for a removed token."""
    weights = np.exp((logits - logits.max()) / params.temperature)
    swing = np.exp(min(error / params.temperature, 50.0))
    return np.where(certain, weights / swing, 0.0), np.where(possible, weights * swing, 0.0)


def _share(part: Any, rest: Any) -> Any:
    return part / np.maximum(part + rest, 1e-300)


def _filtered(
    logits: FloatArray, params: SamplingParams, error: float
) -> tuple[BoolArray, BoolArray]:
    """Returns bool[V], tokens certainly kept and possibly kept, for logits within ``error``."""
    certain, possible = np.ones((2, len(logits)), np.bool_)
    if 0 < params.top_k < len(logits):
        kth = np.sort(logits)[-params.top_k]
        certain, possible = logits > kth + 2.0 * error, logits >= kth - 2.0 * error
    if params.top_p == 1.0:
        return certain, possible
    least, most = _weights(logits, params, error, certain, possible)
    order = np.argsort(-logits, kind="stable")
    descending = -logits[order]
    least_to, most_to = (np.append(0.0, w[order].cumsum()) for w in (least, most))
    # Number of tokens that certainly and that possibly rank above each token.
    sure = np.searchsorted(descending, -logits - 2.0 * error, side="left")
    maybe = np.searchsorted(descending, -logits + 2.0 * error, side="right")
    lowest = _share(least_to[sure], most_to[-1] - most_to[sure])
    highest = _share(most_to[maybe] - most, least_to[-1] - least_to[maybe] + least)
    return certain & (highest < params.top_p), possible & (lowest < params.top_p)


class CannotCompose(UserError):
    """The strategy cannot decode the configured models, which is no fault of either."""


@dataclass(frozen=True, slots=True)
class _Configured:
    """The configured models, and what is decoded with them."""

    cfg: Mapping[str, Any]
    pair: HuggingFacePair
    prompts: Sequence[TokenPrompt]
    stop: StopRules

    @classmethod
    def of(cls, subject: Subject, name: str) -> _Configured | Check:
        """Loads the models once per subject; a skipped check if they have no logits."""
        kind = subject.cfg["model"]["kind"]
        if kind not in ("pretrained", "random"):
            return Check(name, None, f"model={kind} has no logits")
        if "configured" not in subject.notes:
            cfg = dict(subject.cfg)
            limit = min(cfg["data"]["limit"] or _NUM_PROMPTS, _NUM_PROMPTS)
            cfg["data"] = {**cfg["data"], "limit": limit}
            cfg["max_new_tokens"] = min(int(cfg["max_new_tokens"]), _MAX_NEW_TOKENS)
            try:
                pair, prompts, _ = prepare(cfg)
            except UserError as refusal:
                raise CannotCompose(str(refusal)) from refusal
            assert isinstance(pair, HuggingFacePair)
            subject.notes["configured"] = cls(cfg, pair, prompts, stop_rules(cfg, pair))
        found = subject.notes["configured"]
        assert isinstance(found, cls)
        return found

    @property
    def label(self) -> str:
        bits = self.pair.options.bits_of("target")
        return self.pair.dtype if bits is None else f"int{bits}"

    def passes(self, tokens: tuple[int, ...]) -> Passes:
        """Computes the logits after each token by passes of one row, and what more rows change."""
        if self.pair.options.bits_of("target") is None:
            single = SingleToken(self.pair.target)
            single(tokens)
            rows = np.stack(single.rows)
            error = np.abs(_whole_pass(self.pair.target, tokens) - rows).max()
            return Passes(rows, np.full(len(tokens), error))
        rows = self._session_rows(tokens, 1)
        sizes = (*ROW_COUNTS, len(tokens))
        changed = {size: np.abs(self._session_rows(tokens, size) - rows).max(1) for size in sizes}
        return Passes(rows, np.max([*changed.values()], 0), changed)

    def rows(self, prompt: tuple[int, ...], output: tuple[int, ...]) -> FloatArray:
        """Returns float64[T, V]: the logits from which each output token is drawn."""
        tokens, last = (*prompt, *output[:-1]), len(prompt) - 1
        if self.pair.options.bits_of("target") is None:
            return _whole_pass(self.pair.target, tokens)[last:]
        return self._session_rows(tokens, 1, first=len(prompt))[last:]

    def _session_rows(self, tokens: tuple[int, ...], size: int, *, first: int = 0) -> FloatArray:
        """The session itself is the reference: no torch model rounds activations as it does.

        After ``first`` tokens in one pass there are ``size`` tokens in each.
        """
        runner = self.pair.runner("target", Meter())
        cache, found = runner.new_cache(len(tokens)), []
        starts = [*([0] if first else []), *range(first, len(tokens), size), len(tokens)]
        for start, stop in pairwise(starts):
            part = np.array(tokens[start:stop])
            output = runner.forward([cache.rows(prefix_tokens=part)])
            assert output.logits is not None
            found.append(output.logits.to(torch.float64).numpy())
        return np.concatenate(found)

    @contextmanager
    def built(self, subject: Subject) -> Iterator[Parts]:
        try:
            parts = subject.build(self.cfg, self.pair)
        except UserError as refusal:
            raise CannotCompose(str(refusal)) from refusal
        try:
            yield parts
        finally:
            parts.executor.shutdown()


def numerics(subject: Subject) -> Check:
    """Checks that outputs of the configured models differ from plain decoding only at ties."""
    given = _Configured.of(subject, "numerics")
    if isinstance(given, Check):
        return given
    params = subject.sampling if subject.claims is Lossless.TOKEN else GREEDY
    cases = [
        Case(
            *(p.id, f"prompt {p.id}", tuple(p.tokens.tolist()[-_MAX_PROMPT_TOKENS:])),
            *(params, given.stop),
        )
        for p in given.prompts
    ]
    with given.built(subject) as parts:
        chunk = int(given.cfg["prefill_chunk"])
        outputs = decode_cases(parts, cases, batch_size=subject.batch_size, prefill_chunk=chunk)
    passes, texts, faults = list[Passes](), list[list[str]](), list[str]()
    for case in cases:
        decoded = outputs[case.id]
        passes.append(given.passes((*case.prompt, *decoded.output[:-1])))
        last = len(case.prompt) - 1
        found, faulty = _compare(
            subject, case, decoded, passes[-1].rows[last:], passes[-1].errors[last:]
        )
        texts.append(found)
        faults += found[-1:] if faulty else []
    differing = [found for found in texts if found]
    if subject.claims is Lossless.LOSSY:
        if not differing:
            return Check("numerics", None, f"{len(cases)} prompts happen to equal plain decoding")
        number = f"{len(differing)} of {len(cases)} prompts differ"
        shown = joined_details([found[0] for found in differing])
        return Check("numerics", False, f"lossy: {number}; {shown}")
    measured = _measured(passes)
    label = f"{given.label}, {len(cases)} prompts"
    if faults:
        return Check("numerics", False, f"{label}: {joined_details(faults)}; {measured}")
    ties = [text for found in differing for text in found]
    rest = "no ties"
    if ties:
        tokens = sum(len(outputs[case.id].output) for case in cases)
        rate = f"{len(ties)} ties in {tokens} tokens ({1000 * len(ties) / tokens:.1f} per 1,000)"
        rest = f"{rate}: {joined_details(ties)}"
    equal = f"{len(cases) - len(differing)} equal plain decoding"
    return Check("numerics", True, f"{label}: {equal}, {rest}; {measured}")


# ---------------------------------------------------------------------- laws


@dataclass(frozen=True)
class _Favoured:
    """Makes ``ids``, and a token that depends on the whole history, nearly as probable as the best.

    It writes into the scores, as transformers' interface allows.
    """

    ids: tuple[int, ...]

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        ids = [*self.ids, int(input_ids.sum()) % scores.shape[1]]
        scores[:, ids] = scores.max(dim=1, keepdim=True).values - 0.5
        return scores


def _law_cases(subject: Subject, given: _Configured) -> list[Case]:
    """Creates sampled requests with short, usual and long prompts, a few with the same prompt.

    Among the drawn tokens are the last ids and the token that ends a request.
    """
    vocab_size = given.pair.vocab_size
    last = tuple(range(vocab_size - 3, vocab_size))
    samplings = {
        "t=1": SamplingParams(temperature=1.0),
        "t=1.5 top_p=0.9": SamplingParams(temperature=1.5, top_p=0.9),
        "t=0.9 with processors": SamplingParams(
            temperature=0.9,
            no_repeat_ngram=3,
            processors=(RepetitionPenaltyLogitsProcessor(1.2), _Favoured(last)),
        ),
    }
    if not subject.sampling.greedy:
        samplings["as configured"] = subject.sampling
    is_small = given.pair.weight_bytes["target"] < _SMALL_BYTES and not rank_groups(subject.cfg)
    number = subject.times * (_LAW_REQUESTS if is_small else _LAW_REQUESTS // 2)
    room = (given.pair.max_positions or _LONG_PROMPT + _LAW_TOKENS + 1) - _LAW_TOKENS - 1
    room = min(room, given.cfg.get("serving", {}).get("kv_tokens") or room)
    text = np.concatenate([prompt.tokens for prompt in given.prompts])
    text = np.tile(text, 1 + (_LONG_PROMPT + 97) // len(text))
    cases = list[Case]()
    for name, params in samplings.items():
        eos = frozenset(last[-1:]) if params.processors else given.stop.eos_ids
        stop = StopRules(max_new_tokens=_LAW_TOKENS, eos_ids=eos)
        # Several at once fill whole passes of prompt tokens, beside nodes of trees.
        lengths = [_LONG_PROMPT] * (1 if cases and not params.processors else 4) + 20 * [
            4,
            40,
            9,
            70,
            23,
        ]
        for i in range(number):
            length = max(1, min(lengths[i // 2], room))
            start = 7 * (i // 2) % 97
            prompt = tuple(text[start : start + length].tolist())
            label = f"{name}, prompt of {length} tokens"
            cases.append(Case(_LAW_IDS + len(cases), label, prompt, params, stop))
    return cases


def configured_law(subject: Subject) -> Check:
    """Checks the law of sampled output with the configured models.

    With a verifier that is lossless token for token, each token is also compared with that of plain
    decoding. ``batch_size`` and larger batches take turns.
    """
    given = _Configured.of(subject, "configured_law")
    if isinstance(given, Check):
        return given
    if subject.claims is Lossless.LOSSY:
        return Check("configured_law", None, "a lossy output has another law")
    cases = _law_cases(subject, given)
    outputs: dict[int, Decoded] = {}
    with given.built(subject) as parts:
        drafts = _draft_laws(parts)
        chunk = int(given.cfg["prefill_chunk"])
        for part, size in ((cases[::2], subject.batch_size), (cases[1::2], _LAW_BATCH)):
            outputs |= decode_cases(parts, part, batch_size=size, prefill_chunk=chunk)
    measured = given.passes(cases[2].prompt)
    error, rounding = 2.0 * float(measured.errors.max()), float((measured.errors**2).mean())
    samplings = dict.fromkeys(case.sampling for case in cases)
    found = Evidence(num_tests=NUM_PLACE_TESTS * (1 + len(samplings)))
    faults, together, slack = list[str](), list[FloatArray](), 0.0
    rng = np.random.default_rng(subject.seed)
    for params in samplings:
        series = []
        for case in (case for case in cases if case.sampling == params):
            decoded = outputs[case.id]
            rows = given.rows(case.prompt, decoded.output)
            errors = np.full(len(rows), error)
            texts, faulty = _compare(
                subject, case, decoded, rows, errors, tokens=subject.claims is Lossless.TOKEN
            )
            faults += texts[-1:] if faulty else []
            series.append(_places(case, decoded.output, rows, drafts, rng))
        # Logits that differ by e from the reference's have a divergence of at most e ** 2 / 2 per
        # token from its law, and the logarithm of an e-value grows by no more in mean.
        own = sum(map(len, series)) * rounding / params.temperature**2
        name = next(case.label for case in cases if case.sampling == params).split(", prompt")[0]
        found.logs += [(f"{name}, {test}", value - own) for test, value in place_evidence(series)]
        together, slack = together + series, slack + own
    found.logs += [(f"all, {test}", value - slack) for test, value in place_evidence(together)]
    label = f"{given.label}, {len(cases)} requests, {sum(map(len, together))} tokens"
    if faults := faults + found.biased():
        return Check("configured_law", False, f"{label}: {joined_details(faults)}")
    equal = ", equal to plain decoding" if subject.claims is Lossless.TOKEN else ""
    return Check("configured_law", True, f"{label}{equal}; {found.passed}")


def _places(
    case: Case,
    output: tuple[int, ...],
    rows: FloatArray,
    drafts: Mapping[tuple[int, ...], FloatArray],
    rng: np.random.Generator,
) -> FloatArray:
    """Returns ``places`` of an output's tokens, without those that only rounding lets through."""
    found = []
    for at, (token, logits) in enumerate(zip(output, rows, strict=True)):
        prefix = (*case.prompt, *output[:at])
        law = reference_probs(processed(logits, case.sampling, prefix), case.sampling)
        if law[token] > 0.0:
            draft = drafts.get(prefix)
            same = draft is not None and len(draft) == len(law)
            found.append(places(law, draft if same else None, token, rng))
    return np.array(found).reshape(len(found), len(ORDERS))


def _draft_laws(parts: Parts) -> dict[tuple[int, ...], FloatArray]:
    """Records float32[V], the draft's distribution after each committed prefix that has one."""
    verify, found = parts.verifier.verify, dict[tuple[int, ...], FloatArray]()

    def observed(state: DecodeState, requests: Sequence[RequestState]) -> list[Verdict]:
        verdicts = verify(state, requests)
        for request, verdict in zip(requests, verdicts, strict=True):
            tree = request.tree
            for node_id in (tree.root_id, *verdict.accepted_ids.tolist()):
                if (probs := tree.draft_probs.get(node_id)) is not None:
                    (slot,) = tree.slots(np.array([node_id])).tolist()
                    path = tuple(request.path_tokens(slot).tolist())
                    found[path] = on_host(probs).astype(np.float32)
        return verdicts

    parts.verifier.__dict__["verify"] = observed
    return found


@dataclass(frozen=True, slots=True)
class Passes:
    """Logits of one sequence by passes of one row, and what passes of more rows change.

    Attributes:
        rows: float64[T, V], the logits after each token.
        errors: float64[T], the largest change of a logit by passes of more rows.
        changed: number of rows in a pass -> float64[T], largest change of a logit; 0: equal bits.
    """

    rows: FloatArray
    errors: FloatArray
    changed: Mapping[int, FloatArray] = field(default_factory=dict)


def _measured(passes: Sequence[Passes]) -> str:
    if not passes[0].changed:
        error = max(p.errors.max() for p in passes)
        return f"batched and single-token logits differ by up to {error:.1e}"
    parts = []
    for size in ROW_COUNTS:
        changed = np.concatenate([p.changed[size] for p in passes])
        parts.append(f"{size} rows: {np.mean(changed > 0.0):.0%}, by up to {changed.max():.1e}")
    largest = max(np.abs(p.rows).max() for p in passes)
    return (
        f"logits that differ in bits from a pass of one row, in passes of {'; '.join(parts)}"
        f" (largest logit {largest:.3g})"
    )


def _compare(
    subject: Subject,
    case: Case,
    decoded: Decoded,
    rows: FloatArray,
    errors: FloatArray,
    *,
    tokens: bool = True,
) -> tuple[list[str], bool]:
    """Compares each token with the one of plain decoding after the same tokens.

    Args:
        rows: float64[T, V], the logits of plain decoding for each output token.
        errors: float64[T], by how much rounding may change them.
        tokens: whether tokens must be those of plain decoding; else only the end must be right.

    Returns:
        The differences up to the first that is no tie, and whether the last one is none.
    """
    output, texts = decoded.output, list[str]()
    for at, token in enumerate(output):
        prefix = (*case.prompt, *output[:at])
        logits = processed(rows[at], case.sampling, prefix)
        draw = target_draw(subject.seed, case.id, len(prefix)) if tokens else 0.5
        expected = reference_token(logits, case.sampling, draw) if tokens else token
        possible = tokens or reference_probs(logits, case.sampling)[token] > 0.0
        if token != expected or not possible:
            nearest = distance(logits, case.sampling, draw, token, float(errors[at]))
            how = "a tie" if nearest.is_tie else "beyond"
            texts.append(
                f"{_difference(case, decoded, (*output[:at], expected), at)}, {nearest.kind}"
                f" {nearest.value:.1e} ({how} {nearest.allowance:.1e})"
            )
            if not nearest.is_tie:
                return texts, True
        ends = reference_reason(output[: at + 1], case.stop) is not None
        if ends != (at == len(output) - 1):
            return [*texts, f"{case.label}, token {at + 1}: one output ends"], True
    return texts, not output


def _difference(case: Case, decoded: Decoded, expected: Sequence[int], at: int) -> str:
    where = f"{case.label}, token {at}"
    if at >= min(len(decoded.output), len(expected)):
        return f"{where}: one output ends"
    return f"{where}: {decoded.output[at]} from {decoded.proposer(at)} instead of {expected[at]}"


def exact_dtype(subject: Subject) -> Check:
    """Checks with ``model.exact=true`` that outputs in the configured dtype equal plain decoding.

    Plain decoding here is the preset ``ar`` on the same pair: on one device, or on the same
    tensor-parallel group, whose sums define the bits. There is no tolerance for ties.
    """
    model = subject.cfg["model"]
    if not model.get("exact"):
        return Check("exact_dtype", None, "model.exact=false: rounding may decide between tokens")
    if subject.claims is Lossless.LOSSY:
        return Check("exact_dtype", None, "a lossy output has no reference")
    given = _Configured.of(subject, "exact_dtype")
    if isinstance(given, Check):
        return given
    pair = given.pair
    room = (pair.max_positions or NUM_EXACT_TOKENS + _MAX_EXACT_PROMPT) - 1
    longest = min(_MAX_EXACT_PROMPT, max(1, room - NUM_EXACT_TOKENS))
    stop = StopRules(max_new_tokens=min(NUM_EXACT_TOKENS, room - longest))
    samplings = [GREEDY]
    if subject.claims is Lossless.TOKEN:
        samplings += [_EXACT_SAMPLING if subject.sampling.greedy else subject.sampling]
    cases = [
        Case(
            2 * prompt.id + number,
            f"prompt {prompt.id}, {'greedy' if params.greedy else 'sampled'}",
            tuple(prompt.tokens.tolist()[-longest:]),
            params,
            stop,
        )
        for prompt in given.prompts[:NUM_EXACT_PROMPTS]
        for number, params in enumerate(samplings)
    ]
    with subject.built(plain_config(subject.cfg), pair) as parts:
        expected = decode_cases(parts, cases)
    chunk = int(subject.cfg["prefill_chunk"])
    with subject.built(subject.cfg, pair) as parts:
        outputs = decode_cases(parts, cases, batch_size=subject.batch_size, prefill_chunk=chunk)
    compared = [(case, outputs[case.id], expected[case.id]) for case in cases]
    problems = [
        _difference(case, decoded, other.output, at)
        for case, decoded, other in compared
        if (at := first_difference(decoded.output, other.output)) is not None
    ]
    num_tokens = sum(len(outputs[case.id].output) for case in cases)
    detail = f"{pair.dtype}, {torch.get_num_threads()} threads, {num_tokens} tokens"
    if problems:
        return Check("exact_dtype", False, f"{detail}: {joined_details(problems)}")
    return Check("exact_dtype", True, f"{detail}: no difference from plain decoding")


def plain_config(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Replaces the parts of ``cfg`` by those of plain decoding, whose output is the reference.

    Tensor-parallel executors are kept, because the order of their sums is part of the reference.
    """
    executor = cfg["executor"]
    if not executor.get("target_degree"):
        executor = {"_target_": "specdec.executors.LocalExecutor"}
    return {
        **cfg,
        "source": {"_target_": "specdec.sources.NullSource"},
        "policy": {"_target_": "specdec.policies.RootOnly"},
        "verifier": {"_target_": "specdec.verifiers.MatchVerifier"},
        "executor": executor,
        "trace": False,
    }
