"""Acceptance traces: the number of tokens that a chain emits from each position."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specdec.errors import UserError
from specdec.types import IntArray

_LENGTHS = "acc_len"


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRequest:
    """One request of a trace.

    Attributes:
        id: of the prompt.
        num_prompt: prompt tokens.
        emitted: int64[L >= 1], entry i: tokens that a pass emits after i generated tokens: the
            accepted ones and one of the target; at least 1.
    """

    id: int
    num_prompt: int
    emitted: IntArray

    @property
    def num_output(self) -> int:
        """L, number of generated tokens."""
        return len(self.emitted)


def is_trace(path: str | Path) -> bool:
    """Whether a file name is that of an acceptance trace."""
    return str(path).endswith((".jsonl", ".jsonl.gz"))


def read_traces(path: str | Path, method: str | None = None) -> tuple[TracedRequest, ...]:
    """Reads a trace: JSON lines, plain or gzipped.

    A line has ``id``, the prompt's length as ``num_prompt`` or as the list ``prompt_token_ids``,
    and ``acc_len``, or under the name ``method`` an object with ``acc_len``. If the line also has
    ``generated_token_ids``, the shorter of the two lists counts. An id that is not a number is
    replaced by the line's number; lines without a generated token are skipped.

    Args:
        path: of the file.
        method: which of the file's methods; None for a file of one method.

    Raises:
        UserError: no such file, a malformed line, or a method that a line does not have.
    """
    try:
        requests = list(_requests(Path(path), method))
    except FileNotFoundError as error:
        raise UserError(f"model.record={path}: no such file") from error
    except (OSError, EOFError) as error:
        raise UserError(f"model.record={path} cannot be read: {error}") from error
    if not requests:
        raise UserError(f"model.record={path} has no requests with generated tokens")
    if len({request.id for request in requests}) != len(requests):
        raise UserError(f"model.record={path}: an id occurs twice; give every line a different one")
    return tuple(requests)


def _requests(path: Path, method: str | None) -> Iterator[TracedRequest]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            if not line.strip():
                continue
            where = f"model.record={path} line {number + 1}"
            try:
                entry = json.loads(line)
            except ValueError as error:
                raise UserError(f"{where} is not JSON: {error}") from error
            request = _request(entry, number, method, where)
            if request.num_output:
                yield request


def _request(entry: Any, number: int, method: str | None, where: str) -> TracedRequest:
    if not isinstance(entry, dict):
        raise UserError(f"{where} must be an object with id, num_prompt and {_LENGTHS}")
    node = entry if method is None else entry.get(method)
    lengths = node.get(_LENGTHS) if isinstance(node, dict) else None
    if not isinstance(lengths, list) or not _are_counts(lengths):
        methods = [k for k, v in entry.items() if isinstance(v, dict) and _LENGTHS in v]
        hint = f"choose model.method={' or '.join(methods)}" if methods else "see docs/replay.md"
        raise UserError(
            f"{where}: model.method={'null' if method is None else method} names no list {_LENGTHS}"
            f" of whole numbers of at least 1; {hint}"
        )
    prompt = entry.get("num_prompt", entry.get("prompt_token_ids"))
    num_prompt = len(prompt) if isinstance(prompt, list) else prompt
    if not isinstance(num_prompt, int) or num_prompt < 1:
        raise UserError(f"{where} needs num_prompt, a whole number of at least 1")
    generated = entry.get("generated_token_ids", lengths)
    text = str(entry.get("id", number))
    return TracedRequest(
        id=int(text) if text.isdecimal() else number,
        num_prompt=num_prompt,
        emitted=np.array(lengths[: len(generated)], np.int64),
    )


def _are_counts(values: list[Any]) -> bool:
    return all(isinstance(v, int) and not isinstance(v, bool) and v >= 1 for v in values)
