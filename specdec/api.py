"""Decoding from Python: ``generate``, ``stream``, ``Decoder``, ``compare`` and ``verify``."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Self, overload
from warnings import warn

import numpy as np

from specdec.config.folders import run_in
from specdec.config.hydra import check_lists
from specdec.config.job import COMPARISON_FILE, compose_comparison, run_job_of
from specdec.data import Prompt, prompt_tokens
from specdec.errors import UserError
from specdec.files import plain
from specdec.metrics import RequestResult, summarise
from specdec.pairs import ModelPair, build_pair
from specdec.report import results
from specdec.report.results import Result
from specdec.runs.jobs import compare_jobs, stop_rules, with_pair
from specdec.runs.progress import Progress
from specdec.runs.runners import PartsRunner, TokenPrompt, decoded
from specdec.state import DecodeState, RequestState

if TYPE_CHECKING:
    from pandas import DataFrame

    from specdec.certify import Report

_INCOMPLETE = "\ufffd"  # decoded from a character whose last bytes are missing


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Result of ``generate`` for one prompt.

    Attributes:
        text: the decoded output without special tokens; empty if the models have no tokenizer.
        tokens: output tokens.
        origins: for each token the index of the source that proposed it; -1 for none.
        finish_reason: eos, stop_string, length or cancelled.
        metrics: metrics (docs/metrics.md) of the whole call, over all of its prompts.
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
        tokens: ids of the step's tokens, at least one.
        origins: for each token the index of the source that proposed it; -1 for none.
        text: decoded text; a character appears in the step that decides its last byte. Empty for
            pairs without a tokenizer.
        finish_reason: eos, stop_string or length at the last step, else None.
        prompt_id: id of the prompt that the tokens continue (``Decoder.generate``).
    """

    tokens: tuple[int, ...]
    origins: tuple[int, ...]
    text: str
    finish_reason: str | None
    prompt_id: int = 0


OnStep = Callable[[Step], bool | None]
"""A function that is called with each step; if it returns False, the request is cancelled."""


class _Progress:
    def __init__(self, pair: ModelPair) -> None:
        self._tokenizer = pair.tokenizer
        self._num_tokens = 0
        self._text = ""

    def step(self, request: RequestState) -> Step | None:
        """Returns the request's new tokens; None if there are none, as while a pipeline fills."""
        first, self._num_tokens = self._num_tokens, len(request.output)
        if first == self._num_tokens:
            return None
        text = decoded(request.output, self._tokenizer)
        new = text[len(self._text) :]
        if request.finish_reason is None and text.endswith(_INCOMPLETE):
            new = ""
        else:
            self._text = text
        return Step(
            tokens=tuple(request.output[first:]),
            origins=tuple(request.output_origins[first:]),
            text=new,
            finish_reason=request.finish_reason,
            prompt_id=request.id,
        )


