"""Candidates of a plan (preset, device layout, policy sizes), and their timing by simulation."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from specdec.config.job import run_job_of
from specdec.config.options import options, own_values
from specdec.config.profiles import fit
from specdec.errors import UserError
from specdec.metrics import RequestResult, RunTotals
from specdec.metrics.times import decode_phase
from specdec.pairs import ModelPair
from specdec.parts.build import locate
from specdec.parts.fields import did_you_mean, signature_of
from specdec.planning.machines import Layout, Machine, scaled
from specdec.runs.runners import PartsRunner, TokenPrompt
from specdec.sources import NullSource, SyntheticSource
from specdec.state import StopRules
from specdec.types import FloatArray

PLAIN = "ar"
OTHER_PROGRAM = "decoding of another program, which is not simulated"
"""The reason to leave out presets that run another program instead of composing parts."""

_RUNS_MODELS = {"pair", "runner", "make_first_stage"}  # arguments of sources that run models
_PROMPT_TOKENS = 16
_DIGITS = 9  # a clock's sums round differently after earlier runs; nanoseconds are reproducible
_RESAMPLES = 2000

SIZES: Mapping[str, tuple[Any, ...]] = {
    "gamma": (1, 2, 3, 4, 5, 6, 8, 10, 12, 16),
    "branching": (
        *([2, 2, 1, 1], [1, 1, 3, 1, 1, 1, 1, 1], [4, 2, 2, 1, 1]),
        *([3, 2, 1, 1, 1, 1], [8, 4, 2, 1, 1, 1]),
    ),
    "width": (4, 8, 16, 32, 64),
    "children": (2, 4, 8, 16),
    "depth": (3, 5, 8, 12),
    "bs": (4, 8, 16, 32, 64),
    "w": (1, 2, 4, 8, 16),
    "d": (2, 3, 4, 6, 8, 12),
    "min_prob": (0.0, 0.01, 0.04, 0.1),
    "draft_passes": (1, 2, 3, 4),
    "tokens": (1, 2, 3, 4, 6, 8),
    "cutoff": (0.0, 0.1, 0.3),
    "lookahead": (1, 2, 3, 4, 6, 8),
    "ahead": (8, 16, 32, 64),
    "outcomes": (4, 8, 16, 32),
    "nodes": (16, 32, 60, 80),
    "segment": (8, 16, 32),
}
"""Key of a policy -> values that the search tries, one key after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    name: str
    config: Mapping[str, Any]
    layout: Layout = field(default_factory=Layout)
    sizes: Mapping[str, Any] = field(default_factory=dict)  # what differs from the preset's policy
    free: int = 0  # models that run on a device of their own by construction
    # Whether real models decode it on the simulated clock, as its source reads tokens or states.
    decoded: bool = False

    @property
    def key(self) -> str:
        parts = ("source", "policy", "verifier", "executor", "serving", "seed", "batch_size")
        values = {part: self.config.get(part) for part in parts}
        values["costs"] = self.config["clock"]["costs"]
        return sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:20]

    @property
    def copies(self) -> bool:
        return "replicas" in self.config["executor"]

    @property
    def staged(self) -> bool:
        """Whether the executor is a pipeline, or local, which ``on`` may replace by a pipeline."""
        executor = self.config["executor"]
        return not self.copies and ("target_degree" in executor or len(executor) == 1)

    def __str__(self) -> str:
        return label(self.name, self.sizes)

    def on(self, machine: Machine, layout: Layout, *, batch: int, context: int) -> Candidate:
        costs, node = machine.costs(layout, batch, context), dict(self.config["executor"])
        clock = clock_node(machine.name, costs, machine.note)
        if len(node) == 1 and (layout.stages * layout.degree > 1 or layout.own_draft):
            node = own_values(options("executor")["pipeline"])
        if self.copies:
            node |= {"replicas": layout.replicas, "transport": "in_process"}
        if "target_degree" in node:
            degrees = {"target_degree": layout.degree, "draft_degree": layout.draft_degree}
            node |= {key: degree if degree > 1 else None for key, degree in degrees.items()}
            node |= {"stages": layout.stages, "groups": None, "shared": False}
            node |= {"transport": "in_process"}
        config = fit({**self.config, "executor": node, "clock": clock, "batch_size": batch})
        return replace(self, layout=layout, config=config)

    def with_size(self, key: str, value: Any) -> Candidate:
        config = {**self.config, "policy": {**self.config["policy"], key: value}}
        return replace(self, config=config, sizes={**self.sizes, key: value})

    def rescaled(self, factors: Mapping[str, float]) -> Candidate:
        clock = self.config["clock"]
        costs = {k: scaled(curve, factors.get(k, 1.0)) for k, curve in clock["costs"].items()}
        return replace(self, config={**self.config, "clock": {**clock, "costs": costs}})

    def smaller(self) -> list[Candidate]:
        policy = self.config["policy"]
        sizes = [(k, policy[k] // by) for k in SIZES if type(policy.get(k)) is int for by in (2, 4)]
        return [self.with_size(key, size) for key, size in sizes if size]


def clock_node(name: str, costs: Mapping[str, Any], note: str = "") -> dict[str, Any]:
    return {"kind": "simulated", "profile": name, "scale": 1.0, "note": note, "costs": costs}


def label(name: str, sizes: Mapping[str, Any]) -> str:
    words = (f"{key}={json.dumps(value, separators=(',', ':'))}" for key, value in sizes.items())
    return " ".join([name, *words])


def presets(
    words: Sequence[str],
    extra: Sequence[Path],
    names: Sequence[str],
    pair: ModelPair | None = None,
    *,
    measured: bool = False,
) -> tuple[list[Candidate], dict[str, str]]:
    """Returns the presets that can be simulated, in the default layout, and why others cannot.

    ``words`` are configuration overrides, ``extra`` configuration folders. With ``pair``, which has
    a fitted or recorded acceptance, plain decoding is added to ``names`` (empty: all). Without it
    real models decode, so sources may read tokens and hidden states, but those with a model or head
    of their own are refused unless measured runs will correct the costs (``measured``).
    """
    known = options("strategy", extra)
    for name in names:
        if name not in known:
            raise UserError(f"strategies: {name} is unknown: {did_you_mean(name, known)}")
    if pair is not None:
        names = [PLAIN, *(names or known)]
        run_job_of([*words, f"strategy={PLAIN}", "clock=simulated"], extra)  # raises for bad words
    found: list[Candidate] = []
    left_out: dict[str, str] = {}
    for name in dict.fromkeys(names):
        if own_values(known[name]).get("strategy", {}).get("kind", "parts") != "parts":
            left_out[name] = OTHER_PROGRAM
            continue
        try:
            config = run_job_of([*words, f"strategy={name}", "clock=simulated"], extra).config
            source: Any = config["source"]
            if pair is not None:
                source = pair.fitted_source(source, config["policy"])
            sources = list(_sources(source))
            for cls, is_leaf in sources:
                if pair is not None and is_leaf and cls not in (SyntheticSource, NullSource):
                    lacks = "reads tokens or hidden states, which a law or record does not have"
                elif pair is None and not measured and _RUNS_MODELS & {*signature_of(cls).objects}:
                    lacks = "has passes of its own, whose time the profile does not have"
                else:
                    continue
                raise UserError(f"{cls.__name__} {lacks}")
        except UserError as error:
            left_out[name] = str(error)
            continue
        free = sum("free_rank" in signature_of(cls).plain for cls, _ in sources)
        found.append(Candidate(name=name, config=config, free=free, decoded=pair is None))
    return found, left_out


def _sources(node: Any) -> Iterator[tuple[type, bool]]:
    values = node.values() if isinstance(node, Mapping) else node if isinstance(node, list) else ()
    inner = [found for value in values for found in _sources(value)]
    if isinstance(node, Mapping) and "_target_" in node:
        yield locate(node["_target_"], "source"), not inner
    yield from inner


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Counts of a batch of prompts that were served together; times in seconds."""

    requests: int
    tokens: int  # of all requests' decode phases, whose time is ``seconds``
    seconds: float
    emitted: int  # all tokens
    clock_s: float  # from start to end
    answers: int  # of the target
    hits: int  # answers whose next token was in the tree
    draft_s: float  # of all drafting
    hidden_s: float  # of drafting that overlapped target work

    @property
    def later_answers(self) -> int:
        """Number of answers in decode phases, which begin with the first answer to each request."""
        return self.answers - self.requests

    @staticmethod
    def of(results: Sequence[RequestResult], totals: RunTotals) -> Unit:
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


TIMES = ("seconds", "clock_s", "draft_s", "hidden_s")


@dataclass(frozen=True, slots=True)
class Times:
    """Numerators and denominators (seconds, tokens, ...) of a ratio over U units, float64[U]."""

    above: FloatArray
    below: FloatArray

    @staticmethod
    def ratio(units: Sequence[Unit], above: str, below: str, scale: float = 1.0) -> Times:
        counts = np.array([[getattr(unit, key) for unit in units] for key in (above, below)], float)
        return Times(scale * counts[0], np.maximum(counts[1], 1e-9))

    @staticmethod
    def of(units: Sequence[Unit], objective: str, devices: int = 1) -> Times:
        """Returns seconds per token: of one request for "latency", else of all requests together,
        multiplied by ``devices`` for "per_device".
        """
        if objective == "latency":
            return Times.ratio(units, "seconds", "tokens")
        return Times.ratio(units, "clock_s", "emitted", devices if objective == "per_device" else 1)

    @property
    def mean(self) -> float:
        return float(self.above.sum() / self.below.sum())

    def resampled(self, count: float) -> FloatArray:
        """Returns float64[R], the ratio in R bootstrap samples of ``count`` units each. All
        candidates use the same samples, so that comparisons are paired.
        """
        shape = (_RESAMPLES, max(1, round(count)))
        picks = np.random.default_rng(0).integers(0, len(self.above), shape)
        means: FloatArray = self.above[picks].sum(axis=1) / self.below[picks].sum(axis=1)
        return means


def effective(simulated: float, requests: float) -> float:
    """Returns 1 / (1 / n + 1 / m), the effective number of n units simulated with an acceptance
    model that was fitted to m requests; n if m is 0, which means that m is unknown or that the
    units are the recorded requests themselves.
    """
    return 1.0 / (1.0 / simulated + 1.0 / requests) if requests else float(simulated)


def interval(values: FloatArray) -> tuple[float, float]:
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)


class Simulator:
    """Decodes prompts with candidates on a simulated clock; stores results for a resumed search."""

    def __init__(
        self,
        pair: ModelPair,
        path: Path | None = None,
        *,
        prompts: int,
        models: Callable[[], tuple[ModelPair, Sequence[TokenPrompt]]] | None = None,
    ) -> None:
        """Reads the results that an earlier search has stored in the file ``path``.

        ``prompts``: number of prompts, random ones or the first of a recorded run. ``models`` loads
        real models, for candidates that no acceptance model or record can reproduce.
        """
        self._pair, self._path, self._models = pair, path, models
        self._known: dict[str, Unit] = {}
        self.simulated_tokens = 0
        shape = (prompts, _PROMPT_TOKENS)
        drawn = np.random.default_rng(0).integers(1, pair.vocab_size, shape, np.int64)
        recorded = pair.prompts() or list(enumerate(drawn))
        self._prompts = [TokenPrompt(*prompt) for prompt in recorded[:prompts]]
        for line in path.read_text("utf-8").splitlines() if path and path.is_file() else ():
            try:
                values = json.loads(line)
                key = values.pop("key")
                self._known[key] = Unit(**values)
            except (ValueError, KeyError, TypeError):
                if line.endswith("}"):  # otherwise cut by an interruption
                    raise UserError(
                        f"{path} is damaged: delete it, and start the same command again"
                    ) from None

    @property
    def num_prompts(self) -> int:
        return len(self._prompts)

    def units(self, candidate: Candidate, count: int, length: int) -> list[Unit]:
        """Returns the first ``count`` units (batches of ``batch_size`` prompts), or fewer if there
        are too few prompts; each output has ``length`` tokens.
        """
        batch = int(candidate.config["batch_size"])
        count = min(count, max(len(self._prompts) // batch, 1))
        keys = [f"{candidate.key}:{length}:{at}" for at in range(count)]
        if not self._known.keys() >= {*keys}:
            self._decode(candidate, keys, batch, length)
        return [self._known[key] for key in keys]

    def put(self, made: Candidate, length: int, units: Sequence[Unit]) -> None:
        """Stores measured results of the first units, to be used in place of simulations."""
        for at, unit in enumerate(units):
            self._keep(f"{made.key}:{length}:{at}", unit)

    def copy_scaled(self, made: Candidate, slower: Candidate, factor: float) -> None:
        """Copies the results of ``made`` to ``slower``, with times multiplied by ``factor``. All
        costs of ``slower`` are ``factor`` times as large, so it decodes in the same steps.
        """
        for key, unit in list(self._known.items()):
            target = key.replace(made.key, slower.key)
            if target not in self._known:
                times = {name: round(getattr(unit, name) * factor, _DIGITS) for name in TIMES}
                self._keep(target, replace(unit, **times))

    def _decode(self, candidate: Candidate, keys: Sequence[str], batch: int, length: int) -> None:
        pair: ModelPair = self._pair
        prompts: Sequence[TokenPrompt] = self._prompts
        if candidate.decoded:
            assert self._models is not None
            pair, prompts = self._models()
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
                    unit = Unit.of(results, totals)
                    self._keep(key, unit)
                    self.simulated_tokens += unit.emitted
        finally:
            runner.close()

    def _keep(self, key: str, unit: Unit) -> None:
        self._known[key] = unit
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, **asdict(unit)}) + "\n")
