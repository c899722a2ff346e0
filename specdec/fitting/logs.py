"""Reads acceptance logs: the one reader of all commands that take measured acceptance.

``read_log`` takes JSON, JSON lines, text or CSV, plain or gzip, and recognises by its keys

- per-request objects of vLLM, SGLang and llama.cpp, anywhere in a response, and their log lines
  (``specdec.fitting.engines``);
- lists of accepted lengths: Spec-Bench answers (``accept_lengths``), EAGLE's (``pre_num``),
  PipeSpec and AMUSD runs (``accepted_tokens``), traces by position (``acc_len``), plain lists;
- acceptance by position: ``acceptance_rate_by_position``, ``accepted_by_pos``;
- match sequences: texts of 1, 0 and ? per position;
- rank vectors: CSV with columns r1, r2, ..., or a list of shares.
"""

from __future__ import annotations

import csv
import io
import json
import re
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from specdec.data.files import read_text
from specdec.errors import UserError
from specdec.files import parse_json
from specdec.fitting.engines import from_line, from_llama_cpp, from_sglang, from_vllm
from specdec.fitting.requests import (
    UNKNOWN,
    AcceptanceLog,
    RequestLog,
    of_passes,
    of_rates,
    whole_numbers,
)
from specdec.fitting.tails import RankVector

Lengths = Literal["auto", "emitted", "accepted"]

FORMATS = (
    "vLLM (acceptance_histogram, per_step_accepted, SpecDecoding lines), SGLang (spec_verify_ct,"
    " spec_accept_histogram), llama.cpp (draft_n, draft acceptance lines), lists of accepted"
    " lengths (accept_lengths, pre_num, accepted_tokens, acc_len, plain), acceptance by position"
    " (acceptance_rate_by_position, accepted_by_pos), match sequences of 1, 0 and ?, rank vectors"
    " (CSV with r1, r2, ...; torch file)"
)

