"""Measures an OpenAI-compatible server through its streamed completions.

A chunk of the stream holds what the server sends at once: one token, the tokens of one pass, or of
several. All tokens of a chunk get the time at which the chunk arrived.
"""

from __future__ import annotations

import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Annotated, Any, Literal

from pydantic import Field
from transformers import PreTrainedTokenizerBase

from specdec.errors import UserError
from specdec.parts.fields import Positive, Text, expects, validated
from specdec.rivals.process import RivalOutput

_SHOWN = 300  # characters of a server's answer that a message shows
_COUNTERS = ("draft_tokens", "accepted_tokens")  # vllm:spec_decode_num_NAME_total
_COUNTER = re.compile(r"^vllm:spec_decode_num_(\w+)_total(?:\{[^}]*\})? (\S+)", re.MULTILINE)

Url = Annotated[
    str, Field(pattern=r"^https?://\S+$"), expects("it must be a URL such as http://host:8000/v1")
]


@validated
@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointOptions:
    """How a server is called.

    Attributes:
        base_url: address up to and including the version, as OpenAI's clients take it.
        model: name of the model there; None for the first that the server lists.
        prompt: "ids" sends token ids and requests those of the output (vLLM); "text" sends text,
            which must encode to the same ids, and encodes the output.
        extra: further fields of every request.
        api_key_env: environment variable that contains the key; None sends no key.
        timeout_s: seconds without an answer before a request fails.
    """

    base_url: Url
    model: Text | None = None
    prompt: Literal["ids", "text"] = "text"
    extra: dict[str, Any] = field(default_factory=dict)
    api_key_env: Text | None = None
    timeout_s: Positive = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One message of a stream.

    Attributes:
        at_s: seconds from the start of the request.
        ids: the new token ids; None if the server does not send them.
    """

    at_s: float
    text: str
    ids: tuple[int, ...] | None


@dataclass(slots=True, kw_only=True)
class _Answer:
    """Collects what a server sends for one request.

    Attributes:
        counted: output tokens by the server's count; None if it is not sent.
        drafts: llama.cpp's counts of draft tokens; empty if not sent.
        stopped: whether an end token ended the output.
    """

    chunks: list[Chunk] = field(default_factory=list)
    counted: int | None = None
    drafts: dict[str, int] = field(default_factory=dict)
    stopped: bool = False

    def add(self, message: Mapping[str, Any], at_s: float) -> None:
        if message.get("error"):
            raise ValueError(str(message["error"]))
        if message.get("usage"):
            self.counted = int(message["usage"]["completion_tokens"])
        timings = message.get("timings") or {}
        if "draft_n" in timings:
            counts = (timings["draft_n"], timings["draft_n_accepted"])
            self.drafts = dict(zip(_COUNTERS, map(int, counts), strict=True))
        for choice in message.get("choices", ())[:1]:
            ids = choice.get("token_ids")
            new = None if ids is None else tuple(map(int, ids))
            self.chunks.append(Chunk(at_s=at_s, text=choice.get("text") or "", ids=new))
            self.stopped |= choice.get("finish_reason") == "stop"


class Endpoint:
    """A server that decodes one prompt per call of ``generate``.

    ``pids`` is None, since the server's CPU time cannot be measured.
    """

    pids = None

    def __init__(
        self,
        options: EndpointOptions,
        *,
        tokenizer: PreTrainedTokenizerBase,
        eos_ids: Collection[int],
    ) -> None:
        """Connects to a server, which must have the target's tokenizer.

        ``eos_ids`` are end tokens, which the server's text leaves out. If no model is named, the
        first one of the server's list is used.
        """
        self._options, self._tokenizer = options, tokenizer
        self._eos_ids = sorted(eos_ids)
        self._url = options.base_url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if options.api_key_env is not None:
            key = os.environ.get(options.api_key_env, "")
            self._headers["Authorization"] = f"Bearer {key}"
        self._model = options.model or self._first_model()
        self.version = f"{self._url} {self._model}"

    def generate(
        self, prompt: Sequence[int], *, max_new_tokens: int, sampling: Mapping[str, Any]
    ) -> RivalOutput:
        """Decodes one prompt; see ``RivalProcess.generate``.

        If the server does not count draft tokens, every chunk counts as a pass.
        """
        options, text = self._options, self._text_of(prompt)
        body = {
            "model": self._model,
            "prompt": list(prompt) if text is None else text,
            "max_tokens": max_new_tokens,
            "temperature": sampling["temperature"],
            "stream": True,
            **self._token_fields(),
            **_draw_fields(sampling),
            **options.extra,
        }
        before = self._counters()
        answer = self._stream(body)
        after = self._counters()
        chunks, drafts = answer.chunks, answer.drafts
        tokens, times = self._tokens(prompt, text, answer)
        if before is not None and after is not None:
            drafts = {name: after[name] - before[name] for name in _COUNTERS}
        accepted = min(drafts.get("accepted_tokens", 0), max(0, len(tokens) - 1))
        by_chunk = sum(bool(chunk.text or chunk.ids) for chunk in chunks)
        return RivalOutput(
            tokens=tuple(tokens),
            times_s=tuple(times),
            wall_s=chunks[-1].at_s,
            cpu_s=0.0,
            prefill_s=0.0,
            rounds=len(tokens) - accepted if drafts else min(max(1, by_chunk), len(tokens)),
            proposed=drafts.get("draft_tokens"),
            accepted=accepted,
            draft_passes=0,
        )

    def close(self) -> None:
        """Does nothing, since the server was not started here."""

    # ------------------------------------------------------------------ requests

    def _token_fields(self) -> dict[str, Any]:
        if self._options.prompt == "text":
            return {}
        return {"return_token_ids": True, "stream_options": {"include_usage": True}}

    def _open(self, url: str, body: Mapping[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, self._headers)  # noqa: S310 - http, checked
        return urllib.request.urlopen(request, timeout=self._options.timeout_s)  # noqa: S310

    def _first_model(self) -> str:
        try:
            with self._open(f"{self._url}/models") as answer:
                return str(json.load(answer)["data"][0]["id"])
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise UserError(
                f"no models are listed at {self._url}/models ({error}): start a server there, set"
                " strategy.options.base_url, or name strategy.options.model"
            ) from error

    def _stream(self, body: Mapping[str, Any]) -> _Answer:
        answer, start = _Answer(), perf_counter()
        try:
            with self._open(f"{self._url}/completions", body) as stream:
                for message in _messages(stream):
                    answer.add(message, perf_counter() - start)
        except (OSError, ValueError, LookupError, TypeError) as error:
            reason = error.read().decode() if isinstance(error, urllib.error.HTTPError) else error
            words = " ".join(str(reason).split())[:_SHOWN]
            raise UserError(f"{self.version} failed: {words}") from error
        if not answer.chunks:
            raise UserError(f"{self.version} sent an empty stream: it must support stream=true")
        return answer

    def _counters(self) -> dict[str, int] | None:
        """Reads vLLM's counts of draft tokens since its start; None if the server has none."""
        try:
            with self._open(f"{self._url.removesuffix('/v1')}/metrics") as answer:
                found = _COUNTER.findall(answer.read().decode(errors="replace"))
        except OSError:
            return None
        sums = dict.fromkeys(_COUNTERS, 0)
        for name, value in found:
            if name in sums:
                sums[name] += int(float(value))
        return sums if found else None

    # ------------------------------------------------------------------ tokens

    def _text_of(self, prompt: Sequence[int]) -> str | None:
        """Returns the prompt as text; None if ids are sent."""
        if self._options.prompt == "ids":
            return None
        text = str(self._tokenizer.decode(prompt, skip_special_tokens=True))
        if self._encoded(text)[0] != list(prompt):
            raise UserError(
                "a prompt's text does not encode to its token ids again: use"
                " strategy.options.prompt=ids, where the server takes token ids"
            )
        return text

    def _encoded(self, text: str) -> tuple[list[int], list[int]]:
        """Returns token ids, and for each the position in the text at which it ends."""
        found = self._tokenizer(text, return_offsets_mapping=True)
        return list(found["input_ids"]), [end for _, end in found["offset_mapping"]]

    def _tokens(
        self, prompt: Sequence[int], text: str | None, answer: _Answer
    ) -> tuple[list[int], list[float]]:
        """Returns the output's token ids and their times.

        Raises:
            UserError: the ids are unknown, since the server counts another number of tokens.
        """
        chunks = answer.chunks
        if text is None:
            if any(chunk.ids is None and chunk.text for chunk in chunks):
                raise UserError(
                    f"{self.version} sends no token ids: use strategy.options.prompt=text"
                )
            pairs = [(token, chunk.at_s) for chunk in chunks for token in chunk.ids or ()]
            return [token for token, _ in pairs], [at_s for _, at_s in pairs]
        whole = text + "".join(chunk.text for chunk in chunks)
        ids, ends = self._encoded(whole)
        first = len(prompt)
        arrived = list(_arrivals(len(text), chunks))
        times = [next(at for end, at in arrived if end >= stop) for stop in ends[first:]]
        tokens = ids[first:]
        counted = len(tokens) if answer.counted is None else answer.counted
        # The text lacks the end token, but some servers count it.
        ends_unseen = answer.stopped and bool(self._eos_ids)
        if ids[:first] != list(prompt) or not len(tokens) <= counted <= len(tokens) + ends_unseen:
            raise UserError(
                f"{self.version} counts {counted} tokens of a text that encodes to {len(tokens)}:"
                " the tokens are not known; use strategy.options.prompt=ids, where the server"
                " returns token ids"
            )
        if ends_unseen:
            tokens.append(self._eos_ids[0])
            times.append(chunks[-1].at_s)
        return tokens, times


def _messages(answer: Any) -> Iterator[dict[str, Any]]:
    """Yields the JSON objects of a stream of server-sent events."""
    for line in answer:
        name, _, data = line.decode().partition(":")
        if name == "data" and data.strip() != "[DONE]":
            yield json.loads(data)


def _arrivals(start: int, chunks: Sequence[Chunk]) -> Iterator[tuple[int, float]]:
    """Yields (end of the text so far, time) per chunk; the prompt has ``start`` characters."""
    for chunk in chunks:
        start += len(chunk.text)
        yield start, chunk.at_s


def _draw_fields(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of sampled requests; ``top_k``, not in OpenAI's API, only if set."""
    if not sampling["temperature"]:
        return {}
    fields = {"top_p": sampling["top_p"], "seed": sampling["seed"]}
    return {**fields, "top_k": sampling["top_k"]} if sampling["top_k"] else fields
