"""One call for research code: ``specdec.generate``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specdec.cli.jobs import run_job_of
from specdec.engine import stop_rules
from specdec.errors import UserError
from specdec.metrics import RequestResult, summarise
from specdec.pairs import ModelPair, build_pair
from specdec.runners import PartsRunner, TokenPrompt
from specdec.state import RequestState

if TYPE_CHECKING:
    from specdec.verify import Report


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What ``generate`` returns.

    Attributes:
        text: the decoded output; empty for pairs without a tokenizer.
        tokens: output tokens.
        origins: per token the source that proposed it, -1 where none did.
        metrics: the run's metrics by the names of the documentation.
    """

    text: str
    tokens: tuple[int, ...]
    origins: tuple[int, ...]
    metrics: dict[str, Any]


def generate(
    prompt: str | Sequence[int],
    *,
    overrides: Sequence[str] = (),
    prompt_id: int = 0,
    pair: ModelPair | None = None,
) -> Generation:
    """Decodes one prompt.

        specdec.generate("def fib(n):", overrides=["strategy=best_first", "sampling=t06"])

    Args:
        prompt: text, or token ids.
        overrides: as on the command line of ``specdec run``.
        prompt_id: keys the randomness, together with ``seed=``.
        pair: models to reuse between calls; built from ``model=`` where omitted.

    Raises:
        UserError: for anything that the command line would refuse, and for an empty prompt.
    """
    runner, found = _prepared(prompt, overrides, prompt_id, pair)
    results: list[RequestResult] = []
    try:
        totals = runner.run([found], results.append)
    finally:
        runner.close()
    result = results[0]
    return Generation(
        text=result.text,
        tokens=result.output,
        origins=result.origins,
        metrics=summarise(results, totals),
    )


def certify(
    overrides: Sequence[str] = (),
    *,
    config_dirs: Sequence[str | Path] = (),
    checks: Sequence[str] | None = None,
) -> Report:
    """Certifies a configuration, as ``specdec verify`` does.

    Args:
        overrides: as on the command line.
        config_dirs: further configuration trees (``--config-dir``).
        checks: names of those to run; all where None.

    Raises:
        UserError: for anything that the command line would refuse.
    """
    from specdec.verify import certify as run_checks

    cfg = run_job_of(list(overrides), [Path(folder) for folder in config_dirs]).config
    return run_checks(cfg, checks=checks)


def stream(
    prompt: str | Sequence[int],
    *,
    overrides: Sequence[str] = (),
    prompt_id: int = 0,
    pair: ModelPair | None = None,
) -> Iterator[list[int]]:
    """Like ``generate``, yielding the tokens of each step as they are decided.

    Stop iterating to cancel. Arguments and errors are those of ``generate``.
    """
    runner, found = _prepared(prompt, overrides, prompt_id, pair)
    state = runner.parts.new_state()
    seen = 0
    finished: list[RequestState] = []
    try:
        for _ in runner.steps(state, [found], finished.append):
            request = state.requests[found.id]
            if len(request.output) > seen:
                yield request.output[seen:]
                seen = len(request.output)
    finally:
        runner.close()


def _prepared(
    prompt: str | Sequence[int],
    overrides: Sequence[str],
    prompt_id: int,
    pair: ModelPair | None,
) -> tuple[PartsRunner, TokenPrompt]:
    cfg = run_job_of(list(overrides)).config
    if cfg["strategy"]["kind"] != "parts":
        raise UserError(
            f"strategy={cfg['strategy']['name']} is transformers' own decoding; call its generate,"
            " or compare it with `specdec compare`"
        )
    pair = pair or build_pair(cfg["model"])
    if isinstance(prompt, str):
        if pair.tokenizer is None:
            raise UserError("this pair has no tokenizer: give the prompt as token ids")
        ids = pair.tokenizer(prompt)["input_ids"]
    else:
        ids = list(prompt)
    if not ids:
        raise UserError("the prompt is empty; give at least one token, e.g. a space")
    room = pair.max_positions
    if room is not None and len(ids) + int(cfg["max_new_tokens"]) > room:
        raise UserError(
            f"the prompt's {len(ids)} tokens and max_new_tokens={cfg['max_new_tokens']} exceed the"
            f" model's {room} positions; shorten one of them"
        )
    runner = PartsRunner(cfg=cfg, pair=pair, stop=stop_rules(cfg, pair))
    return runner, TokenPrompt(prompt_id, np.asarray(ids, np.int64))
