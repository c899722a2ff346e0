from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specdec.config.job import run_job_of
from specdec.config.options import options, own_values
from specdec.config.profile_costs import fit
from specdec.errors import UserError
from specdec.pairs import ModelPair
from specdec.parts.build import locate
from specdec.parts.fields import signature_of
from specdec.parts.suggest import did_you_mean
from specdec.planning.layouts import Layout
from specdec.planning.machines import Machine, scaled
from specdec.planning.simulate import Candidate
from specdec.sources import NullSource, SyntheticSource

PLAIN = "ar"

OTHER_PROGRAM = "decoding of another program, which is not simulated"
"""The reason to leave out presets that run another program instead of composing parts."""

_RUNS_MODELS = {"pair", "runner", "make_first_stage"}  # arguments of sources that run models

SIZES: Mapping[str, tuple[Any, ...]] = {
    "gamma": (1, 2, 3, 4, 5, 6, 8, 10, 12, 16),
    "branching": (
        [2, 2, 1, 1],
        [1, 1, 3, 1, 1, 1, 1, 1],
        [4, 2, 2, 1, 1],
        [3, 2, 1, 1, 1, 1],
        [8, 4, 2, 1, 1, 1],
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
"""Key of a policy -> values to try, one key after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A preset with its composed configuration, before layout and sizes are chosen.

    Attributes:
        config: resolved configuration; candidates replace its executor and clock.
        staged: whether its executor has stages, or is replaced by one that has.
        free: number of models that run on a device of their own by construction.
        decoded: see ``Candidate``.
    """

    name: str
    config: Mapping[str, Any]
    staged: bool
    copies: bool
    free: int = 0
    decoded: bool = False

    @property
    def others(self) -> int:
        """Devices of models other than target and draft."""
        return max(self.free - 1, 0)

    def candidate(self, machine: Machine, layout: Layout, *, batch: int, context: int) -> Candidate:
        """Returns the preset in a layout.

        Raises:
            DoesNotFit: the machine does not have this layout, or it cannot hold the models.
        """
        node = executor_node(self.config["executor"], layout)
        clock = clock_node(machine, layout, batch, context)
        config = fit({**self.config, "executor": node, "clock": clock, "batch_size": batch})
        return Candidate(name=self.name, layout=layout, config=config, decoded=self.decoded)


def families(
    words: Sequence[str], extra: Sequence[Path], names: Sequence[str], pair: ModelPair
) -> tuple[list[Family], dict[str, str]]:
    """Returns the presets that can be composed with a model, and why the others cannot.

    Plain decoding is always tried, besides the presets ``names`` (empty for all). ``words`` must
    include the model that reproduces the acceptance, and ``pair`` is that model.
    """
    known = options("strategy", extra)
    for name in names:
        if name not in known:
            raise UserError(f"strategies: {name} is unknown: {did_you_mean(name, known)}")
    run_job_of([*words, f"strategy={PLAIN}", "clock=simulated"], extra)  # raises for bad words
    found: list[Family] = []
    left_out: dict[str, str] = {}
    for name in dict.fromkeys([PLAIN, *(names or known)]):
        own = own_values(known[name]).get("strategy", {})
        if own.get("kind", "parts") != "parts":
            left_out[name] = OTHER_PROGRAM
            continue
        try:
            config = run_job_of([*words, f"strategy={name}", "clock=simulated"], extra).config
            sources = list(_sources(_fitted(pair, config)))
            _check_leaves(sources)
        except UserError as error:
            left_out[name] = str(error)
            continue
        found.append(_family(name, config, sources))
    return found, left_out


def decoded_families(
    words: Sequence[str], extra: Sequence[Path], names: Sequence[str], *, measured: bool
) -> tuple[list[Family], dict[str, str]]:
    """Returns the presets that models decode on the simulated clock, and why the others cannot.

    ``names`` are presets that a record cannot reproduce, and ``words`` must include the models.
    Unless real runs correct the costs (``measured``), sources with a model or head of their own are
    refused, since a profile has the times of target and draft alone.
    """
    found: list[Family] = []
    left_out: dict[str, str] = {}
    for name in names:
        try:
            config = run_job_of([*words, f"strategy={name}", "clock=simulated"], extra).config
            sources = list(_sources(config["source"]))
            if not measured:
                _check_prices(sources)
        except UserError as error:
            left_out[name] = str(error)
            continue
        found.append(replace(_family(name, config, sources), decoded=True))
    return found, left_out


def _family(name: str, config: Mapping[str, Any], sources: Sequence[tuple[type, bool]]) -> Family:
    executor = config["executor"]
    copies = "replicas" in executor
    # An executor of one device has no keys; it is replaced by a pipeline.
    staged = not copies and ("target_degree" in executor or len(executor) == 1)
    free = sum("free_rank" in signature_of(cls).plain for cls, _ in sources)
    return Family(name=name, config=config, staged=staged, copies=copies, free=free)


def _fitted(pair: ModelPair, config: Mapping[str, Any]) -> Any:
    return pair.fitted_source(config["source"], config["policy"])


def _sources(node: Any) -> Iterator[tuple[type, bool]]:
    """Yields each class of a source node with whether it contains other sources."""
    if isinstance(node, Mapping):
        inner = [found for value in node.values() for found in _sources(value)]
        if "_target_" in node:
            yield locate(node["_target_"], "source"), bool(inner)
        yield from inner
    elif isinstance(node, list):
        for item in node:
            yield from _sources(item)


def _check_leaves(sources: Sequence[tuple[type, bool]]) -> None:
    """Refuses sources that propose from tokens or hidden states, which a simulation makes up."""
    for cls, has_inner in sources:
        if not has_inner and cls not in (SyntheticSource, NullSource):
            raise UserError(
                f"{cls.__name__} reads tokens or hidden states, which a law or record does not have"
            )


def _check_prices(sources: Sequence[tuple[type, bool]]) -> None:
    """Refuses sources that run models, because the profile may lack the times of their passes."""
    for cls, _ in sources:
        if _RUNS_MODELS & {*signature_of(cls).objects}:
            raise UserError(
                f"{cls.__name__} has passes of its own, whose time the profile does not have"
            )


def executor_node(node: Mapping[str, Any], layout: Layout) -> dict[str, Any]:
    """Returns a preset's executor in a layout; an executor without keys is kept on one device."""
    if "replicas" in node:
        return {**node, "replicas": layout.replicas, "transport": "in_process"}
    if len(node) == 1 and layout.stages * layout.degree == 1 and not layout.own_draft:
        return dict(node)
    if len(node) == 1:
        node = own_values(options("executor")["pipeline"])
    if "target_degree" not in node:
        return dict(node)
    return {
        **node,
        "stages": layout.stages,
        "groups": None,
        "target_degree": layout.degree if layout.degree > 1 else None,
        "draft_degree": layout.draft_degree if layout.draft_degree > 1 else None,
        "shared": False,
        "transport": "in_process",
    }


def clock_node(machine: Machine, layout: Layout, batch: int, context: int) -> dict[str, Any]:
    return {
        "kind": "simulated",
        "profile": machine.name,
        "scale": 1.0,
        "note": machine.note,
        "costs": machine.costs(layout, batch, context),
    }


def sized(candidate: Candidate) -> Generator[tuple[str, list[Candidate]], Candidate | None, None]:
    """Yields each key of the policy that has sizes, with candidates that differ in that key alone.

    The caller sends the best candidate so far, from which the next key is varied.
    """
    for key, values in SIZES.items():
        policy = candidate.config["policy"]
        current = policy.get(key)
        number = isinstance(current, int | float) and not isinstance(current, bool)
        if not (number or isinstance(current, list) or current in ("auto", "ratio")):
            continue
        variants = [with_size(candidate, key, value) for value in values if value != current]
        best = yield key, variants
        candidate = best or candidate


def smaller(candidate: Candidate) -> list[Candidate]:
    """Returns variants with one size halved, or halved twice."""
    found = []
    for key in SIZES:
        value = candidate.config["policy"].get(key)
        if type(value) is int:
            found += [with_size(candidate, key, size) for size in (value // 2, value // 4) if size]
    return found


def with_size(candidate: Candidate, key: str, value: Any) -> Candidate:
    config = {**candidate.config, "policy": {**candidate.config["policy"], key: value}}
    return replace(candidate, config=config, sizes={**candidate.sizes, key: value})


def with_batch(candidate: Candidate, machine: Machine, batch: int, context: int) -> Candidate:
    """Returns the candidate at another batch size; raises ``DoesNotFit`` if memory is too small."""
    clock = clock_node(machine, candidate.layout, batch, context)
    return replace(candidate, config={**candidate.config, "batch_size": batch, "clock": clock})


def rescaled(candidate: Candidate, factors: Mapping[str, float]) -> Candidate:
    """Multiplies the times of some kinds of work."""
    clock = candidate.config["clock"]
    costs = {
        kind: scaled(curve, factors[kind]) if kind in factors else curve
        for kind, curve in clock["costs"].items()
    }
    return replace(candidate, config={**candidate.config, "clock": {**clock, "costs": costs}})
