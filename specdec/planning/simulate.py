"""Decodes candidates on a simulated clock, a few prompts at a time, and stores the results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from specdec.errors import UserError
from specdec.metrics import RequestResult, RunTotals
from specdec.metrics.times import decode_phase
from specdec.pairs import ModelPair
from specdec.planning.layouts import Layout
from specdec.runs.runners import PartsRunner, TokenPrompt
from specdec.state import StopRules

_PROMPT_TOKENS = 16
_DIGITS = 9  # a clock's sums round differently after earlier runs; nanoseconds are reproducible


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A strategy with its sizes in a layout.

    Attributes:
        config: resolved configuration, with the costs of the layout.
        sizes: keys of the policy that differ from the preset ``name``.
        decoded: whether real models decode it on the simulated clock, since its source reads what
            no law or record has.
    """

    name: str
    layout: Layout
    config: Mapping[str, Any]
    sizes: Mapping[str, Any] = field(default_factory=dict)
    decoded: bool = False

    @property
    def key(self) -> str:
        """A digest of all that the times depend on."""
        parts = ("source", "policy", "verifier", "executor", "serving", "seed", "batch_size")
        told = {part: self.config.get(part) for part in parts}
        told["costs"] = self.config["clock"]["costs"]
        return sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:20]

    def told(self) -> str:
        """Returns the preset and its sizes as text."""
        sizes = " ".join(f"{key}={_shown(value)}" for key, value in self.sizes.items())
        return f"{self.name} {sizes}".strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Counts of prompts that were served together.

    Attributes:
        tokens, seconds: of the decode phases, summed over requests.
        emitted, clock_s: all tokens, and the time from start to end.
        answers, hits: answers of the target, and those of them that were hits.
        draft_s, hidden_s: seconds of drafting, and seconds of it that overlapped target work.
    """

    requests: int
    tokens: int
    seconds: float
    emitted: int
    clock_s: float
    answers: int
    hits: int
    draft_s: float
    hidden_s: float


def unit_of(results: Sequence[RequestResult], totals: RunTotals) -> Unit:
    phases = [decode_phase(result) for result in results]
    return Unit(
        requests=len(results),
        tokens=sum(phase.tokens for phase in phases),
        seconds=round(sum(phase.seconds for phase in phases), _DIGITS),
        emitted=sum(len(result.output) for result in results),
        clock_s=round(totals.clock_s, _DIGITS),
        answers=sum(result.counters.answers for result in results),
        hits=sum(result.counters.hits for result in results),
        draft_s=round(totals.draft_total_s, _DIGITS),
        hidden_s=round(totals.draft_hidden_s or 0.0, _DIGITS),
    )


_FIELDS = tuple(item.name for item in fields(Unit))
TIMES = ("seconds", "clock_s", "draft_s", "hidden_s")


class Models(Protocol):
    """Models, and the prompts in the order of the record."""

    @property
    def pair(self) -> ModelPair: ...

    @property
    def prompts(self) -> list[TokenPrompt]: ...


class Simulator:
    """Decodes candidates; results are stored in a file, so that a search can be resumed.

    ``simulated_tokens`` counts tokens that this object decoded, without results read from the file.
    """

    def __init__(
        self,
        pair: ModelPair,
        path: Path | None,
        *,
        of: str,
        prompts: int,
        models: Models | None = None,
    ) -> None:
        """Reads the results that the file has.

        Args:
            pair: models that reproduce the draft's acceptance.
            path: file for results; None stores nothing.
            of: name of what ``pair`` reproduces, a part of the keys of results.
            prompts: number of prompts to draw, or at most to take from a record.
            models: real models for candidates that no law or record can reproduce.
        """
        self._pair, self._path, self._of, self._models = pair, path, of, models
        self._known: dict[str, Unit] = {}
        self.simulated_tokens = 0
        recorded = pair.prompts()
        if recorded is not None:
            self._prompts = [TokenPrompt(*prompt) for prompt in recorded[:prompts]]
        else:
            rng = np.random.default_rng(0)
            drawn = rng.integers(1, pair.vocab_size, (prompts, _PROMPT_TOKENS), np.int64)
            self._prompts = [TokenPrompt(i, row) for i, row in enumerate(drawn)]
        if path is not None and path.is_file():
            self._read(path)

    @property
    def num_prompts(self) -> int:
        return len(self._prompts)

    def units(self, candidate: Candidate, count: int, length: int) -> list[Unit]:
        """Returns the results of the first ``count`` units of ``batch_size`` prompts each.

        There are fewer if there are not enough prompts. ``length`` is in tokens per prompt.
        """
        batch = int(candidate.config["batch_size"])
        count = min(count, max(len(self._prompts) // batch, 1))
        keys = [f"{self._of}:{candidate.key}:{length}:{at}" for at in range(count)]
        if any(key not in self._known for key in keys):
            self._decode(candidate, keys, batch, length)
        return [self._known[key] for key in keys]

    def copy_scaled(self, made: Candidate, scaled: Candidate, factor: float) -> None:
        """Copies results of ``made`` to ``scaled``, whose costs are all ``factor`` times as large.

        The schedule is then the same, so every time is ``factor`` times as long.
        """
        for key, unit in list(self._known.items()):
            of, digest, rest = key.split(":", 2)
            target = f"{of}:{scaled.key}:{rest}"
            if digest == made.key and target not in self._known:
                values = asdict(unit)
                times = {name: round(values[name] * factor, _DIGITS) for name in TIMES}
                self._keep(target, replace(unit, **times), counted=False)

    def _decode(self, candidate: Candidate, keys: Sequence[str], batch: int, length: int) -> None:
        pair, prompts = self._pair, self._prompts
        if candidate.decoded:
            assert self._models is not None
            pair, prompts = self._models.pair, self._models.prompts
        stop = StopRules(max_new_tokens=length, eos_ids=pair.eos_ids)
        runner = PartsRunner(cfg=candidate.config, pair=pair, stop=stop)
        try:
            for at, key in enumerate(keys):
                # A source may remember earlier prompts, so known ones are decoded again.
                if key in self._known and not candidate.decoded:
                    continue
                results: list[RequestResult] = []
                totals = runner.run(prompts[at * batch : (at + 1) * batch], results.append)
                if key not in self._known:
                    self._keep(key, unit_of(results, totals))
        finally:
            runner.close()

    def _keep(self, key: str, unit: Unit, *, counted: bool = True) -> None:
        self._known[key] = unit
        self.simulated_tokens += unit.emitted if counted else 0
        if self._path is not None:
            line = json.dumps({"key": key, **asdict(unit)})
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    def _read(self, path: Path) -> None:
        """Reads complete lines; the last one may be cut by an interruption."""
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                values = json.loads(line)
                self._known[values["key"]] = Unit(**{name: values[name] for name in _FIELDS})
            except (ValueError, KeyError, TypeError):
                if line is not None and line.endswith("}"):
                    raise UserError(
                        f"{path} is damaged: delete it, and start the same command again"
                    ) from None


def _shown(value: Any) -> str:
    return json.dumps(value).replace(" ", "") if isinstance(value, list) else str(value)
