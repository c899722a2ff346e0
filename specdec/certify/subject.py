"""What is certified: a configuration, with small exact models in the place of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from specdec.certify.cases import Case
from specdec.certify.oracle import Oracle, Reference
from specdec.compose.build import compose
from specdec.compose.workbench import Parts
from specdec.errors import UserError
from specdec.models import inspect_model
from specdec.models.bundled import family_path
from specdec.models.inspection import CERTIFIED
from specdec.pairs import ModelPair, RandomPair, build_pair
from specdec.runs.runners import sampling_params
from specdec.sampling.transform import SamplingParams
from specdec.types import Commit, Lossless

Build = Callable[[Mapping[str, Any], ModelPair], Parts]
"""Configuration and pair -> parts; ``compose`` unless parts are made in Python."""

VOCAB_SIZE = 96
MAX_POSITIONS = 64
MAX_STAGES = 4  # in one process
MAX_RANKS = 8  # stages, where they are processes
_MIN_LAYERS = 3
_LOGIT_STEP = 1.0
_UNSURE, _SURE = 4.0, 8.0  # standard deviations of 3 and 6: sampled tokens are accepted, too
_NO_FLOAT64 = ("triton", "flash")  # kinds of attention that only ``numerics`` can check
_EXITS = (".EarlyExitSource", ".MultiExitSource")
_STEPS_PER_TOKEN = 64  # more than any strategy takes per token and stage


@dataclass(frozen=True, slots=True)
class Decoded:
    """What a strategy gave for a case.

    Attributes:
        output: tokens.
        reason: why it ended.
        accepted: draft tokens accepted on answered paths, and roots found in the tree.
        misses: answers after which the tree was discarded.
    """

    output: tuple[int, ...]
    reason: str | None
    accepted: int = 0
    misses: int = 0


def refuse(cfg: Mapping[str, Any]) -> None:
    """Refuses transformers' own strategies.

    Raises:
        UserError: if ``cfg`` is of one.
    """
    name = cfg["strategy"]["name"]
    if cfg["strategy"]["kind"] != "parts":
        raise UserError(
            f"strategy={name} is transformers' own decoding, which is not made of this library's"
            " parts: there is nothing here to certify. Choose another strategy, or compare it with"
            f" `specdec compare 'strategies=[ar,{name}]'`"
        )


class Subject:
    """A configuration under test.

    Attributes:
        cfg: resolved, as the user gave it.
        small: the same with a small random float64 pair, and few stages.
        claims: what its verifier promises.
        build: makes the parts of a configuration on a pair.
        notes: what checks found out and share with each other.
    """

    def __init__(self, cfg: Mapping[str, Any], *, build: Build = compose) -> None:
        """Composes the configuration once, to see whether it can be.

        Args:
            cfg: resolved plain configuration of ``specdec run``.
            build: makes the parts.

        Raises:
            UserError: for transformers' own strategies, and whatever ``compose`` refuses.
        """
        refuse(cfg)
        self.cfg = cfg
        self.small = _small(cfg)
        self.build = build
        self.notes: dict[str, object] = {}
        self._pairs: dict[str, ModelPair] = {}
        self._oracles: dict[str, Oracle] = {}
        with self.composed("mixed") as parts:
            self.claims = parts.verifier.lossless

    @property
    def name(self) -> str:
        """The preset's name."""
        return str(self.cfg["strategy"]["name"])

    @property
    def seed(self) -> int:
        """Keys every draw."""
        return int(self.cfg["seed"])

    @property
    def batch_size(self) -> int:
        """Requests decoded at a time, as configured."""
        return int(self.cfg["batch_size"])

    @cached_property
    def sampling(self) -> SamplingParams:
        """The configured transform."""
        return sampling_params(self.cfg["sampling"])

    @property
    def exact_tokens(self) -> bool:
        """Whether sampled output must equal plain decoding token by token."""
        return self.claims is Lossless.TOKEN

    def model(self, kind: str) -> dict[str, Any]:
        """The ``model`` section of a pair.

        Args:
            kind: "mixed", where the draft is right about every second time; "perfect", where it
                always is, and both are sure of it; "ties", like "mixed" with logits rounded so that
                equal ones are common.
        """
        layers = int(self.small["model"]["num_layers"])
        section = dict(self.small["model"])
        section["draft_layers"] = layers if kind == "perfect" else layers - 1
        section["logit_scale"] = _SURE if kind == "perfect" else _UNSURE
        if kind == "ties":
            section["logit_step"] = _LOGIT_STEP
        return section

    def pair(self, kind: str) -> ModelPair:
        """The pair itself, made once."""
        if kind not in self._pairs:
            self._pairs[kind] = build_pair(self.model(kind))
        return self._pairs[kind]

    @contextmanager
    def composed(
        self, kind: str = "mixed", *, pair: ModelPair | None = None, **changes: Any
    ) -> Iterator[Parts]:
        """The strategy on a small pair; shut down afterwards.

        Args:
            kind: of pair, see ``model``.
            pair: one to be used instead (which ``changes`` must describe under ``model``).
            changes: sections of the configuration to replace.
        """
        cfg = {**self.small, "model": self.model(kind), **changes}
        parts = self.build(cfg, pair or self.pair(kind))
        try:
            yield parts
        finally:
            parts.executor.shutdown()

    def oracle(self, kind: str) -> Oracle:
        """Plain decoding with the pair's target."""
        if kind not in self._oracles:
            pair = self.pair(kind)
            assert isinstance(pair, RandomPair)
            self._oracles[kind] = Oracle(pair.target, seed=self.seed)
        return self._oracles[kind]

    def expected(self, kind: str, case: Case) -> Reference:
        """What plain decoding gives for a case."""
        return self.oracle(kind).decode(
            prompt_id=case.id, prompt=case.prompt, sampling=case.sampling, stop=case.stop
        )