_LISTS = (
    *("accept_lengths", "acceptance_lengths", "accept_length_list"),
    *("pre_num", "accepted_tokens"),
)
_MATCHES = re.compile(r"[01?]{8,}")
_DEEP = 12  # most levels of nested objects
_IDS = ("question_id", "sample_index", "request_id", "rid", "id", "name", "prompt_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """How to read a log.

    Attributes:
        method: which of several methods or pairs in a file to read: a key, a name, or a number.
        lengths: whether plain lists count the target's own token ("emitted") or not ("accepted").
            "auto" uses what the format defines; a plain list counts as "accepted" if it contains a
            0.
        draft_tokens: verified draft tokens per pass if the log does not say; None if unknown.
    """

    method: str | None = None
    lengths: Lengths = "auto"
    draft_tokens: int | None = None


def read_log(path: str | Path, options: ReadOptions | None = None) -> AcceptanceLog:
    """Reads an acceptance log; raises ``UserError`` for an unknown format or a missing option."""
    file, options = Path(path).expanduser(), options or ReadOptions()
    if not file.is_file():
        raise UserError(f"{str(path)!r} is not a file: name an acceptance log")
    with file.open("rb") as stream:
        start = stream.read(4)
    if start[:2] == b"PK":
        return AcceptanceLog(path=str(path), form="rank vector", vector=_torch_vector(file))
    text = read_text(file)
    reader = _Reader(str(path), options)
    vector = _csv_vector(text, reader) if text[:4096].count(",") and "r1" in text[:4096] else None
    if vector is None:
        vector = _listed_vector(text, str(path))
    if vector is not None:
        return AcceptanceLog(path=str(path), form="rank vector", vector=vector)
    try:
        requests = [*reader.requests(text)]
    except UserError:
        raise
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise UserError(
            f"{str(path)!r} has acceptance in a form that cannot be read"
            f" ({type(error).__name__}: {error}); known are {FORMATS}"
        ) from error
    if not requests:
        raise UserError(f"{str(path)!r} has no acceptance in a format that is known: {FORMATS}")
    return AcceptanceLog(
        path=str(path),
        form=", ".join(dict.fromkeys(reader.forms)),
        requests=tuple(requests),
        notes=tuple(dict.fromkeys(reader.notes)),
    )


class _Reader:
    """Walks through the objects of a file, and collects the formats that it finds, and notes."""

    def __init__(self, path: str, options: ReadOptions) -> None:
        self.path, self.options = path, options
        self.forms: list[str] = []
        self.notes: list[str] = []

    def requests(self, text: str) -> Iterator[RequestLog]:
        try:
            whole = parse_json(text)
        except ValueError:
            whole = None
        if whole is not None:
            yield from self._walk(whole, Path(self.path).name, 0)
            return
        plain: list[list[int]] = []
        for number, raw in enumerate(text.splitlines(), start=1):
            line = raw.strip().removeprefix("data:").strip()
            name = f"{Path(self.path).name} line {number}"
            if line[:1] in ("{", "["):
                try:
                    node = parse_json(line)
                except ValueError:
                    node = None
                if node is not None:
                    yield from self._walk(node, name, 0)
                    continue
            found = from_line(line, name, self.options.draft_tokens)
            if found is not None:
                self.forms.append("vLLM log" if "SpecDecoding" in line else "llama.cpp log")
                yield found
            elif _MATCHES.fullmatch(line):
                yield self._matches(name, line)
            elif line and re.fullmatch(r"[\d,;\s]+", line):
                plain.append([int(part) for part in re.split(r"[,;\s]+", line.strip(",; "))])
        yield from self._plain_lines(plain)

    def _plain_lines(self, lines: list[list[int]]) -> Iterator[RequestLog]:
        """Reads lines of numbers: one request per line, or one request with one number per line."""
        name = Path(self.path).name
        if lines and all(len(line) == 1 for line in lines):
            lines = [[line[0] for line in lines]]
        if lines:
            self.forms.append("plain list")
            own = self._own_token([value for line in lines for value in line], None)
            for at, line in enumerate(lines):
                yield self._passes(f"{name} request {at}", line, own)

    def _walk(self, node: Any, name: str, depth: int) -> Iterator[RequestLog]:
        if depth > _DEEP:
            return
        if isinstance(node, Mapping):
            name = next((f"{name} {node[k]}" for k in _IDS if _is_id(node.get(k))), name)
            found = self._object(node, name)
            if found is not None:
                yield from found
                return
        plain = _plain_lists(node) if depth == 0 else None
        if plain is not None:
            self.forms.append("plain list")
            own = self._own_token([value for part in plain.values() for value in part], None)
            for key, part in plain.items():
                yield self._passes(f"{name} {key}".strip(), part, own)
            return
        if not isinstance(node, Mapping | list):
            return
        items: Any = node.items() if isinstance(node, Mapping) else enumerate(node)
        for key, value in items:
            if isinstance(value, str) and _MATCHES.fullmatch(value):
                yield self._matches(f"{name} {key}", value)
            elif isinstance(value, dict | list) and self._chosen(key, node):
                yield from self._walk(value, f"{name} {key}", depth + 1)

    def _chosen(self, key: Any, node: Any) -> bool:
        """Returns whether to descend into ``key``; ``method`` selects among keys of methods."""
        method = self.options.method
        if isinstance(node, list):
            return True
        others = [k for k, v in node.items() if isinstance(v, dict) and _has_sequences(v)]
        if method is None and len(others) > 1:
            raise UserError(
                f"{self.path!r} has several pairs or methods: choose one with method=, of"
                f" {', '.join(map(repr, others))} (a part of the name is enough)"
            )
        if method is None or not others:
            return True
        fitting = [k for k in others if method == k] or [k for k in others if method in k]
        if len(fitting) != 1 and key in others:
            raise UserError(
                f"method={method} fits {len(fitting)} of {', '.join(map(repr, others))} in"
                f" {self.path!r}: give one name"
            )
        return key in fitting or key not in others

    def _object(self, node: Mapping[str, Any], name: str) -> list[RequestLog] | None:
        """Returns the requests of an object; None if they may be further inside."""
        draft_tokens = self.options.draft_tokens
        readers = (("vLLM", from_vllm), ("SGLang", from_sglang), ("llama.cpp", from_llama_cpp))
        for form, reader in readers:
            found = reader(node, name, draft_tokens)
            if found is not None:
                self.forms.append(form)
                return [found]
        if "acceptance_rate_by_position" in node or "accepted_by_pos" in node:
            return self._by_position(node, name)
        if isinstance(node.get("acc_len"), list):
            self.forms.append("trace by position")
            return [self._trace(node["acc_len"], name)]
        for key in _LISTS:
            value = node.get(key)
            if isinstance(value, list) and value:
                self.forms.append(key)
                return [self._list(value, node, f"{name} {key}", key)]
        return None

    def _list(self, value: list[Any], node: Mapping[str, Any], name: str, key: str) -> RequestLog:
        """Reads a list of passes, or one list per model of a chain that ends with the target."""
        if all(isinstance(part, list) for part in value):
            level = self.options.method or "-1"
            if not re.fullmatch(r"-?\d+", level) or not -len(value) <= int(level) < len(value):
                raise UserError(
                    f"{name} has lists of {len(value)} models: method= is the number of one, 0 to"
                    f" {len(value) - 1}, not {level!r}"
                )
            value = value[int(level)]
        steps = node.get("decoding_steps", [])
        turns = steps if _is_counts(steps) else []
        if key == "pre_num":  # its first entry is the token from the prefill
            value, turns = value[1:], []
        return self._passes(name, value, self._own_token(value, "emitted"), turns)

    def _trace(self, values: list[Any], name: str) -> RequestLog:
        """Reads passes that start at every position, and picks those that follow each other.

        With ``draft_tokens``, passes are cut to chains of that length.
        """
        emitted = whole_numbers(values, f"{name}: acc_len", 1)
        longest = self.options.draft_tokens or int(max(emitted.max(initial=1) - 1, 1))
        accepted, at = [], 0
        while at < len(emitted):
            accepted.append(min(int(emitted[at]) - 1, longest))
            at += accepted[-1] + 1
        drafted = np.full(len(accepted), longest)
        return of_passes(name, np.array(accepted, np.int64), drafted=drafted)

    def _by_position(self, node: Mapping[str, Any], name: str) -> list[RequestLog]:
        rates, passes = node.get("acceptance_rate_by_position"), node.get("speculation_steps")
        if rates is None:
            by_position, passes = node["accepted_by_pos"], node.get("drafts")
            if isinstance(by_position, str):
                by_position = json.loads(by_position)
            if not by_position or not passes:
                return []  # a run without speculation
            rates = [by_position[key] / passes for key in sorted(by_position, key=int)]
            name = f"{name} {node.get('model', '')} {node.get('method', '')}".strip()
            if self.options.method is not None and self.options.method not in name:
                return []
        self.forms.append("acceptance by position")
        good = isinstance(rates, list) and all(isinstance(r, int | float) for r in rates)
        if not good or not rates or not isinstance(passes, int | float):
            raise UserError(f"{name} needs acceptance rates by position and a number of passes")
        return [of_rates(name, float(passes), rates)]

    def _own_token(self, values: list[Any], stated: str | None) -> int:
        """Returns 1 if the lengths count the target's own token, otherwise 0."""
        chosen = self.options.lengths if self.options.lengths != "auto" else stated
        if 0 in values and chosen != "accepted":
            if self.options.lengths == "emitted":
                raise UserError(
                    f"{self.path!r}: lengths=emitted counts the target's own token, so no length"
                    " can be 0; use lengths=accepted"
                )
            chosen = "accepted"
            self.notes.append("lengths without the target's own token, since a 0 is among them")
        elif chosen is None:
            chosen = "emitted"
            self.notes.append("lengths with the target's own token, since none is 0")
        return int(chosen == "emitted")

    def _passes(self, name: str, values: list[Any], own: int, turns: list[int] = []) -> RequestLog:  # noqa: B006
        accepted = whole_numbers(values, name, own) - own
        longest = self.options.draft_tokens
        drafted = None if longest is None else np.full(len(accepted), longest)
        return of_passes(name, accepted, drafted=drafted, turns=turns)

    def _matches(self, name: str, text: str) -> RequestLog:
        self.forms.append("match sequence")
        codes = {"0": 0, "1": 1, "?": UNKNOWN}
        return RequestLog(name=name, matches=np.array([codes[c] for c in text], np.int64))


def _is_id(value: Any) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool)


