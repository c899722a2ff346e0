"""The configuration under test, with its models replaced by small float64 ones."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import cache, cached_property, partial
from types import FrameType
from typing import Any, TypeVar, cast

import torch

from specdec.certify.cases import VOCAB_SIZE, Case, Decoded
from specdec.certify.oracle import Oracle
from specdec.compose.workbench import Parts, compose
from specdec.config.job import nodes_of
from specdec.config.profiles import load_profile
from specdec.distributed.group import RankGroup
from specdec.errors import UserError
from specdec.models.bundled import family_path
from specdec.models.inspection import CERTIFIED, inspect_model
from specdec.models.random import WINDOWED
from specdec.pairs import ModelPair, RandomPair, build_pair
from specdec.runs.runners import sampling_params
from specdec.sampling.transform import SamplingParams
from specdec.state import RequestState
from specdec.types import Commit

T = TypeVar("T")
Build = Callable[[Mapping[str, Any], ModelPair], Parts]  # by default ``compose``
_Hook = Callable[..., None] | None

WIDE_VOCAB_SIZE = 600  # of "wide": larger than the block size in which a row is summed
WINDOW = 2  # of "window": shorter than the sequences and tree paths that are checked
MAX_POSITIONS = 64
LONG_POSITIONS = 640  # of "long": five blocks of draws
MAX_STAGES = 4  # pipeline stages in one process: more would run the same code again
MAX_RANKS = 8  # pipeline stages that are processes
_MIN_LAYERS = 3
_NO_FLOAT64 = ("triton", "flash")  # attention backends that only ``numerics`` can check
_EXITS = (".EarlyExitSource", ".MultiExitSource")
# Ranks that hang are named soon; a cache of suffixes is built again after a few requests.
_AT_MOST = {"timeout_s": 30.0, "max_tokens": 90}
_SLOW_TARGET = "uniform_30ms"  # latency profile
_MIN_STEPS = 64  # part of the limit on steps that does not depend on the number of tokens


def refuse(cfg: Mapping[str, Any]) -> None:
    """Raises UserError for strategies that are transformers' own decoding."""
    name = cfg["strategy"]["name"]
    if cfg["strategy"]["kind"] != "parts":
        raise UserError(
            f"strategy={name} is transformers' own decoding, so there is nothing here to certify:"
            " choose a strategy of this library's parts, or compare outputs with"
            f" `specdec compare 'strategies=[ar,{name}]'`"
        )


class CannotCompose(UserError):
    """The strategy cannot decode the configured models; no check has failed."""


class Subject:
    """A configuration under test.

    Attributes:
        cfg: the resolved configuration of the user.
        small: the same configuration with a small random float64 pair and few stages.
        claims: the losslessness that the verifier declares.
        full: whether the checks are the deeper ones of ``depth=full``.
        times: factor by which the checks multiply their numbers of requests.
        pair: function that returns the pair of models of a kind (see ``model``), built once each.
    """

    def __init__(
        self, cfg: Mapping[str, Any], *, build: Build = compose, full: bool = False
    ) -> None:
        """Builds the parts once by ``build``, so that an invalid configuration is refused early."""
        refuse(cfg)
        self.cfg = cfg = _with_middle(cfg)
        self.name = str(cfg["strategy"]["name"])
        self.seed, self.batch_size = int(cfg["seed"]), int(cfg["batch_size"])
        self.small = _small(cfg)
        self.build, self.full, self.times = build, full, 4 if full else 1
        self._found: dict[Any, Any] = {}
        self.pair: Callable[[str], ModelPair] = cache(lambda kind: build_pair(self.model(kind)))
        with self.composed("mixed") as parts:
            self.claims, self.draws = parts.verifier.lossless, parts.draws

    def once(self, find: Callable[[Subject], T]) -> T:
        """Returns ``find(self)``, which is computed once for all checks."""
        if find not in self._found:
            self._found[find] = find(self)
        return cast(T, self._found[find])

    @cached_property
    def sampling(self) -> SamplingParams:
        return sampling_params(self.cfg["sampling"])

    def model(self, kind: str) -> dict[str, Any]:
        """Returns the configuration section ``model`` for a kind of test pair.

        The draft predicts about half of the target's tokens in "mixed", "ties" (equal logits) and
        "wide" (large vocabulary), and all in "perfect", "long" (many positions) and "window"
        (sliding window; "window FAMILY" for another model family).
        """
        kind, _, family = kind.partition(" ")
        section, perfect = dict(self.small["model"]), kind in ("perfect", "long", "window")
        section["draft_layers"] = int(section["num_layers"]) - (not perfect)
        if _names_middle(self.cfg.get("source")):  # none for parts made in Python
            section["middle_layers"] = section["draft_layers"]
            section["draft_layers"] -= 1
        section["logit_scale"] = 8.0 if perfect else 4.0  # standard deviations of 6 and 3
        changes: dict[str, dict[str, Any]] = {
            "long": {"max_positions": self.times * LONG_POSITIONS},
            "ties": {"logit_step": 1.0},  # equal logits are common
            "wide": {"vocab_size": WIDE_VOCAB_SIZE},
            "window": {"sliding_window": WINDOW, "family": family or section["family"]},
        }
        return section | changes.get(kind, {})

    @property
    def windowed(self) -> tuple[str, ...]:
        """Kinds of pairs (see ``model``) with a sliding window, for families that can have one."""
        own = self.small["model"]["family"]
        others = sorted(WINDOWED - {own}) if self.full else ()
        return (*(["window"] if own in WINDOWED else []), *(f"window {name}" for name in others))

    def oracle(self, kind: str) -> Oracle:
        pair = self.pair(kind)
        assert isinstance(pair, RandomPair)
        return Oracle(pair.target, seed=self.seed)

    @contextmanager
    def composed(
        self, kind: str = "mixed", *, pair: ModelPair | None = None, **changes: Any
    ) -> Iterator[Parts]:
        """Context manager that builds the strategy on the random pair of this ``kind`` (see
        ``model``), or on ``pair``, and shuts the executor down on exit.

        ``changes`` maps names of configuration sections to the sections that replace them.
        """
        if pair is None:
            pair = build_pair(changes["model"]) if "model" in changes else self.pair(kind)
        cfg = {**self.small, "model": self.model(kind), **changes}
        in_turns = "replicas" in cfg["executor"] and not _on_ranks(cfg["executor"])
        if in_turns and kind in ("perfect", "long") and cfg["clock"]["kind"] == "measured":
            # Copies of a small target are so fast that they would leave no time for drafts.
            clock = {"kind": "simulated", "scale": 1.0, "profile": _SLOW_TARGET}
            cfg["clock"] = clock | load_profile(_SLOW_TARGET)
        with self.built(cfg, pair, UserError) as parts:
            yield parts

    @contextmanager
    def built(
        self, cfg: Mapping[str, Any], pair: ModelPair, refused: type[UserError] = CannotCompose
    ) -> Iterator[Parts]:
        try:
            parts = self.build(cfg, pair)
        except UserError as refusal:
            raise refused(str(refusal)) from refusal
        try:
            yield parts
        finally:
            parts.executor.shutdown()


