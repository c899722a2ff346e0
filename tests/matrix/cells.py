"""The composition matrix: every combination of the parts that the config tree offers.

Nothing is listed by hand: a new source, policy, verifier, executor or sampling YAML adds its cells.
"""

import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import astuple, dataclass, fields, replace
from functools import cache, cached_property, partial
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest.mock import patch
from zlib import crc32

import numpy as np
import torch

from specdec.config.hydra import compose_config
from specdec.config.options import options
from specdec.pairs import RandomPair, build_pair
from specdec.pairs.options import with_flat_options
from specdec.parts import build
from specdec.parts.build import build_part
from specdec.runs.runners import PartsRunner, TokenPrompt, sampling_params
from specdec.sampling.keyed_draws import KeyedDraws, Purpose
from specdec.sampling.transform import SamplingTransform
from specdec.state import StopRules
from specdec.types import Lossless

NUM_LAYERS = 4
MODEL_SEED = 7  # of 16 seeds the one whose greedy output loops least: loops hide wrong positions
NUM_COPIES = 2  # of executor=replicated
NUM_STAGES = 3
MAX_NEW_TOKENS = 12
SEED = 11
PROMPTS = (
    TokenPrompt(7, np.array([3], np.int64)),
    TokenPrompt(2, np.array([5, 1, 4, 1, 5, 9, 2, 6, 5], np.int64)),
)
LOSSY_SAMPLINGS = ("greedy", "t08")


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination, by option names; the fields are the axes."""

    source: str
    policy: str
    verifier: str
    executor: str
    sampling: str


AXES = tuple(field.name for field in fields(Cell))


@cache
def executors() -> tuple[str, ...]:
    """Executor options that differ by more than their number of stages.

    Of those that are the same class, the one that others are derived from.
    """
    found: dict[str, str] = {}
    for name, _ in sorted(options("executor").items(), key=lambda item: _is_derived(item[1])):
        found.setdefault(str(option("executor", name)["_target_"]), name)
    return tuple(sorted(found.values()))


def _is_derived(path: Path) -> bool:
    return "defaults:" in path.read_text(encoding="utf-8")


@cache
def all_cells() -> tuple[Cell, ...]:
    """Every cell.

    Of lossy verifiers only the length of the output is checked, so two samplings are enough.
    """
    return tuple(
        Cell(source, policy, verifier, executor, sampling)
        for source in options("source")
        for policy in options("policy")
        for verifier in options("verifier")
        for executor in executors()
        for sampling in options("sampling")
        if sampling in LOSSY_SAMPLINGS or not is_lossy(verifier)
    )


@cache
def is_lossy(verifier: str) -> bool:
    return bool(build_part(option("verifier", verifier), {}, "verifier").lossless is Lossless.LOSSY)


@cache
def _by_parts() -> dict[tuple[str, str], list[Cell]]:
    found: dict[tuple[str, str], list[Cell]] = {}
    for cell in all_cells():
        found.setdefault((cell.source, cell.policy), []).append(cell)
    return found


def cells(source: str, policy: str) -> Iterator[Cell]:
    return iter(_by_parts()[source, policy])


@cache
def fast_cells() -> frozenset[Cell]:
    """A sample in which every option of an axis meets every option of every other axis."""
    return frozenset(cover(all_cells(), met))


def met(cell: Cell) -> set[Any]:
    """The pairs of options that meet in a cell."""
    return set(combinations(zip(AXES, astuple(cell), strict=True), 2))


@cache
def cell_of_parts() -> frozenset[Cell]:
    """Of every source, policy, verifier and executor that has no fast cell, one sampling.

    It is drawn from their names, so that every option meets every sampling.
    """
    samplings: dict[Cell, list[str]] = {}
    for cell in all_cells():
        samplings.setdefault(replace(cell, sampling=""), []).append(cell.sampling)
    for cell in fast_cells():
        samplings.pop(replace(cell, sampling=""), None)
    return frozenset(
        replace(parts, sampling=names[crc32(repr(parts).encode()) % len(names)])
        for parts, names in samplings.items()
    )


def cover(
    found: Iterable[Cell],
    meetings: Callable[[Cell], set[Any]],
    usable: Callable[[Cell], bool] = lambda _: True,
    covered: Iterable[Any] = (),
) -> list[Cell]:
    """Usable cells in which everything meets that meets in any usable one of ``found``, apart from
    what is ``covered``.

    Those in which most is new come first, then by an order that depends on names only. Only cells
    in which something new meets are asked whether they are usable.
    """
    order = sorted(found, key=lambda c: (crc32(repr(c).encode()), repr(c)))
    candidates = [(cell, meetings(cell)) for cell in order]
    chosen, seen = [], {*covered}
    for least in range(max(len(here) for _, here in candidates), 0, -1):
        for cell, here in candidates:
            if len(here - seen) >= least and usable(cell):
                chosen.append(cell)
                seen |= here
    return chosen


@cache
def option(group: str, name: str) -> dict[str, Any]:
    """The resolved node of one option."""
    if group not in (*AXES, "serving"):
        return compose_config([f"{group}={name}"]).values[group]
    return _options([*options(group)].index(name))[group]


@cache
def _options(number: int) -> dict[str, Any]:
    """Options of that number in every axis, composed at once: an option is read alone."""
    named = {group: [*options(group)] for group in (*AXES, "serving")}
    words = [f"{group}={names[number % len(names)]}" for group, names in named.items()]
    return compose_config(words).values


@cache
def base() -> dict[str, Any]:
    """The resolved default configuration, made small: tiny random models in float64."""
    values = compose_config(["model=random"]).values
    values["model"].update(
        num_layers=NUM_LAYERS,
        draft_layers=NUM_LAYERS - 1,  # right often enough that paths are accepted, also sampled
        middle_layers=NUM_LAYERS - 1,
        hidden_size=32,
        vocab_size=32,
        max_positions=64,
        seed=MODEL_SEED,
        device="cpu",  # also where a test emulates another device
    )
    values.update(max_new_tokens=MAX_NEW_TOKENS, batch_size=2, seed=SEED, prefill_chunk=4)
    values.update(threads=1)
    return values


@cache
def pair() -> RandomPair:
    """The models of ``base``; the draft is all of the target's layers but one."""
    found = build_pair(base()["model"])
    assert isinstance(found, RandomPair)
    return found


