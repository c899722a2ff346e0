"""Random strategies on random drafts, from oracle to adversarial: parity and what must hold inside.

hypothesis chooses the policy and its sizes, the stages, the batch, the prompts and the quality of
the draft; derandomised, so that a run on one machine is a run on every other.
"""

from dataclasses import dataclass
from functools import cache
from itertools import cycle

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from specdec.attention.tree_attention import TreeCache
from specdec.compose.workbench import Workbench
from specdec.executors import LocalExecutor, PipelineExecutor
from specdec.executors.stage import ModelStage
from specdec.interfaces import TreePolicy
from specdec.models.runner import ModelRunner
from specdec.models.slicing import cache_argument
from specdec.policies import BestFirst, Chain, FixedWidth, Static
from specdec.sampling.keyed_draws import KeyedDraws, Purpose
from specdec.sampling.transform import SamplingParams, SamplingTransform
from specdec.serving import ServingRules
from specdec.sources import RandomSource
from specdec.state import RequestState, StopRules
from specdec.types import NO_NODE, IntArray
from specdec.verifiers import MatchVerifier
from strategies.specpipe_bf import PipelineBestFirst
from tests.matrix.cells import SEED, pair

GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=0.8, top_p=0.95)
HISTORY = SamplingParams(temperature=0.9, no_repeat_ngram=1)
TOLERANCE = 1e-9  # float64; only the order of summation differs from a fresh forward