def observe(owner: Any, name: str, *, before: _Hook = None, after: _Hook = None) -> None:
    """Wraps a method of one object: ``before(*args)`` runs first, ``after(result, *args)`` last."""
    method = getattr(owner, name)

    def observed(*args: Any, **options: Any) -> Any:
        if before is not None:
            before(*args, **options)
        result = method(*args, **options)
        if after is not None:
            after(result, *args, **options)
        return result

    owner.__dict__[name] = observed


def decode_cases(parts: Parts, cases: Sequence[Case], **sizes: int) -> dict[int, Decoded]:
    """Decodes the cases; returns outputs by id. ``sizes``: ``batch_size``, ``prefill_chunk``."""
    outputs: dict[int, Decoded] = {}
    for _ in decode_steps(parts, cases, outputs, **sizes):
        pass
    return outputs


def decode_steps(
    parts: Parts,
    cases: Sequence[Case],
    outputs: dict[int, Decoded],
    *,
    state: Any = None,
    **sizes: int,
) -> Iterator[list[Commit]]:
    """Decodes cases with a strategy, yields the commits of each step, fills ``outputs`` by case id.

    ``sizes`` are ``batch_size`` and ``prefill_chunk`` of ``Parts.decode``. Raises AssertionError if
    the loop takes many more steps than any strategy needs.
    """

    def finished(request: RequestState) -> None:
        accepted = request.counters.accepted + request.counters.hits
        reason, misses = request.finish_reason, request.counters.misses
        outputs[request.id] = Decoded(
            tuple(request.output), reason, accepted, misses, tuple(request.output_origins)
        )

    state = state or parts.new_state()
    tokens = sum(case.stop.max_new_tokens + len(case.prompt) for case in cases)
    per_token = (parts.executor.in_flight + 2) * (1 if parts.executor.latency else 10)
    limit = _MIN_STEPS + per_token * tokens
    requests = [case.request() for case in cases]
    for commits in parts.decode(state, requests, on_finish=finished, **sizes):
        made_progress()
        assert state.step <= limit, f"no end after {state.step} steps for {tokens} tokens"
        yield commits


@contextmanager
def hang_limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError if ``made_progress`` is not called for ``seconds`` (main thread only)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGALRM, partial(_hung, seconds))
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous)


def made_progress() -> None:
    if seconds := signal.getitimer(signal.ITIMER_REAL)[1]:
        signal.setitimer(signal.ITIMER_REAL, seconds, seconds)


def _hung(seconds: float, _number: int, frame: FrameType | None) -> None:
    waited = ""
    while frame is not None:
        if frame.f_code is RankGroup.wait_for.__code__:
            ranks = {key.rpartition("/")[2] for key in frame.f_locals["keys"]}
            waited = f", waiting for rank {', '.join(sorted(ranks))}"
        frame = frame.f_back
    raise TimeoutError(f"no progress for {seconds:g} s{waited}")