class _Composing(RandomPair):
    """Models of strategies that are composed and decode nothing: each slice is prepared once."""

    @cached_property
    def _made(self) -> dict[tuple[Any, ...], Any]:
        return {}

    def stage(self, first, last, meter, group=None, capture=()):  # type: ignore[no-untyped-def]
        make = partial(super().stage, first, last, meter, group, capture)
        return self._once(make, first, last, group, *capture)

    def runner(self, name, meter, group=None):  # type: ignore[no-untyped-def]
        return self._once(partial(super().runner, name, meter, group), name, group)

    def exit_stage(self, first, last, meter, exits, group=None):  # type: ignore[no-untyped-def]
        make = partial(super().exit_stage, first, last, meter, exits, group)
        return self._once(make, "exits", first, last, group, *exits)

    def artefact(self, kind, **options):  # type: ignore[no-untyped-def]
        key = {name: value for name, value in options.items() if name != "meter"}
        return self._once(partial(super().artefact, kind, **options), kind, repr(key))

    def _once(self, make: Callable[[], Any], *key: Any) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


@cache
def composing_pair() -> RandomPair:
    """The models of ``base`` for ``runner`` without ``decode``."""
    keys = {k: v for k, v in base()["model"].items() if k != "kind"}
    return with_flat_options(_Composing)(**keys)