def _is_counts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(v) is int for v in value)


def _plain_lists(node: Any) -> dict[str, list[int]] | None:
    """Returns request -> lengths if a document has nothing but accepted lengths; otherwise None."""
    if _is_counts(node):
        return {"": node}
    parts = dict(enumerate(node)) if isinstance(node, list) else node
    if isinstance(parts, dict) and parts and all(map(_is_counts, parts.values())):
        return {str(key): part for key, part in parts.items()}
    return None


def _has_sequences(node: Mapping[str, Any]) -> bool:
    """Returns whether an object is one method or pair of a file that has several."""
    if isinstance(node.get("acc_len"), list):
        return True
    values = list(node.values())
    return bool(values) and all(isinstance(v, str) and _MATCHES.fullmatch(v) for v in values)


def _csv_vector(text: str, reader: _Reader) -> RankVector | None:
    """Reads the row named by ``method`` in a CSV with columns r1, r2, ...; None for other files."""
    table = csv.DictReader(io.StringIO(text))
    names = [name for name in table.fieldnames or () if re.fullmatch(r"r\d+", name)]
    if not names:
        return None
    rows = [(" ".join(v for k, v in row.items() if k not in names and v), row) for row in table]
    method = reader.options.method
    fitting = [pair for pair in rows if method is None or method in pair[0]]
    if len(fitting) != 1:
        raise UserError(
            f"{reader.path!r} has {len(rows)} rank vectors and method={method} fits"
            f" {len(fitting)}: name one with method=, for example {rows[0][0][:40]!r}"
            if rows
            else f"{reader.path!r} has no rank vector"
        )
    label, row = fitting[0]
    try:
        shares = np.array([float(row[name] or 0) for name in names])
        miss = float(row.get("miss") or max(1.0 - shares.sum(), 0.0))
    except ValueError as error:
        raise UserError(f"{reader.path!r}: {label[:40]!r} has a share that is no number") from error
    return _checked_vector(label, shares, miss, reader.path)


