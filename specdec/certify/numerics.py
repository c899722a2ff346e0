"""Checks the configured models with their dtype, backend and transport, greedy and sampled.

Outputs are compared with plain decoding; differences that rounding explains (*ties*, ``oracle``)
are no faults. Plain decoding runs the torch model. Only a quantised target in ONNX Runtime rounds
as no torch model does: there plain decoding runs this session row by row, and measures rounding.

Under sampling the distribution is tested too (``configured_law``), by the e-values of ``laws`` for
each token's position in the target's CDF after its prefix.

Shape letters: V vocabulary, T tokens.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import pad
from transformers import PreTrainedModel, RepetitionPenaltyLogitsProcessor

from specdec.certify.cases import GREEDY, Case, Decoded
from specdec.certify.laws import NUM_PLACE_TESTS, ORDERS, Evidence, place_evidence, places
from specdec.certify.oracle import (
    Difference,
    differences,
    forward,
    processed,
    reference_probs,
    rejection_verdict,
    unequal,
    whole_pass,
)
from specdec.certify.report import Outcome, Skipped, joined_details
from specdec.certify.subject import CannotCompose, Subject, decode_cases, observe, rank_groups
from specdec.clocks.meter import Meter
from specdec.compose.workbench import Parts
from specdec.device import on_host
from specdec.errors import UserError
from specdec.models.slicing import cache_argument
from specdec.pairs import HuggingFacePair, build_pair
from specdec.runs.jobs import prepare, stop_rules
from specdec.runs.runners import TokenPrompt
from specdec.sampling.transform import SamplingParams
from specdec.state import DecodeState, RequestState, StopRules
from specdec.types import FloatArray, Lossless, Verdict
from specdec.verifiers import RejectionVerifier

_NUM_PROMPTS, _NUM_EXACT_PROMPTS = 3, 2
_NUM_TOKENS, _LAW_TOKENS, _EXACT_TOKENS = 24, 10, 160  # of an output, at most
_MAX_PROMPT, _LAW_PROMPT, _EXACT_PROMPT = 64, 330, 96  # tokens of the longest
_ROW_COUNTS = (2, 4, 8)  # of passes that are compared with passes of one row
_LAW_REQUESTS = 30  # of each sampling; half with token parity, large models, or over processes
_SMALL_BYTES, _LOADED_BYTES = 1 << 27, 1 << 30  # of weights; of those that are loaded again
_LAW_BATCH = 6
_BITS = {"int8": 8, "int4": 4}  # of a target's weights, by ``model.quantization``
_BLOCK = 32  # inputs that share a scale
_UNNORMALISED = 1e-3  # by which float32 probabilities of a draft may miss a sum of 1


@dataclass(frozen=True, slots=True)
class _Configured:
    """The configured models, with the prompts and stop rules to decode."""

    subject: Subject
    cfg: Mapping[str, Any]
    pair: HuggingFacePair
    prompts: Sequence[TokenPrompt]
    stop: StopRules

    @property
    def bits(self) -> int | None:
        """Bits of a weight of a quantised target; None: not quantised. Not what the pair says: it
        may have rounded another model than the configured one.
        """
        return _BITS.get(self.cfg["model"].get("quantization"))

    @property
    def label(self) -> str:
        return f"int{self.bits}" if self.bits else self.pair.dtype

    def decode(self, parts: Parts, cases: Sequence[Case], size: int = 0) -> dict[int, Decoded]:
        size, chunk = size or self.subject.batch_size, int(self.cfg["prefill_chunk"])
        return decode_cases(parts, cases, batch_size=size, prefill_chunk=chunk)

    def differences(
        self, case: Case, decoded: Decoded, rows: FloatArray, errors: FloatArray
    ) -> list[Difference]:
        seed, exact = self.subject.seed, self.subject.claims is not Lossless.DISTRIBUTION
        tokens = exact or case.sampling.greedy
        return [*differences(case, decoded, rows, seed=seed, errors=errors, tokens=tokens)]

    def passes(self, tokens: tuple[int, ...]) -> tuple[FloatArray, FloatArray]:
        """Returns float64[T, V], the logits after each token by passes of one row, and float64[T],
        by how much passes of more rows change a logit at most.
        """
        if self.bits is None:
            rows = _single_tokens(self.pair.target, tokens)
            error = np.abs(whole_pass(self.pair.target, tokens) - rows).max()
            return rows, np.full(len(tokens), error)
        rows = self._session_rows(tokens, 1)
        others = [self._session_rows(tokens, size) for size in (*_ROW_COUNTS, len(tokens))]
        return rows, np.max([np.abs(other - rows).max(1) for other in others], axis=0)

    def rows(self, prompt: tuple[int, ...], output: tuple[int, ...]) -> FloatArray:
        """Returns float64[T, V]: the logits from which each output token is sampled."""
        tokens, last = (*prompt, *output[:-1]), len(prompt) - 1
        if self.bits is None:
            return whole_pass(self.pair.target, tokens)[last:]
        return self._session_rows(tokens, 1, first=len(prompt))[last:]

    def _session_rows(self, tokens: tuple[int, ...], size: int, *, first: int = 0) -> FloatArray:
        """Returns float64[T, V], the logits of the quantised ONNX Runtime session after each token.

        The first ``first`` tokens are one pass, then every pass has at most ``size`` tokens.
        """
        runner, found = self.pair.runner("target", Meter()), []
        cache = runner.new_cache(len(tokens))
        starts = sorted({0, *range(first, len(tokens), size), len(tokens)})
        for start, stop in pairwise(starts):
            output = runner.forward([cache.rows(prefix_tokens=np.array(tokens[start:stop]))])
            assert output.logits is not None
            found.append(output.logits.to(torch.float64).numpy())
        return np.concatenate(found)


def _configured(subject: Subject) -> _Configured:
    kind = subject.cfg["model"]["kind"]
    if kind not in ("pretrained", "random"):
        raise Skipped(f"model={kind} has no logits")
    cfg = dict(subject.cfg)
    limit = min(cfg["data"]["limit"] or _NUM_PROMPTS, _NUM_PROMPTS)
    cfg["data"] = {**cfg["data"], "limit": limit}
    cfg["max_new_tokens"] = min(int(cfg["max_new_tokens"]), _NUM_TOKENS)
    try:
        pair, prompts, _ = prepare(cfg)
    except UserError as refusal:
        raise CannotCompose(str(refusal)) from refusal
    assert isinstance(pair, HuggingFacePair)
    return _Configured(subject, cfg, pair, prompts, stop_rules(cfg, pair))


def _single_tokens(model: PreTrainedModel, tokens: Sequence[int]) -> FloatArray:
    """Returns float64[T, V], the logits after each token, by a pass per token with a cache."""
    cache, name, rows = None, cache_argument(model), []
    for token in tokens:
        out = forward(model, [token], use_cache=True, **{name: cache})
        cache = getattr(out, name)
        rows.append(out.logits[0, -1].to(torch.float64).cpu().numpy())
    return np.stack(rows)


def numerics(subject: Subject) -> Outcome:
    given = subject.once(_configured)
    params = subject.sampling if subject.claims is Lossless.TOKEN else GREEDY
    cases = [
        Case(p.id, f"prompt {p.id}", tuple(p.tokens.tolist()[-_MAX_PROMPT:]), params, given.stop)
        for p in given.prompts
    ]
    with subject.built(given.cfg, given.pair) as parts:
        outputs = given.decode(parts, cases)
    ties, faults, equal, largest = list[str](), list[str](), 0, 0.0
    for case in cases:
        output, last = outputs[case.id].output, len(case.prompt) - 1
        rows, errors = given.passes((*case.prompt, *output[:-1]))
        found = given.differences(case, outputs[case.id], rows[last:], errors[last:])
        equal, largest = equal + (not found), max(largest, float(errors.max()))
        for one in found:
            (ties if one.is_tie else faults).append(f"{case.label}, {one.text}")
    if given.pair.weight_bytes["target"] < _LOADED_BYTES:
        faults += _other_weights(given)
    shown = joined_details(faults) or f"{equal} equal plain decoding, no ties"
    if ties and not faults:
        tokens = sum(len(decoded.output) for decoded in outputs.values())
        rate = f"{len(ties)} ties in {tokens} tokens ({1000 * len(ties) / tokens:.1f} per 1,000)"
        shown = f"{equal} equal plain decoding, {rate}: {joined_details(ties)}"
    measured = f"batched and single-token logits differ by up to {largest:.1e}"
    return not faults, f"{given.label}, {len(cases)} prompts: {shown}; {measured}"


def _other_weights(given: _Configured) -> Iterator[str]:
    """Yields parameters of the target that are not those of the file: heads may share its modules.
    Matrices of a quantised target are rounded by at most a step of their blocks (docs/backends.md).
    """
    loaded = build_pair({**given.cfg["model"], "quantization": "none"})
    assert isinstance(loaded, HuggingFacePair)
    originals = dict(loaded.target.named_parameters(remove_duplicate=False))
    for name, module in given.pair.target.named_modules():
        for path, weight in module.named_parameters(name, recurse=False):
            original, steps = originals[path].detach().float(), torch.zeros(())
            if given.bits and isinstance(module, nn.Linear) and path.endswith(".weight"):
                is_wide = path.endswith(("lm_head.weight", "down_proj.weight"))
                if (found := re.search(r"\.(\d+)\.\w+\.[qkv]_proj\.", path)) is not None:
                    is_wide = int(found[1]) % 3 == 2
                padded = pad(original, (0, -original.shape[1] % _BLOCK))
                steps = padded.unflatten(1, (-1, _BLOCK)).abs().amax(-1)
                steps = steps.repeat_interleave(_BLOCK, 1)[:, : original.shape[1]]
                steps = 1.001 * steps / 2 ** ((8 if is_wide else given.bits) - 1)
            if (off := (weight.detach().float() - original).abs() > steps).any():
                yield f"{int(off.sum())} values of {path} are not those that were loaded"


@dataclass(frozen=True)
class _Favoured:
    """Logits processor: sets ``ids`` and a token chosen by the history to 0.5 below the maximum."""

    ids: tuple[int, ...]

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        ids = [*self.ids, int(input_ids.sum()) % scores.shape[1]]
        # In place, as transformers' interface allows.
        scores[:, ids] = scores.max(dim=1, keepdim=True).values - 0.5
        return scores


def _law_cases(given: _Configured) -> dict[str, list[Case]]:
    """Returns requests by name of their sampling, with short to long prompts, each prompt twice.

    One sampling makes the last token ids likely; its requests end at the very last id (EOS).
    """
    subject, vocab_size = given.subject, given.pair.vocab_size
    last = tuple(range(vocab_size - 3, vocab_size))
    both = (RepetitionPenaltyLogitsProcessor(1.2), _Favoured(last))
    samplings = {
        "t=1": SamplingParams(temperature=1.0),
        "t=1.5 top_p=0.9": SamplingParams(temperature=1.5, top_p=0.9),
        "t=0.9 with processors": SamplingParams(
            temperature=0.9, no_repeat_ngram=3, processors=both
        ),
    }
    if not subject.sampling.greedy:
        samplings["as configured"] = subject.sampling
    is_small = given.pair.weight_bytes["target"] < _SMALL_BYTES and not rank_groups(subject.cfg)
    needs_all = is_small and subject.claims is Lossless.DISTRIBUTION
    number = subject.times * (_LAW_REQUESTS if needs_all else _LAW_REQUESTS // 2)
    room = (given.pair.max_positions or _LAW_PROMPT + _LAW_TOKENS + 1) - _LAW_TOKENS - 1
    room = min(room, given.cfg.get("serving", {}).get("kv_tokens") or room)
    text = np.concatenate([prompt.tokens for prompt in given.prompts])
    text = np.tile(text, 1 + (_LAW_PROMPT + 97) // len(text))
    found, ids = dict[str, list[Case]](), iter(range(7000, 1 << 20))
    for name, params in samplings.items():
        eos = frozenset(last[-1:]) if params.processors else given.stop.eos_ids
        stop = StopRules(max_new_tokens=_LAW_TOKENS, eos_ids=eos)
        # Several at once fill whole passes of prompt tokens, beside nodes of trees. After one token
        # the first tree meets an empty cache.
        num_long = 1 if found and not params.processors else 4
        lengths, found[name] = [_LAW_PROMPT] * num_long + [1, 40, 4, 1, 70, 1, 9, 23] * 20, []
        for i in range(number):
            length, start = max(1, min(lengths[i // 2], room)), 7 * (i // 2) % 97
            prompt = tuple(text[start : start + length].tolist())
            label = f"{name}, prompt of {length} tokens"
            found[name].append(Case(next(ids), label, prompt, params, stop))
    return found


def configured_law(subject: Subject) -> Outcome:
    given = subject.once(_configured)
    groups = _law_cases(given)
    cases = [case for group in groups.values() for case in group]
    with subject.built(given.cfg, given.pair) as parts:
        drafts, unlike_rejection = _draft_laws(parts, subject.seed)
        outputs = given.decode(parts, cases[::2]) | given.decode(parts, cases[1::2], _LAW_BATCH)
    _, errors = given.passes(cases[2].prompt)
    error, rounding = 2.0 * float(errors.max()), float((errors**2).mean())
    found = Evidence(num_tests=NUM_PLACE_TESTS * (1 + len(groups)))
    totals = [float(law.sum(dtype=np.float64)) for law in drafts.values()]
    faults = [
        f"a draft's probabilities add up to {total:.3g}"
        for total in totals
        if not abs(total - 1.0) < _UNNORMALISED
    ]
    faults += unlike_rejection
    together, slack = list[FloatArray](), 0.0
    rng = np.random.default_rng(subject.seed)
    for name, group in groups.items():
        series = []
        for case in group:
            decoded = outputs[case.id]
            rows = given.rows(case.prompt, decoded.output)
            unlike = given.differences(case, decoded, rows, np.full(len(rows), error))
            faults += [f"{case.label}, {one.text}" for one in unlike if not one.is_tie]
            series.append(_places(case, decoded.output, rows, drafts, rng))
        # Logits that differ by e from the reference's have a divergence of at most e ** 2 / 2 per
        # token from its law, and the logarithm of an e-value grows by no more in mean.
        own = sum(map(len, series)) * rounding / group[0].sampling.temperature ** 2
        found.logs += [(f"{name}, {test}", value - own) for test, value in place_evidence(series)]
        together, slack = together + series, slack + own
    found.logs += [(f"all, {test}", value - slack) for test, value in place_evidence(together)]
    label = f"{given.label}, {len(cases)} requests, {sum(map(len, together))} tokens"
    if faults := faults + found.biased():
        return False, f"{label}: {joined_details(faults)}"
    equal = ", equal to plain decoding" if subject.claims is Lossless.TOKEN else ""
    return True, f"{label}{equal}; {found.passed}"


def _places(
    case: Case,
    output: tuple[int, ...],
    rows: FloatArray,
    drafts: Mapping[tuple[int, ...], FloatArray],
    rng: np.random.Generator,
) -> FloatArray:
    """Returns [tokens, ORDERS] positions by ``laws.places``, without tokens of probability 0."""
    found = []
    for at, (token, logits) in enumerate(zip(output, rows, strict=True)):
        prefix = (*case.prompt, *output[:at])
        law = reference_probs(processed(logits, case.sampling, prefix), case.sampling)
        if law[token] > 0.0:
            draft = drafts.get(prefix)
            same = draft is not None and len(draft) == len(law)
            found.append(places((law, draft if same else None), token, rng))
    return np.array(found).reshape(len(found), len(ORDERS))


def _draft_laws(parts: Parts, seed: int) -> tuple[dict[tuple[int, ...], FloatArray], list[str]]:
    """Returns what decoding fills: prefix -> the draft's probabilities, float32[V], and verdicts
    that differ from ``rejection_verdict``.
    """
    found, others = dict[tuple[int, ...], FloatArray](), list[str]()
    rejects = isinstance(parts.verifier, RejectionVerifier)

    def record(verdicts: list[Verdict], _: DecodeState, requests: Sequence[RequestState]) -> None:
        for request, verdict in zip(requests, verdicts, strict=True):
            tree, kept = request.tree, verdict.accepted_ids.tolist()
            own = kept, verdict.next_token
            tested = rejects and not request.sampling.greedy
            if tested and own != (expected := rejection_verdict(request, seed)):
                what = "(accepted nodes, next token)"
                others.append(f"{what} are {own}, by rejection sampling {expected}")
            for node_id in (tree.root_id, *kept):
                if (probs := tree.draft_probs.get(node_id)) is not None:
                    (slot,) = tree.slots(np.array([node_id])).tolist()
                    path = tuple(request.path_tokens(slot).tolist())
                    found[path] = on_host(probs).astype(np.float32)

    observe(parts.verifier, "verify", after=record)
    return found, others


def exact_dtype(subject: Subject) -> Outcome:
    """Checks with ``model.exact=true`` that outputs equal those of the preset ``ar``, without ties.
    ``ar`` keeps a tensor-parallel group, whose order of summation sets the last bits.
    """
    if not subject.cfg["model"].get("exact"):
        raise Skipped("model.exact=false: rounding may decide between tokens")
    given = subject.once(_configured)
    room = (given.pair.max_positions or _EXACT_TOKENS + _EXACT_PROMPT) - 1
    longest = min(_EXACT_PROMPT, max(1, room - _EXACT_TOKENS))
    stop = StopRules(max_new_tokens=min(_EXACT_TOKENS, room - longest))
    samplings = {"greedy": GREEDY}
    if subject.claims is Lossless.TOKEN:  # draws near a CDF edge show small differences
        hot = SamplingParams(temperature=1.0)
        samplings["sampled"] = hot if subject.sampling.greedy else subject.sampling
    cases = [
        Case(2 * p.id + i, f"prompt {p.id}, {how}", tuple(p.tokens.tolist()[-longest:]), rule, stop)
        for p in given.prompts[:_NUM_EXACT_PROMPTS]
        for i, (how, rule) in enumerate(samplings.items())
    ]
    with subject.built(plain_config(subject.cfg), given.pair) as parts:
        expected = decode_cases(parts, cases)
    with subject.built(subject.cfg, given.pair) as parts:
        outputs = given.decode(parts, cases)
    num_tokens = sum(len(decoded.output) for decoded in outputs.values())
    detail = f"{given.pair.dtype}, {torch.get_num_threads()} threads, {num_tokens} tokens"
    shown = joined_details([*unequal(cases, outputs, expected)])
    return not shown, f"{detail}: {shown or 'no difference from plain decoding'}"


def plain_config(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``cfg`` with the parts of plain decoding; a tensor-parallel group keeps its sums."""
    plain = {
        "source": {"_target_": "specdec.sources.NullSource"},
        "policy": {"_target_": "specdec.policies.RootOnly"},
        "verifier": {"_target_": "specdec.verifiers.MatchVerifier"},
        "trace": False,
    }
    if not cfg["executor"].get("target_degree"):
        plain["executor"] = {"_target_": "specdec.executors.LocalExecutor"}
    return {**cfg, **plain}
