"""Decoding from Python: ``generate`` and ``stream`` for one prompt, ``Decoder`` for several."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from specdec.config.job import run_job_of
from specdec.data import Prompt, prompt_tokens
from specdec.errors import UserError
from specdec.metrics import RequestResult, summarise
from specdec.pairs import ModelPair, build_pair
from specdec.runs.jobs import stop_rules
from specdec.runs.runners import PartsRunner, TokenPrompt
from specdec.state import DecodeState, RequestState

if TYPE_CHECKING:
    from specdec.certify import Report

_INCOMPLETE = "\ufffd"  # decoded from a character whose last bytes are missing


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Result of ``generate``.

    Attributes:
        text: the decoded output; empty for pairs without a tokenizer.
        tokens: output tokens.
        origins: per token the index of the source that proposed it; -1 for none.
        finish_reason: eos, stop_string, length or cancelled.
        metrics: metrics of the run, by the names of docs/metrics.md.
    """

    text: str
    tokens: tuple[int, ...]
    origins: tuple[int, ...]
    finish_reason: str
    metrics: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The tokens decided in one step of the loop.

    Attributes:
        tokens: at least one.
        origins: per token the index of the source that proposed it; -1 for none.
        text: decoded text; a character is complete with its last byte's step. Empty for pairs
            without a tokenizer.
        finish_reason: eos, stop_string or length at the last step, else None.
    """

    tokens: tuple[int, ...]
    origins: tuple[int, ...]
    text: str
    finish_reason: str | None


OnStep = Callable[[Step], bool | None]
"""Called with each step; returning False cancels the request."""


class Decoder:
    """A strategy with its models, for decoding prompts one after the other.

        with Decoder(["strategy=best_first", "sampling=t06"]) as decoder:
            for step in decoder.stream("def fib(n):"):
                print(step.text, end="")

    Models stay loaded, and ranks of a distributed pipeline running, until ``close``. A cancelled
    request releases its caches and work in flight like any other.
    """

    def __init__(
        self,
        overrides: Sequence[str] = (),
        *,
        config_dirs: Sequence[str | Path] = (),
        pair: ModelPair | None = None,
    ) -> None:
        """Composes the strategy.

        Args:
            overrides: as on the command line of ``specdec run``.
            config_dirs: further configuration trees (``--config-dir``).
            pair: models to share with other decoders; built from ``model=`` if omitted.

        Raises:
            UserError: anything that the command line refuses.
        """
        cfg = _config(overrides, config_dirs)
        if cfg["strategy"]["kind"] != "parts":
            raise UserError(
                f"strategy={cfg['strategy']['name']} is transformers' own decoding; call its"
                " generate, or compare it with `specdec compare`"
            )
        self._max_new_tokens = int(cfg["max_new_tokens"])
        self.pair = pair or build_pair(cfg["model"])
        self._runner = PartsRunner(
            cfg=cfg, pair=self.pair, stop=stop_rules(cfg, self.pair), on_step=self._tell
        )
        self._follower: _Follower | None = None
        self._on_step: OnStep | None = None
        self._raised: BaseException | None = None  # by on_step
        self._busy = self._broken = False

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        prompt_id: int = 0,
        chat: bool = False,
        on_step: OnStep | None = None,
    ) -> Generation:
        """Decodes one prompt to its end.

        Args:
            prompt: text, or token ids.
            prompt_id: of the draws, together with ``seed=``.
            chat: apply the model's chat template to the text, as the user's message.
            on_step: called with each step; returning False cancels the request.

        Raises:
            UserError: a prompt that is empty or too long, text without a tokenizer, a decoder that
                is decoding already, or one in which a step was interrupted.
        """
        tokens = self._tokens(prompt, prompt_id, chat)
        results: list[RequestResult] = []
        with self._decoding():
            self._follower, self._on_step = _Follower(self.pair), on_step
            with self._whole_steps():
                totals = self._runner.run([tokens], results.append)
        if self._raised is not None:
            raise self._raised
        result = results[0]
        return Generation(
            text=result.text,
            tokens=result.output,
            origins=result.origins,
            finish_reason=result.finish_reason,
            metrics=summarise(results, totals),
        )

    def stream(
        self, prompt: str | Sequence[int], *, prompt_id: int = 0, chat: bool = False
    ) -> Iterator[Step]:
        """Decodes one prompt and yields the tokens of each step.

        Stop iterating to cancel; the decoder then accepts the next prompt. Arguments and errors are
        those of ``generate``. One stream at a time.
        """
        tokens = self._tokens(prompt, prompt_id, chat)
        with self._decoding():
            state = self._runner.parts.new_state()
            follower = _Follower(self.pair)
            steps = self._runner.steps(state, [tokens], _ignore)
            try:
                while self._has_step(steps):
                    step = follower.step(state.requests[tokens.id])
                    if step is not None:
                        yield step
            finally:
                for request in state.requests.values():
                    request.cancel()
                while self._has_step(steps):  # one more step, in which the parts close the request
                    pass

    def close(self) -> None:
        """Releases the executor's memory and ends its ranks."""
        self._runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @contextmanager
    def _decoding(self) -> Iterator[None]:
        """Marks the decoder busy: two prompts of one id would be mixed up."""
        self._busy, self._raised = True, None
        try:
            yield
        finally:
            self._busy = False
            self._follower = self._on_step = None

    @contextmanager
    def _whole_steps(self) -> Iterator[None]:
        """Marks the decoder broken if a step is interrupted: rows would remain in flight."""
        try:
            yield
        except BaseException:
            self._broken = True
            raise

    def _has_step(self, steps: Iterator[object]) -> bool:
        with self._whole_steps():
            return next(steps, None) is not None

    def _tell(self, state: DecodeState) -> None:
        """Calls ``on_step``; its exception is raised after the request has ended."""
        for request in state.requests.values():
            if self._on_step is None or self._follower is None:
                return
            step = self._follower.step(request)
            try:
                if step is not None and self._on_step(step) is False:
                    request.cancel()
            except BaseException as error:  # raised by ``generate``, once closed
                self._raised, self._on_step = error, None
                request.cancel()

    def _tokens(self, prompt: str | Sequence[int], prompt_id: int, chat: bool) -> TokenPrompt:
        if self._broken:
            raise UserError(
                "an earlier call was interrupted within a step, and its rows in flight must not mix"
                " with another prompt: close this decoder and create a new one (pair=decoder.pair"
                " keeps the models)"
            )
        if self._busy:
            raise UserError(
                "this decoder is decoding another prompt: end or close that stream first, or create"
                " a second decoder (pair=decoder.pair shares the models)"
            )
        pair = self.pair
        if not isinstance(prompt, str):
            ids = _token_ids(prompt)
        elif pair.tokenizer is None:
            raise UserError("this pair has no tokenizer: give the prompt as token ids")
        else:
            text = Prompt(prompt_id, prompt, "the prompt", "", prompt)
            template = "always" if chat else "never"
            ids = prompt_tokens(text, pair.tokenizer, chat=template).tolist()
        if not ids:
            raise UserError("the prompt is empty; give at least one token, e.g. a space")
        wrong = [token for token in ids if not 0 <= token < pair.vocab_size]
        if wrong:
            raise UserError(
                f"token {wrong[0]} is not in the model's vocabulary of {pair.vocab_size} tokens"
            )
        room = pair.max_positions
        if room is not None and len(ids) + self._max_new_tokens > room:
            raise UserError(
                f"the prompt's {len(ids)} tokens and max_new_tokens={self._max_new_tokens} exceed"
                f" the model's {room} positions; shorten one of them"
            )
        return TokenPrompt(prompt_id, np.asarray(ids, np.int64))