def rank_groups(cfg: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Returns (processes beside this one, group number) for each process group that checks need."""
    executor = _small(cfg)["executor"]
    if not _on_ranks(executor) or cfg["clock"]["kind"] == "simulated":
        return []
    if "replicas" in executor:
        return [(1, number) for number in range(1, executor["replicas"] + 1)]
    return [(ranks, 0)] if (ranks := _shrink(executor)) else []


def _on_ranks(executor: Mapping[str, Any]) -> bool:
    return executor.get("transport") == "distributed"


def _shrink(executor: dict[str, Any]) -> int:
    """Limits stages and degrees in place; returns the number of stage devices or 0."""
    limit = MAX_RANKS if _on_ranks(executor) else MAX_STAGES
    most = {"target_degree": MAX_STAGES, "draft_degree": MAX_STAGES, "stages": limit}
    executor |= {key: min(executor[key], n) for key, n in most.items() if executor.get(key)}
    if executor.get("stages") is None:
        return 0
    if executor.get("groups") is None:
        return int(executor["stages"])
    executor["groups"] = list(executor["groups"][:limit])
    return int(sum(executor["groups"]))


def _small(cfg: Mapping[str, Any]) -> dict[str, Any]:
    small = deepcopy(dict(cfg))
    small["trace"] = False
    if small["clock"]["kind"] == "paced":  # makes the same decisions, but does not sleep
        small["clock"] = {"kind": "measured"}
    for section in nodes_of([small["executor"], small.get("source")]):
        section.update({k: min(section[k], n) for k, n in _AT_MOST.items() if section.get(k)})
        if str(section.get("_target_", "")).endswith(".BlockSource"):  # its drafter is the target's
            section["head"] = None
    model, exits = cfg["model"], dict[str, Any]()
    if _has_exit(small.get("source")):
        exits = _shrink_exit(small["executor"], small["source"], model)
    devices = _shrink(small["executor"])
    device, attention = str(model.get("device", "cpu")), model.get("attention", "auto")
    if device in ("auto", "mps"):  # mps has no float64
        device = "cuda" if torch.cuda.is_available() else "cpu"
    family = "llama"
    if model["kind"] == "random":
        family = str(model.get("family", family))
    elif model["kind"] == "pretrained":
        family = inspect_model(family_path(str(model["target"]))).model_type
    small["model"] = {
        "kind": "random",
        "family": family if family in CERTIFIED else "llama",
        "num_layers": max(_MIN_LAYERS, devices),
        "vocab_size": VOCAB_SIZE,
        "max_positions": MAX_POSITIONS,
        "dtype": "float64",
        "device": device,
        "attention": "auto" if attention in _NO_FLOAT64 else attention,
        "graphs": model.get("graphs", "off"),
        "exact": bool(model.get("exact", False)),
        **exits,
    }
    return small


def _has_exit(source: Any, kinds: tuple[str, ...] = _EXITS) -> bool:
    return any(str(part.get("_target_", "")).endswith(kinds) for part in nodes_of(source))


def _names_middle(source: Any) -> bool:
    return any(part.get("model") == "middle" for part in nodes_of(source))


def _with_middle(cfg: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns ``cfg`` with a middle model for a random pair, if the source runs one."""
    model = cfg["model"]
    has_one = model.get("kind") != "random" or model.get("middle_layers")
    if has_one or not _names_middle(cfg["source"]):
        return cfg
    layers = max(int(model["num_layers"]) // 2, int(model["draft_layers"]))
    return {**cfg, "model": {**model, "middle_layers": layers}}


def _shrink_exit(
    executor: dict[str, Any], source: dict[str, Any], model: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns ``model`` keys of a small model whose exits are on the same stages as configured.

    ``executor`` and ``source`` are changed to fit. The small model has two layers per stage, or
    four for several exits. Each exit stays at the end of its stage, or before that end. The last
    stage is shorter than the others if the configured model's is. Coinciding exits are merged.
    """
    if "stages" not in executor or "exit_layer" not in model:
        return {}
    layers = int(model.get("num_layers") or inspect_model(family_path(model["target"])).num_layers)
    exit_layer = int(model["exit_layer"] or 1)
    fitting = -(-layers // exit_layer)
    configured = int(executor["stages"] or fitting)
    stages = max(2, min(configured, MAX_RANKS if _on_ranks(executor) else MAX_STAGES))
    size = exit_layer if configured == fitting else layers / configured
    depth = 4 if _has_exit(source, (".MultiExitSource",)) else 2
    executor["stages"] = stages
    num_layers = depth * stages - (configured == fitting and layers % exit_layer != 0)

    def small(layer: int, last: int) -> int:
        stage = max(1, min(last, round(layer / size + 0.49)))
        return depth * stage - (configured != fitting and layer % size != 0)

    first = small(exit_layer, stages - 1)
    if source.get("further_exits"):
        further = {min(small(layer, stages), num_layers - 1) for layer in source["further_exits"]}
        source["further_exits"] = sorted(layer for layer in further if layer > first) or None
    head = str(model.get("exit_head", "norm"))
    return {"num_layers": num_layers, "exit_layer": first, "exit_head": head}