class Decoder:
    """A strategy with its models, for decoding prompts one after the other or in batches.

        with Decoder(["strategy=best_first", "sampling=t06"]) as decoder:
            for step in decoder.stream("def fib(n):"):
                print(step.text, end="")

    Models stay loaded, and the processes of a distributed pipeline stay running, until ``close``.
    A cancelled request releases its caches and its work in flight, as a finished one does.
    """

    def __init__(
        self,
        overrides: Sequence[str] = (),
        *,
        config_dirs: Sequence[str | Path] = (),
        pair: ModelPair | None = None,
    ) -> None:
        """Builds the strategy and its models.

        Args:
            overrides: settings ``key=value``, as on the command line of ``specdec run``.
            config_dirs: folders of further configuration files (``--config-dir``).
            pair: models to share with other decoders; built from ``model=`` if omitted.
        """
        cfg = _config(overrides, config_dirs)
        _check_pair(pair)
        for word in overrides:
            if word.startswith(("data=", "data.")):
                warn(f"{word} is not used here: the prompts are given to generate", stacklevel=2)
        if cfg["strategy"]["kind"] != "parts":
            raise UserError(
                f"strategy={cfg['strategy']['name']} is transformers' own decoding; call its"
                " generate, or compare it with `specdec compare`"
            )
        self._max_new_tokens = int(cfg["max_new_tokens"])
        self.pair = pair or build_pair(cfg["model"])
        self._runner = PartsRunner(
            cfg=cfg, pair=self.pair, stop=stop_rules(cfg, self.pair), on_step=self._report
        )
        self._progress: dict[int, _Progress] = {}  # by prompt id
        self._on_step: OnStep | None = None
        self._raised: BaseException | None = None  # by on_step
        self._busy = self._broken = False

    @overload
    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        prompt_id: int = 0,
        chat: bool = False,
        on_step: OnStep | None = None,
    ) -> Generation: ...

    @overload
    def generate(
        self,
        prompt: list[str] | list[list[int]],
        *,
        prompt_id: int = 0,
        chat: bool = False,
        on_step: OnStep | None = None,
    ) -> list[Generation]: ...

    def generate(
        self,
        prompt: str | Sequence[int] | list[str] | list[list[int]],
        *,
        prompt_id: int = 0,
        chat: bool = False,
        on_step: OnStep | None = None,
    ) -> Generation | list[Generation]:
        """Decodes one prompt, or several, to the end.

        Args:
            prompt: text or token ids, or a list of prompts, of which ``batch_size=`` are decoded at
                a time.
            prompt_id: id of the prompt, on which its random numbers depend together with ``seed=``;
                for a list, the first prompt's id, and further prompts have the following ids.
            chat: apply the model's chat template to the text, as the user's message.
            on_step: called with each step; if it returns False, the step's request is cancelled.

        Returns:
            One generation per prompt, in their order; for a single prompt the generation itself.

        Raises:
            UserError: a prompt is empty, too long, or text although there is no tokenizer; or the
                decoder is decoding already, or an earlier call was interrupted within a step.
        """
        given, several = _each(prompt)
        prompts = [self._tokens(p, prompt_id + i, chat) for i, p in enumerate(given)]
        results: list[RequestResult] = []
        with self._decoding():
            self._progress = {p.id: _Progress(self.pair) for p in prompts}
            self._on_step = on_step
            with self._whole_steps():
                totals = self._runner.run(prompts, results.append)
        if self._raised is not None:
            raise self._raised
        metrics = summarise(results, totals)
        generations = [
            Generation(
                text=result.text,
                tokens=result.output,
                origins=result.origins,
                finish_reason=result.finish_reason,
                metrics=metrics,
            )
            for result in sorted(results, key=lambda r: r.id)
        ]
        return generations if several else generations[0]

    def stream(
        self, prompt: str | Sequence[int], *, prompt_id: int = 0, chat: bool = False
    ) -> Iterator[Step]:
        """Decodes one prompt and yields the tokens of each step.

        Stop iterating to cancel; the decoder then accepts the next prompt. Arguments and errors are
        those of ``generate``. Only one stream can be open.
        """
        tokens = self._tokens(prompt, prompt_id, chat)
        with self._decoding():
            state = self._runner.parts.new_state()
            progress = _Progress(self.pair)
            steps = self._runner.steps(state, [tokens], lambda _: None)
            try:
                while self._has_step(steps):
                    step = progress.step(state.requests[tokens.id])
                    if step is not None:
                        yield step
            finally:
                for request in state.requests.values():
                    request.cancel()
                while self._has_step(steps):  # one more step, in which the parts close the request
                    pass

    def close(self) -> None:
        self._runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @contextmanager
    def _decoding(self) -> Iterator[None]:
        self._busy, self._raised = True, None
        try:
            yield
        finally:
            self._busy = False
            self._progress, self._on_step = {}, None

    @contextmanager
    def _whole_steps(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._broken = True
            raise

    def _has_step(self, steps: Iterator[object]) -> bool:
        with self._whole_steps():
            return next(steps, None) is not None

    def _report(self, state: DecodeState) -> None:
        for request in state.requests.values():
            if self._on_step is None:
                break
            step = self._progress[request.id].step(request)
            try:
                if step is not None and self._on_step(step) is False:
                    request.cancel()
            except BaseException as error:  # raised by ``generate``, once all are closed
                self._raised, self._on_step = error, None
        if self._raised is not None:
            for request in state.requests.values():
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
        pair, ids = self.pair, _checked(prompt)
        if isinstance(prompt, str):
            if pair.tokenizer is None:
                raise UserError("this pair has no tokenizer: give the prompt as token ids")
            text = Prompt(prompt_id, prompt, "the prompt", "", prompt)
            template = "always" if chat else "never"
            ids = _checked(prompt_tokens(text, pair.tokenizer, chat=template))
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


def _is_prompt(item: object) -> bool:
    return isinstance(item, str | list | tuple) or bool(getattr(item, "shape", ()))


def _each(prompt: Any) -> tuple[Sequence[Any], bool]:
    """Returns the prompts, and whether they are given as several."""
    several = isinstance(prompt, list | tuple) and any(map(_is_prompt, prompt))
    return (prompt if several else [prompt]), several


def _checked(prompt: Any) -> Any:
    """Returns text as it is, and anything else as a list of token ids."""
    try:
        if isinstance(prompt, bytes | bytearray | memoryview):
            raise TypeError("its items would be taken for token ids")
        given = prompt if isinstance(prompt, str) else [operator.index(token) for token in prompt]
    except TypeError as error:
        raise UserError(
            f"a prompt is text or a list of token ids, not {prompt!r:.60}; several prompts are a"
            " list of these"
        ) from error
    if not given:
        raise UserError("the prompt is empty; give at least one token, e.g. a space")
    return given


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

    ``overrides``, ``config_dirs`` and ``pair`` are those of ``Decoder``, the other arguments and
    the errors those of ``Decoder.generate``.
    """
    for each in _each(prompt)[0]:  # before models are loaded
        _checked(each)
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
    """Decodes one prompt and yields each step's tokens; for the arguments see ``generate``."""
    _checked(prompt)
    with Decoder(overrides, config_dirs=config_dirs, pair=pair) as decoder:
        yield from decoder.stream(prompt, prompt_id=prompt_id, chat=chat)


def verify(
    overrides: Sequence[str] = (),
    *,
    config_dirs: Sequence[str | Path] = (),
    checks: Sequence[str] | None = None,
    depth: str = "standard",
) -> Report:
    """Runs the checks of ``specdec verify`` on a configuration; returns their report.

    Args:
        overrides, config_dirs: see ``Decoder``.
        checks: names of the checks; None for all.
        depth: "standard", or "full", which tests more cases and takes longer.
    """
    from specdec.certify.certify import certify as run_checks

    check_lists(checks=checks or ())
    return run_checks(_config(overrides, config_dirs), checks=checks, depth=depth)


def _check_pair(pair: object) -> None:
    if not isinstance(pair, ModelPair | None):
        raise UserError(f"pair={pair!r:.60} is no pair of models: give one of specdec.pairs")


def _config(overrides: Sequence[str], config_dirs: Sequence[str | Path]) -> dict[str, Any]:
    check_lists(overrides=overrides, config_dirs=config_dirs)
    return run_job_of(list(overrides), [Path(folder) for folder in config_dirs]).config


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Result of ``compare``; ``print`` shows its table.

    Attributes:
        rows: one per strategy, as in ``comparison.json``: metrics by the names of docs/metrics.md.
        conditions: data, models and environment, which all rows share.
        results: configuration and finished prompts of each strategy.
        table: what ``specdec compare`` prints.
        notes: overrides that do not apply to every row, and notes of the run.
    """

    rows: tuple[Mapping[str, Any], ...]
    conditions: Mapping[str, Any]
    results: tuple[Result, ...]
    table: str
    notes: tuple[str, ...]

    def frame(self) -> DataFrame:
        """Returns one row per strategy; see ``specdec.report.results.frame``."""
        return results.frame(*self.results)

    def prompt_frame(self) -> DataFrame:
        """Returns one row per prompt and repeat; see ``specdec.report.results.prompt_frame``."""
        return results.prompt_frame(*self.results)

    def token_frame(self) -> DataFrame:
        """Returns one row per generated token; see ``specdec.report.results.token_frame``."""
        return results.token_frame(*self.results)

    def __str__(self) -> str:
        return self.table


def compare(
    strategies: Sequence[str],
    overrides: Sequence[str] = (),
    *,
    config_dirs: Sequence[str | Path] = (),
    pair: ModelPair | None = None,
    output_dir: str | Path | None = None,
) -> Compared:
    """Decodes the same prompts with several strategies, as ``specdec compare`` does.

        print(specdec.compare(["ar", "speculative", "best_first"], ["data.limit=2"]))

    Args:
        strategies: names of presets, one row each; times are compared with plain decoding, ``ar``.
        overrides: as on the command line, ``repeats=`` among them.
        config_dirs: folders of further configuration files (``--config-dir``).
        pair: models to use; built from ``model=`` if omitted.
        output_dir: folder for result files, from which a repeated call resumes. Default: that of an
            override ``output_dir=``; without one no files are kept.
    """
    check_lists(strategies=strategies, overrides=overrides, config_dirs=config_dirs)
    _check_pair(pair)
    words = [f"strategies=[{','.join(strategies)}]", *overrides]
    comparison = compose_comparison(words, [Path(folder) for folder in config_dirs])
    if output_dir is None:
        output_dir = comparison.output_dir
    if pair is not None:
        jobs = [replace(job, config=with_pair(job.config, pair)) for job in comparison.jobs]
        comparison = replace(comparison, jobs=tuple(jobs))
    configs, notes = [job.config for job in comparison.jobs], _Notes()
    kept = TemporaryDirectory(prefix="specdec-") if output_dir is None else nullcontext(output_dir)
    with kept as name, redirect_stdout(StringIO()) as printed:
        folder = Path(name)
        compared, _ = run_in(
            folder,
            plain(comparison.config),
            COMPARISON_FILE,
            lambda: compare_jobs(
                configs, folder, comparison.repeats, notes, pair, stays=output_dir is not None
            ),
        )
        table = printed.getvalue() or (folder / "comparison.md").read_text(encoding="utf-8")
        rows = results.read(folder)
    return Compared(
        rows=tuple(compared["rows"]),
        conditions=compared["conditions"],
        results=tuple(rows),
        table=table,
        notes=(*comparison.notices, *notes.texts),
    )


class _Notes(Progress):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)