def _token_ids(prompt: object) -> list[int]:
    """The token ids of one prompt."""
    try:
        return [operator.index(token) for token in prompt]  # type: ignore[attr-defined]
    except TypeError as error:
        raise UserError(
            f"a prompt is text or a list of token ids, not {prompt!r:.60}; decode several prompts"
            " by one call each (or as a batch by `specdec run batch_size=`)"
        ) from error


class _Follower:
    """Computes the new tokens and text of a request after each step."""

    def __init__(self, pair: ModelPair) -> None:
        self._tokenizer = pair.tokenizer
        self._num_tokens = 0
        self._text = ""

    def step(self, request: RequestState) -> Step | None:
        """The new tokens; None if there are none (pipeline filling, prefill)."""
        first, self._num_tokens = self._num_tokens, len(request.output)
        if first == self._num_tokens:
            return None
        return Step(
            tokens=tuple(request.output[first:]),
            origins=tuple(request.output_origins[first:]),
            text=self._new_text(request),
            finish_reason=request.finish_reason,
        )

    def _new_text(self, request: RequestState) -> str:
        if self._tokenizer is None:
            return ""
        text = str(self._tokenizer.decode(request.output))
        if request.finish_reason is None and text.endswith(_INCOMPLETE):
            return ""
        new, self._text = text[len(self._text) :], text
        return new


