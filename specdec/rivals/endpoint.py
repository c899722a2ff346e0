"""Measures an OpenAI-compatible server through its streamed completions.

A chunk of the stream holds what the server sends at once: one token, the tokens of one pass, or of
several. All tokens of a chunk get the time at which the chunk arrived.
"""

import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Annotated, Any, Literal

from pydantic import Field

from specdec.errors import UserError
from specdec.parts.fields import Positive, Text, expects, validated
from specdec.rivals.runtimes import RivalOutput

_SHOWN = 300  # characters of a server's answer that a message shows
_COUNT = re.compile(r"(?m)^vllm:spec_decode_num_(draft|accepted)_tokens_total(?:\{[^}]*\})? (\S+)")

Url = Annotated[
    str, Field(pattern=r"^https?://\S+$"), expects("it must be a URL such as http://host:8000/v1")
]


@validated
@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointOptions:
    """How a server is called: ``prompt`` "ids" sends token ids and requests those of the output
    (vLLM); "text" sends text, which must encode to the same ids.
    """

    base_url: Url  # up to and including the version, as OpenAI's clients take it
    model: Text | None = None  # name there; None for the first that the server lists
    prompt: Literal["ids", "text"] = "text"
    extra: dict[str, Any] = field(default_factory=dict)  # further fields of every request
    api_key_env: Text | None = None  # environment variable of the key; None sends no key
    timeout_s: Positive = 120.0  # without an answer before a request fails


@dataclass(slots=True)
class _Answer:
    # (seconds from the start of the request, text, token ids or None if not sent)
    chunks: list[tuple[float, str, Sequence[int] | None]] = field(default_factory=list)
    counted: int | None = None  # output tokens by the server's count; None if not sent
    drafts: tuple[int, ...] | None = None  # llama.cpp's draft tokens and accepted ones
    stopped: bool = False  # whether an end token ended the output

    def add(self, message: Mapping[str, Any], at_s: float) -> None:
        if message.get("error"):
            raise ValueError(str(message["error"]))
        if message.get("usage"):
            self.counted = int(message["usage"]["completion_tokens"])
        timings = message.get("timings") or {}
        if "draft_n" in timings:
            self.drafts = (int(timings["draft_n"]), int(timings["draft_n_accepted"]))
        for choice in message.get("choices", ())[:1]:
            self.chunks.append((at_s, choice.get("text") or "", choice.get("token_ids")))
            self.stopped |= choice.get("finish_reason") == "stop"


class Endpoint:
    pids = None  # the server's CPU time cannot be measured

    def __init__(
        self, options: EndpointOptions, *, tokenizer: Any, eos_ids: Collection[int]
    ) -> None:
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
        """Decodes token ids; ``sampling`` has the keys temperature, top_p, top_k and seed.
        If the server counts no draft tokens, every chunk of its stream counts as one target pass.
        """
        text = self._text_of(prompt) if self._options.prompt == "text" else None
        body: dict[str, Any] = {"model": self._model, "max_tokens": max_new_tokens, "stream": True}
        body["prompt"] = list(prompt) if text is None else text
        if text is None:
            body |= {"return_token_ids": True, "stream_options": {"include_usage": True}}
        body |= sampling if sampling["temperature"] else {"temperature": 0.0}
        if not sampling["top_k"]:  # it is not in OpenAI's API
            body.pop("top_k", None)
        before = self._counters()
        answer = self._stream({**body, **self._options.extra})
        after, drafts = self._counters(), answer.drafts
        if before and after:
            drafts = tuple(late - early for early, late in zip(before, after, strict=True))
        tokens, times = self._tokens(prompt, text, answer)
        accepted = min(drafts[1] if drafts else 0, max(0, len(tokens) - 1))
        by_chunk = sum(bool(text or ids) for _, text, ids in answer.chunks)
        return RivalOutput(
            tokens=tokens,
            times_s=times,
            wall_s=answer.chunks[-1][0],
            rounds=len(tokens) - accepted if drafts else min(max(1, by_chunk), len(tokens)),
            proposed=drafts[0] if drafts else None,
            accepted=accepted,
        )

    def close(self) -> None:
        """Does nothing, since the server was not started here."""

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
                for line in stream:
                    name, _, data = line.decode().partition(":")  # server-sent events
                    if name == "data" and data.strip() != "[DONE]":
                        answer.add(json.loads(data), perf_counter() - start)
        except (OSError, ValueError, LookupError, TypeError) as error:
            reason = error.read().decode() if isinstance(error, urllib.error.HTTPError) else error
            words = " ".join(str(reason).split())[:_SHOWN]
            raise UserError(f"{self.version} failed: {words}") from error
        if not answer.chunks:
            raise UserError(f"{self.version} sent an empty stream: it must support stream=true")
        return answer

    def _counters(self) -> list[int] | None:
        """Reads vLLM's counts of draft tokens since its start; None if the server has none."""
        try:
            with self._open(f"{self._url.removesuffix('/v1')}/metrics") as answer:
                found = _COUNT.findall(answer.read().decode(errors="replace"))
        except OSError:
            return None
        sums = [sum(int(float(n)) for kind, n in found if kind == k) for k in ("draft", "accepted")]
        return sums if found else None

    def _text_of(self, prompt: Sequence[int]) -> str:
        text = str(self._tokenizer.decode(prompt, skip_special_tokens=True))
        if self._encoded(text)[0] != list(prompt):
            raise UserError(
                "a prompt's text does not encode to its token ids again: use"
                " strategy.options.prompt=ids, where the server takes token ids"
            )
        return text

    def _encoded(self, text: str) -> tuple[list[int], list[int]]:
        found = self._tokenizer(text, return_offsets_mapping=True)
        return list(found["input_ids"]), [end for _, end in found["offset_mapping"]]

    def _tokens(
        self, prompt: Sequence[int], text: str | None, answer: _Answer
    ) -> tuple[list[int], list[float]]:
        """Returns the output's token ids and their times; UserError if the server counts another
        number of tokens than the text has.
        """
        chunks = answer.chunks
        if text is None:
            if any(ids is None and text for _, text, ids in chunks):
                raise UserError(
                    f"{self.version} sends no token ids: use strategy.options.prompt=text"
                )
            pairs = [(int(token), at_s) for at_s, _, ids in chunks for token in ids or ()]
            return [token for token, _ in pairs], [at_s for _, at_s in pairs]
        pieces = [(chunks[0][0], text, None), *chunks]
        arrivals = [at_s for at_s, piece, _ in pieces for _ in piece]  # per character
        ids, stops = self._encoded("".join(piece for _, piece, _ in pieces))
        first = len(prompt)
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
        times = [arrivals[stop - 1] for stop in stops[first:]]
        if ends_unseen:
            tokens.append(self._eos_ids[0])
            times.append(chunks[-1][0])
        return tokens, times