small = st.integers(1, 4)
policies = st.one_of(
    st.builds(Chain, gamma=st.integers(1, 5)),
    st.builds(Static, branching=st.lists(st.integers(1, 3), min_size=1, max_size=4)),
    st.builds(FixedWidth, width=small, children=small, levels_per_step=st.none(), depth=small),
    st.builds(
        FixedWidth, width=st.integers(1, 6), children=small, levels_per_step=st.integers(1, 2)
    ),
    st.builds(
        BestFirst,
        bs=st.integers(2, 8),
        w=small,
        d=st.integers(1, 3),
        asynchronous=st.booleans(),
    ),
    st.builds(
        PipelineBestFirst, width=st.integers(1, 8), children=small, draft_passes=st.integers(1, 2)
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What surrounds the policy of one example.

    Attributes:
        stages: of the pipeline; None for the local executor.
        quality: share of nodes where the draft's candidates hold the target's token.
        silence: share of nodes without candidates.
        samplings: of the requests in turn.
        paged: whether the caches of a stage share a pool of blocks.
    """

    stages: int | None
    batch_size: int
    prefill_chunk: int
    prompts: tuple[tuple[int, ...], ...]
    max_new_tokens: int
    quality: float
    silence: float
    draft_seed: int
    samplings: tuple[SamplingParams, ...]
    paged: bool


surroundings = st.builds(
    Setting,
    stages=st.sampled_from([None, 1, 2, 3, 4]),
    batch_size=st.integers(1, 3),
    prefill_chunk=st.integers(1, 5),
    prompts=st.lists(
        st.lists(st.integers(0, 31), min_size=1, max_size=6).map(tuple), min_size=1, max_size=3
    ).map(tuple),
    max_new_tokens=st.integers(1, 9),
    quality=st.sampled_from([0.0, 0.4, 0.8, 1.0]),
    silence=st.sampled_from([0.0, 0.0, 0.3]),
    draft_seed=st.integers(0, 99),
    samplings=st.sampled_from([(GREEDY,), (SAMPLED,), (HISTORY, SAMPLED), (GREEDY, HISTORY)]),
    paged=st.booleans(),
)
bounded = settings(
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],  # shrinking an example would take minutes
)


@settings(bounded, max_examples=20)
@given(policies, surroundings)
def test_random_forests(policy: TreePolicy, setting: Setting) -> None:
    examine(policy, setting)


@pytest.mark.exhaustive
@settings(bounded, max_examples=200)
@given(policies, surroundings)
def test_more_random_forests(policy: TreePolicy, setting: Setting) -> None:
    examine(policy, setting)


class SteeredSource(RandomSource):
    """Random candidates, with the target's token for a share of the nodes and never for the others.

    The token comes at a hashed rank.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        super().__init__(
            vocab_size=pair().vocab_size, seed=setting.draft_seed, silence=setting.silence
        )

    def _steer(self, request: RequestState, path: IntArray, tokens: IntArray) -> int:
        if not super()._steer(request, path, tokens):
            return 0
        true = next_token(request.id, tuple(path), request.sampling)
        at = np.flatnonzero(tokens == true)
        if self._draw(1, request.id, path) < self.setting.quality:
            if not len(at):
                tokens[int(self._draw(2, request.id, path) * len(tokens))] = true
            return len(tokens)
        if not len(at):
            return len(tokens)
        unused = np.setdiff1d(np.arange(self.vocab_size), np.append(tokens, true))
        if len(unused):
            tokens[at[0]] = unused[0]
            return len(tokens)
        tokens[at[0] : -1] = tokens[at[0] + 1 :]
        return len(tokens) - 1


def examine(policy: TreePolicy, setting: Setting) -> None:
    """Decodes with one strategy, looking at trees and caches after every step."""
    bench = Workbench(pair(), seed=SEED)
    source = SteeredSource(setting)
    parts = bench.parts(
        source=source,
        policy=policy,
        verifier=MatchVerifier(),
        stages=setting.stages,
        serving=ServingRules(kv_tokens=512, block_tokens=4) if setting.paged else None,
    )
    stop = StopRules(max_new_tokens=setting.max_new_tokens)
    rules = cycle(setting.samplings)
    requests = [
        RequestState(request_id=i, prompt=np.array(prompt), stop=stop, sampling=next(rules))
        for i, prompt in enumerate(setting.prompts)
    ]
    state = parts.new_state()
    with torch.inference_mode():
        for _ in parts.decode(
            state,
            requests,
            batch_size=setting.batch_size,
            prefill_chunk=setting.prefill_chunk,
        ):
            for request in state.requests.values():
                check_tree(request)
                for stage in (stages := stages_of(parts.executor)):
                    cache = stage.cache(request.id)
                    check_cache(cache, request, stage.runner)
                    assert setting.paged or cache.capacity == request.max_cached, "it has grown"
                first = stages[0].cache(request.id)
                entries = first.cached_len + first.num_nodes
                assert request.finished or entries == request.num_cached_tokens
    for request, prompt in zip(requests, setting.prompts, strict=True):
        assert tuple(request.output) == plain(
            request.id, prompt, setting.max_new_tokens, request.sampling
        )
        counters = request.counters
        assert counters.hits + counters.misses == counters.answers
        emitted = len(request.output) + counters.cut_tokens
        assert emitted == counters.accepted + counters.answers


def check_tree(request: RequestState) -> None:
    """One root, at the end of what is committed; parents first; siblings differ; scores add up."""
    tree = request.tree
    parents, below = tree.parents, tree.parents[1:]
    assert parents[0] == NO_NODE
    assert (below >= 0).all()
    assert (below < np.arange(1, len(tree))).all()
    assert (tree.positions[1:] == tree.positions[below] + 1).all()
    assert (np.diff(tree.ids) > 0).all()
    siblings = {*zip(below.tolist(), tree.tokens[1:].tolist(), strict=True)}
    assert len(siblings) == len(tree) - 1, "two siblings carry one token"
    assert np.allclose(tree.scores[1:], tree.scores[below] + tree.logprobs[1:])
    if not request.finished:
        assert tree.positions[0] == request.prefix_len
        assert tree.tokens[0] == request.tokens[-1]


def check_cache(cache: TreeCache, request: RequestState, runner: ModelRunner) -> None:
    """The prefix equals a fresh forward; each entry of the tree a fresh forward over its path."""
    if request.finished:
        return
    assert cache.cached_len <= request.prefix_len
    layers = slice(runner.first_layer, runner.last_layer)
    if cache.cached_len:
        fresh = fresh_values(tuple(request.tokens[: cache.cached_len].tolist()))[layers]
        same(cache.storage[:, :, :, : cache.cached_len], fresh)
    slots = request.tree.slots(cache.node_ids)
    assert (slots != NO_NODE).all(), "an entry of the cache is no node of the tree"
    for at, slot in enumerate(slots.tolist(), cache.cached_len):
        fresh = fresh_values(tuple(request.path_tokens(slot).tolist()))[layers]
        same(cache.storage[:, :, :, at], fresh[:, :, :, -1])


def same(found: torch.Tensor, fresh: torch.Tensor) -> None:
    error = float((found - fresh).abs().max())
    assert error < TOLERANCE, f"a cache entry differs from a fresh forward by {error:.2e}"


def stages_of(executor: object) -> list[ModelStage]:
    assert isinstance(executor, PipelineExecutor | LocalExecutor)
    return [part.stage for part in executor.stages]  # type: ignore[misc]


@cache
def _forward(tokens: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.inference_mode():
        out = pair().target(torch.tensor([tokens]), use_cache=True)
    layers = getattr(out, cache_argument(pair().target)).layers
    values = torch.stack([torch.stack([layer.keys[0], layer.values[0]]) for layer in layers])
    return out.logits[:, -1], values


def fresh_values(tokens: tuple[int, ...]) -> torch.Tensor:
    """[L, 2, G, T, D]: keys and values of all layers, by transformers' own forward and cache."""
    return _forward(tokens)[1]


def next_token(request_id: int, tokens: tuple[int, ...] | IntArray, params: SamplingParams) -> int:
    """The target's own token after ``tokens``, by the definition of the keyed draws."""
    tokens = tuple(int(token) for token in tokens)
    draw = KeyedDraws(seed=SEED).uniform(request_id, np.array([len(tokens)]), Purpose.TARGET)
    history = [np.array(tokens)]
    return int(SamplingTransform(params).sample(_forward(tokens)[0], draw, history)[0])


def plain(
    request_id: int, prompt: tuple[int, ...], num: int, params: SamplingParams
) -> tuple[int, ...]:
    tokens = prompt
    for _ in range(num):
        tokens = (*tokens, next_token(request_id, tokens, params))
    return tokens[len(prompt) :]