def decode_cases(
    parts: Parts, cases: Sequence[Case], *, batch_size: int = 1, prefill_chunk: int = 512
) -> dict[int, Decoded]:
    """Decodes cases with a strategy; case id -> what it gave.

    Raises:
        AssertionError: the loop takes many more steps than any strategy needs.
    """
    found: dict[int, Decoded] = {}
    for _ in decode_steps(parts, cases, found, batch_size=batch_size, prefill_chunk=prefill_chunk):
        pass
    return found


def decode_steps(
    parts: Parts,
    cases: Sequence[Case],
    found: dict[int, Decoded],
    *,
    batch_size: int = 1,
    prefill_chunk: int = 512,
    state: Any = None,
) -> Iterator[list[Commit]]:
    """``decode_cases`` step by step, for checks between steps; fills ``found``."""

    def finished(request: Any) -> None:
        counters = request.counters
        found[request.id] = Decoded(
            tuple(request.output),
            request.finish_reason,
            counters.accepted + counters.hits,
            counters.misses,
        )

    state = parts.new_state() if state is None else state
    tokens = sum(case.stop.max_new_tokens + len(case.prompt) for case in cases)
    most = _STEPS_PER_TOKEN + (parts.executor.latency + 2) * tokens
    steps = parts.decode(
        state,
        [case.request() for case in cases],
        batch_size=batch_size,
        prefill_chunk=prefill_chunk,
        on_finish=finished,
    )
    for commits in steps:
        assert state.step <= most, f"no end after {state.step} steps for {tokens} tokens"
        yield commits


def num_ranks(cfg: Mapping[str, Any]) -> int:
    """Ranks beside rank 0 that a configuration is certified on; 0 where all is in one process."""
    real = _on_ranks(cfg["executor"]) and cfg["clock"]["kind"] != "simulated"
    return _shrink(_small(cfg)["executor"]) if real else 0


def _family(model: Mapping[str, Any]) -> str:
    """Architecture of the configured target, where tree attention is certified for it."""
    found = "llama"
    if model["kind"] == "random":
        found = str(model.get("family", found))
    elif model["kind"] == "pretrained":
        found = inspect_model(family_path(str(model["target"]))).model_type
    return found if found in CERTIFIED else "llama"


def _on_ranks(executor: Mapping[str, Any]) -> bool:
    """Whether stages are asked to be processes."""
    return executor.get("transport") == "distributed"