def _ignore(_request: RequestState) -> None:
    """Does nothing: the last step of a stream has its finish reason."""


def generate(
    prompt: str | Sequence[int],
    *,
    overrides: Sequence[str] = (),
    config_dirs: Sequence[str | Path] = (),
    prompt_id: int = 0,
    pair: ModelPair | None = None,
    chat: bool = False,
    on_step: OnStep | None = None,
) -> Generation:
    """Decodes one prompt.

        specdec.generate("def fib(n):", overrides=["strategy=best_first", "sampling=t06"])

    Args:
        prompt: text, or token ids.
        overrides, config_dirs, pair: see ``Decoder``.
        prompt_id, chat, on_step: see ``Decoder.generate``.

    Raises:
        UserError: anything that the command line refuses, and an empty prompt.
    """
    with Decoder(overrides, config_dirs=config_dirs, pair=pair) as decoder:
        return decoder.generate(prompt, prompt_id=prompt_id, chat=chat, on_step=on_step)


def stream(
    prompt: str | Sequence[int],
    *,
    overrides: Sequence[str] = (),
    config_dirs: Sequence[str | Path] = (),
    prompt_id: int = 0,
    pair: ModelPair | None = None,
    chat: bool = False,
) -> Iterator[Step]:
    """Like ``generate``, but yields the tokens of each step.

    Stop iterating to cancel. Arguments and errors are those of ``generate``.
    """
    with Decoder(overrides, config_dirs=config_dirs, pair=pair) as decoder:
        yield from decoder.stream(prompt, prompt_id=prompt_id, chat=chat)


def certify(
    overrides: Sequence[str] = (),
    *,
    config_dirs: Sequence[str | Path] = (),
    checks: Sequence[str] | None = None,
    depth: str = "standard",
) -> Report:
    """Certifies a configuration, as ``specdec verify`` does.

    Args:
        overrides: as on the command line.
        config_dirs: further configuration trees (``--config-dir``).
        checks: names of the checks; None for all.
        depth: "standard", or "full" for deeper checks.

    Raises:
        UserError: anything that the command line refuses.
    """
    from specdec.certify import certify as run_checks

    return run_checks(_config(overrides, config_dirs), checks=checks, depth=depth)


def _config(overrides: Sequence[str], config_dirs: Sequence[str | Path]) -> dict[str, Any]:
    for name, value in (("overrides", overrides), ("config_dirs", config_dirs)):
        if isinstance(value, str):
            raise UserError(f"{name}={value!r} must be a list, as in {name}=[{value!r}]")
    return run_job_of(list(overrides), [Path(folder) for folder in config_dirs]).config