def _listed_vector(text: str, path: str) -> RankVector | None:
    """Reads a JSON list of shares of ranks 1, 2, ..., of sum at most 1; None for another file."""
    try:
        values = parse_json(text) if text.lstrip()[:1] == "[" else None
    except ValueError:
        return None
    if not isinstance(values, list) or not any(isinstance(v, float) for v in values):
        return None
    if not all(isinstance(v, int | float) for v in values):
        return None
    shares = np.array(values, float)
    return _checked_vector(Path(path).name, shares, max(1.0 - shares.sum(), 0.0), path)


def _torch_vector(path: Path) -> RankVector:
    """Reads the float32 storage of a torch file without unpickling it.

    The miss share is element 0, or the last element if element 0 is 0.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            inside = [name for name in archive.namelist() if name.endswith("data/0")]
            values = np.frombuffer(archive.read(inside[0]), "<f4").astype(float)
    except (OSError, IndexError, ValueError, zipfile.BadZipFile) as error:
        raise UserError(f"{str(path)!r} is no torch file of one float32 vector: {error}") from error
    if len(values) < 3:
        raise UserError(f"{str(path)!r} has {len(values)} values, too few for a rank vector")
    if values[0] == 0.0:
        return _checked_vector(path.name, values[1:-1], float(values[-1]), str(path))
    return _checked_vector(path.name, values[1:], float(values[0]), str(path))


def _checked_vector(name: str, shares: np.ndarray, miss: float, path: str) -> RankVector:
    total = float(shares.sum()) + miss
    miss = max(miss, 0.0)
    if not np.isfinite(total) or (shares < 0).any() or not 0.97 <= total <= 1.03:
        raise UserError(
            f"{path!r}: shares of ranks must be at least 0 and sum to 1 with the miss share, not"
            f" {total:.3f}"
        )
    return RankVector(name=name, shares=shares / total, miss=miss / total)