def _shrink(executor: dict[str, Any]) -> int:
    """Leaves a pipeline few stages, ``MAX_RANKS`` at most; returns its devices, 0 for no pipeline.

    In one process more of them mean the same code once more; ranks are as many as were asked for.
    Ranks that share layers are ``MAX_STAGES`` at most.
    """
    for degree in ("target_degree", "draft_degree"):
        if executor.get(degree):
            executor[degree] = min(executor[degree], MAX_STAGES)
    stages, groups = executor.get("stages"), executor.get("groups")
    if stages is None:
        return 0
    most = MAX_RANKS if _on_ranks(executor) else MAX_STAGES
    executor["stages"] = min(stages, most)
    if groups is None:
        return int(executor["stages"])
    executor["groups"] = list(groups[:most])
    return int(sum(executor["groups"]))


def _small(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration on small exact models."""
    small = deepcopy(dict(cfg))
    small["trace"] = False
    if small["clock"]["kind"] == "paced":  # equal in what it decides, but it sleeps
        small["clock"] = {"kind": "measured"}
    asked = cfg["model"]
    exits: dict[str, Any] = {}
    if _has_exit(small.get("source")):
        exits = _shrink_exit(small["executor"], small["source"], asked)
    devices = _shrink(small["executor"])
    device = str(asked.get("device", "cpu"))
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    small["model"] = {
        "kind": "random",
        "family": _family(asked),
        "num_layers": exits.pop("num_layers", max(_MIN_LAYERS, devices)),
        "vocab_size": VOCAB_SIZE,
        "max_positions": MAX_POSITIONS,
        "dtype": "float64",
        "device": "cpu" if device == "mps" else device,  # which has no float64
        "attention": asked.get("attention", "auto"),
        "graphs": asked.get("graphs", "off"),
        **exits,
    }
    if small["model"]["attention"] in _NO_FLOAT64:
        small["model"]["attention"] = "auto"
    return small


def _has_exit(source: Any, kinds: tuple[str, ...] = _EXITS) -> bool:
    """Whether an early-exit source is among the parts of a source's section."""
    if isinstance(source, list):
        return any(_has_exit(part, kinds) for part in source)
    if not isinstance(source, Mapping):
        return False
    found = str(source.get("_target_", "")).endswith(kinds)
    return found or any(_has_exit(part, kinds) for part in source.values())


def _shrink_exit(
    executor: dict[str, Any], source: dict[str, Any], model: Mapping[str, Any]
) -> dict[str, Any]:
    """Sizes of a small model whose exits lie on the stages as the configured ones do.

    Two layers per stage, four where there are several exits. An exit is at the end of a stage, or
    inside one, of the same number as in the configuration, and the last stage is shorter where it
    is there. Further exits that a small model has no room for are left out of it, but for one.
    """
    if "stages" not in executor or "exit_layer" not in model:
        return {}
    layers = int(model["num_layers"]) if "num_layers" in model else _num_layers(model)
    exit_layer = int(model["exit_layer"] or 1)
    fitting = -(-layers // exit_layer)
    asked = int(executor["stages"] or fitting)
    stages = max(2, min(asked, MAX_RANKS if _on_ranks(executor) else MAX_STAGES))
    size = exit_layer if asked == fitting else layers / asked
    depth = 4 if _has_exit(source, (".MultiExitSource",)) else 2
    executor["stages"] = stages
    num_layers = depth * stages - (asked == fitting and layers % exit_layer != 0)

    def small(layer: int, last: int) -> int:
        stage = max(1, min(last, round(layer / size + 0.49)))
        return depth * stage - (asked != fitting and layer % size != 0)

    first = small(exit_layer, stages - 1)
    if source.get("further_exits"):
        further = {min(small(layer, stages), num_layers - 1) for layer in source["further_exits"]}
        source["further_exits"] = sorted(layer for layer in further if layer > first) or None
    return {
        "num_layers": num_layers,
        "exit_layer": first,
        "exit_head": str(model.get("exit_head", "norm")),
    }


def _num_layers(model: Mapping[str, Any]) -> int:
    return int(inspect_model(family_path(str(model["target"]))).num_layers)
