"""Records of finished runs, and acceptance traces: the inputs of ``model=replay`` (docs/replay.md).

The record of a run (``record=true``) is one ``.npz`` file with the rank of each of the target's
tokens in the draft's distribution, and with the draft's probabilities. It has no tokens and no
text. One pass of the draft per prompt makes it after the run. An acceptance trace is a file of JSON
lines with the number of tokens that a chain emits from each position.

Shape letters: L generated tokens of a request, P recorded positions of all requests, K candidates.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from specdec.clocks.meter import Meter
from specdec.data.files import read_records
from specdec.errors import UserError
from specdec.executors.models import ModelPair
from specdec.files import ArchiveFormat
from specdec.metrics import RequestResult, loop_share
from specdec.models.runner import ModelRunner
from specdec.sampling.transform import SamplingParams, SamplingTransform
from specdec.types import IntArray, Lossless

NUM_LOGPROBS = 32  # K of new records: the largest number of candidates in the presets
MAX_RANK = 256  # ranks are exact below it; it represents itself and all larger ranks
_CHUNK = 512  # rows per pass; it bounds the memory of their logits
_LENGTHS = "acc_len"  # key of a trace
_WHOLE = ("ids", "num_prompt", "num_output", "ranks")  # arrays of whole numbers
FORMAT = ArchiveFormat(
    name="specdec-record",
    version=1,
    arrays=(*_WHOLE, "logprobs"),
    what="a record",
    missing="`specdec run record=true` writes one as record.npz in its run folder",
    other="give the record.npz of a run with record=true, or a .jsonl of acceptance lengths",
    again="record the run again with record=true",
)
_MOST = 1 << 31  # largest number of tokens of a request
_MAX_DIGITS = 18  # of an id, so that it fits 64 bits


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """A recorded request; entry i of its arrays is about the token at position num_prompt + i."""

    id: int
    num_prompt: int  # number of prompt tokens
    # int64[L], number of tokens that the draft ranked above the target's; ``MAX_RANK`` for that
    # many or more, and beyond the draft's positions
    ranks: IntArray
    # float16[L, K], log probabilities of the draft's best candidates in descending order; -inf
    # where there are fewer. In a trace float64[L, 1], the share of accepted positions.
    logprobs: npt.NDArray[np.floating]
    # only in a trace: int64[L], number of accepted tokens of a chain with its root at each
    # position; it replaces ``ranks``
    reach: IntArray | None = None

    @property
    def num_output(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    requests: tuple[RecordedRequest, ...]
    vocab_size: int = 0  # vocabulary of the models; 0 for a trace
    weight_bytes: tuple[int, int] = (0, 0)  # of the target and of the draft
    # origin: models, sampling, data, dtype, seed, versions, command
    about: Mapping[str, Any] = field(default_factory=dict)

    def top_share(self, k: int) -> float:
        ranks = np.concatenate([request.ranks for request in self.requests])
        return float((ranks < k).mean())


def record_request(
    runner: ModelRunner,
    sampling: SamplingParams,
    *,
    request_id: int,
    prompt: IntArray,
    output: IntArray,
) -> RecordedRequest:
    """Ranks the target's tokens in the draft's distribution, at every position of a request.

    The draft model reads ``prompt``, int64[T >= 1], and the target's ``output``, int64[L >= 1], and
    its logits pass through the sampling transform of token sources, so each entry equals what
    a source's ``expand`` returned for the node on the target's path. ``runner`` must not have the
    run's meter, which would count these passes.
    """
    transform = SamplingTransform(sampling)
    tokens = np.concatenate([prompt, output])
    first, num_nodes = len(prompt) - 1, len(tokens) - 1
    ranks = np.full(len(output), MAX_RANK, np.int64)
    width = min(NUM_LOGPROBS, runner.vocab_size)
    logprobs = np.full((len(output), width), -np.inf, np.float16)
    cache = runner.new_cache(num_nodes)
    reach = min(num_nodes, runner.max_positions)
    for start in range(0, reach, _CHUNK):
        stop = min(start + _CHUNK, reach)
        positions = np.arange(max(start, first), stop)
        rows = cache.rows(prefix_tokens=tokens[start:stop])
        logits = runner.forward([rows], logits_rows=positions - start).logits
        if logits is None:  # rows of the prompt only
            continue
        histories = None
        if sampling.needs_history:
            histories = [tokens[: p + 1] for p in positions.tolist()]
        best, scores = transform.top(logits, MAX_RANK, histories)
        right = (best == tokens[positions + 1][:, None]) & (scores > -np.inf)
        entries = positions - first
        ranks[entries] = np.where(right.any(axis=1), right.argmax(axis=1), MAX_RANK)
        logprobs[entries] = scores[:, :width]
    return RecordedRequest(id=request_id, num_prompt=len(prompt), ranks=ranks, logprobs=logprobs)


def record_run(
    *,
    pair: ModelPair,
    prompts: Mapping[int, IntArray],
    results: Iterable[RequestResult],
    sampling: SamplingParams,
    about: Mapping[str, Any],
    on_request: Callable[[int], None] = lambda _: None,
) -> Record:
    """Ranks the outputs by the draft model in a ``Record``; the run's own counts do not change.

    Requests without output are skipped. ``about`` is stored with the outputs' ``loop_share``, which
    a replay cannot compute from its made-up tokens. ``on_request`` gets the id of each request.
    """
    runner = pair.runner("draft", Meter())
    recorded, outputs = [], []
    for result in results:
        if result.output:
            outputs.append(result.output)
            text = {"prompt": prompts[result.id], "output": np.array(result.output, np.int64)}
            recorded.append(record_request(runner, sampling, request_id=result.id, **text))
        on_request(result.id)
    return Record(
        requests=tuple(recorded),
        vocab_size=pair.vocab_size,
        weight_bytes=(pair.weight_bytes["target"], pair.weight_bytes.get("draft", 0)),
        about={**about, "loop_share": loop_share(outputs)},
    )


def check_recordable(pair: ModelPair, name: str, claims: Lossless) -> None:
    if pair.is_synthetic:
        raise UserError(
            "record=true needs a draft model, which this model= does not have; use model=tiny or"
            " model=hf, or record=false"
        )
    if claims is Lossless.LOSSY:
        raise UserError(
            f"record=true compares the target's tokens with the draft, but strategy={name} emits"
            " other tokens (its verifier is lossy); use verifier=match"
        )


def write_record(path: str | Path, record: Record) -> Path:
    requests = record.requests
    sizes = {"vocab_size": record.vocab_size, "weight_bytes": record.weight_bytes}
    head = {**sizes, "max_rank": MAX_RANK, "about": record.about}
    arrays: dict[str, Any] = {
        "ids": np.array([r.id for r in requests], np.int64),
        "num_prompt": np.array([r.num_prompt for r in requests], np.int64),
        "num_output": np.array([r.num_output for r in requests], np.int64),
        "ranks": np.concatenate([r.ranks for r in requests]).astype(np.uint16),
        "logprobs": np.concatenate([r.logprobs for r in requests]).astype(np.float16),
    }
    return FORMAT.write(path, head, arrays)


def read_record(path: str | Path) -> Record:
    where = f"model.record={path}"
    head, arrays = FORMAT.read(path, where)
    for problem in _damage(head, arrays):
        raise UserError(f"{where} is damaged: {problem}; record the run again")
    starts = np.cumsum(arrays["num_output"])[:-1]
    ranks = np.split(arrays["ranks"].astype(np.int64), starts)
    logprobs = np.split(arrays["logprobs"], starts)
    columns = (arrays["ids"].tolist(), arrays["num_prompt"].tolist(), ranks, logprobs)
    return Record(
        requests=tuple(RecordedRequest(*row) for row in zip(*columns, strict=True)),
        vocab_size=head["vocab_size"],
        weight_bytes=tuple(head["weight_bytes"]),
        about=head["about"],
    )


def _damage(head: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> Iterator[str]:
    """Yields what is wrong with a record. Read only the first item: later tests may raise."""
    whole, logprobs = [arrays[key] for key in _WHOLE], arrays["logprobs"]
    if not all(array.ndim == 1 and array.dtype.kind in "iu" for array in whole):
        yield f"its {', '.join(_WHOLE)} are no lists of whole numbers"
    if logprobs.ndim != 2 or logprobs.dtype.kind != "f":
        yield "its log probabilities are no table of floating-point numbers"
    weights = head.get("weight_bytes")
    if type(head.get("vocab_size")) is not int or not isinstance(head.get("about"), dict):
        yield "its head has no number vocab_size, or no section about"
    if not (isinstance(weights, list) and [type(w) for w in weights] == [int, int]):
        yield "its head has no two numbers weight_bytes"
    ids, num_prompt, num_output, ranks = whole
    if not 0 < len({*ids.tolist()}) == len(ids) == len(num_prompt) == len(num_output):
        yield "it has no requests, an id twice, or request arrays of different lengths"
    if min(num_prompt.min(), num_output.min()) < 1 or num_prompt.max() >= _MOST:
        yield "a request has no prompt or no output, or more than 2**31 tokens"
    if not logprobs.size or not len(ranks) == len(logprobs) == num_output.sum():
        yield "its positions differ in number"
    if ranks.min() < 0 or not (logprobs <= 0).all() or (logprobs[:, 1:] > logprobs[:, :-1]).any():
        yield "a rank is negative, or log probabilities are above 0 or not in descending order"


def read_traces(path: str | Path, method: str | None = None) -> Record:
    """Reads an acceptance trace: JSON lines, plain or gzipped.

    A line has ``id`` (if it is not a number, the line's number counts), the prompt's length as
    ``num_prompt`` or as the list ``prompt_token_ids``, and the list ``acc_len``, which may be in an
    object named ``method``. Entry i of ``acc_len`` is the number of tokens that a pass emits after
    i generated tokens: the accepted ones and one of the target. ``acc_len`` is cut to the length of
    ``generated_token_ids`` if the line has that list.
    """
    if not Path(path).is_file():
        raise UserError(f"model.record={path}: no such file")
    lines = {}
    for number, entry in read_records(Path(path)):
        at, num_prompt, emitted = _trace(
            entry, number - 1, method, f"model.record={path} line {number}"
        )
        if len(emitted) and at in lines:
            raise UserError(
                f"model.record={path}: an id occurs twice; give every line a different one"
            )
        if len(emitted):
            lines[at] = num_prompt, emitted
    if not lines:
        raise UserError(f"model.record={path} has no requests with generated tokens")
    accepts = np.mean(np.concatenate([emitted for _, emitted in lines.values()]) > 1)
    share = np.log(np.clip(accepts, 1e-3, 1.0))
    requests = tuple(
        RecordedRequest(
            id=at,
            num_prompt=num_prompt,
            ranks=np.zeros_like(emitted),
            logprobs=np.full((len(emitted), 1), share),
            reach=emitted - 1,
        )
        for at, (num_prompt, emitted) in lines.items()
    )
    return Record(requests=requests, about={"traces": str(path), "method": method})


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and 1 <= value < _MOST


def _trace(
    entry: dict[str, Any], number: int, method: str | None, where: str
) -> tuple[int, int, IntArray]:
    node = entry if method is None else entry.get(method)
    lengths = node.get(_LENGTHS) if isinstance(node, dict) else None
    if not isinstance(lengths, list) or not all(map(_is_count, lengths)):
        methods = [k for k, v in entry.items() if isinstance(v, dict) and _LENGTHS in v]
        hint = f"choose model.method={' or '.join(methods)}" if methods else "see docs/replay.md"
        raise UserError(
            f"{where}: model.method={'null' if method is None else method} names no list {_LENGTHS}"
            f" of whole numbers of at least 1 and below 2**31; {hint}"
        )
    prompt = entry.get("num_prompt", entry.get("prompt_token_ids"))
    num_prompt = len(prompt) if isinstance(prompt, list) else prompt
    if not _is_count(num_prompt):
        raise UserError(f"{where} needs num_prompt, a whole number of at least 1 and below 2**31")
    generated = entry.get("generated_token_ids", lengths)
    if not isinstance(generated, list):
        raise UserError(f"{where} has generated_token_ids that are no list; leave them out")
    text = str(entry.get("id", number))
    if text.isdecimal() and len(text) > _MAX_DIGITS:
        raise UserError(
            f"{where}: the id has {len(text)} digits; give a number of at most {_MAX_DIGITS}"
        )
    emitted = np.array(lengths[: len(generated)], np.int64)
    return int(text) if text.isdecimal() else number, num_prompt, emitted