def serving_of(cell: Cell) -> str:
    """How the cell's two requests share the target.

    No axis of its own, which would multiply the cells: drawn from the cell's name, so that every
    option meets every option of every axis.
    """
    names = tuple(options("serving"))
    return names[crc32(repr(("serving", cell)).encode()) % len(names)]


def config(
    cell: Cell, *, transport: str = "in_process", stages: int = NUM_STAGES
) -> dict[str, Any]:
    """The cell's resolved configuration, on a pipeline of few stages."""
    names = {group: getattr(cell, group) for group in AXES}
    chosen = {group: option(group, name) for group, name in names.items()}
    chosen["serving"] = option("serving", serving_of(cell))
    values = copied({**base(), **chosen})
    values["choices"] = names  # refusals name them
    executor = values["executor"]
    if executor.get("stages"):
        executor["stages"] = stages
    if executor.get("replicas"):
        executor["replicas"] = NUM_COPIES
    if "transport" in executor:
        executor["transport"] = transport
    return values


def runner(values: dict[str, Any], models: RandomPair | None = None) -> PartsRunner:
    """Composes a strategy on the tiny models; raises UserError where it is refused."""
    with constructed():
        return PartsRunner(
            cfg=values, pair=models or pair(), stop=StopRules(max_new_tokens=MAX_NEW_TOKENS)
        )


_resolve_name = cache(build.resolve_name)


def constructed() -> AbstractContextManager[Any]:
    """Parts are made without Hydra's ``instantiate``, which takes 1 to 2 ms, and each class is
    looked up once: 15,000 cells have up to twelve parts each.
    """
    return patch.multiple(build, instantiate=_constructor, resolve_name=_resolve_name)


def _constructor(node: dict[str, Any], **_: Any) -> Callable[..., Any]:
    values = {key: value for key, value in node.items() if key not in ("_target_", "_partial_")}
    return partial(node["_target_"], **copied(values))


def copied(values: dict[str, Any]) -> dict[str, Any]:
    """A deep copy of plain values, 3.5 times as fast as ``copy.deepcopy``."""
    found: dict[str, Any] = pickle.loads(pickle.dumps(values))
    return found


def decode(ready: PartsRunner) -> dict[int, tuple[int, ...]]:
    """Decodes the prompts and closes the runner; prompt id -> tokens."""
    outputs: dict[int, tuple[int, ...]] = {}
    try:
        ready.run(PROMPTS, lambda result: outputs.__setitem__(result.id, result.output))
    finally:
        ready.close()
    return outputs


@cache
def plain(sampling: str) -> dict[int, tuple[int, ...]]:
    """Plain decoding, without any of the loop, trees, caches or executors.

    Each token from a fresh forward of transformers' own model over the whole sequence, by the
    definition of the keyed draws.
    """
    found = {}
    for prompt in PROMPTS:
        tokens = list(prompt.tokens)
        for _ in range(MAX_NEW_TOKENS):
            transform, logits, history = _next(sampling, tokens)
            draw = KeyedDraws(seed=SEED).uniform(prompt.id, np.array([len(tokens)]), Purpose.TARGET)
            tokens.append(int(transform.sample(logits, draw, history)[0]))
        found[prompt.id] = tuple(tokens[len(prompt.tokens) :])
    return found


def possible(sampling: str, prompt: TokenPrompt, output: tuple[int, ...]) -> bool:
    """Whether the target could have sampled ``output``: no token of it has probability 0."""
    tokens = list(prompt.tokens)
    for token in output:
        transform, logits, history = _next(sampling, tokens)
        if not transform.probs(logits, history)[0, token] > 0.0:
            return False
        tokens.append(token)
    return True


def _next(
    sampling: str, tokens: list[int]
) -> tuple[SamplingTransform, torch.Tensor, list[np.ndarray]]:
    with torch.inference_mode():
        logits = pair().target(torch.tensor([tokens])).logits[:, -1]
    params = sampling_params(option("sampling", sampling))
    return SamplingTransform(params), logits, [np.array(tokens)]
