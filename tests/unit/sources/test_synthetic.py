"""The synthetic pair: its hit rates are what it says, and no strategy can change them."""

from importlib import resources

import numpy as np
import yaml

from specdec.clocks import MeasuredClock
from specdec.sources import SyntheticPair, SyntheticSource
from specdec.types import Nodes

from .support import commit, expand, make_request, make_state, open_request

PAIR = SyntheticPair(vocab_size=1000, seed=3)


def follow(request_id: int, num: int, k: int, source=None):
    """Candidates of the nodes of the target's own path, one expand per node."""
    source, state = source or SyntheticSource(pair=PAIR), make_state()
    request = open_request(
        state, source, make_request(request_id, [1, 2, 3], max_new_tokens=num + 1)
    )
    rows, true = [], []
    for _ in range(num):
        rows.append(expand(state, source, {request_id: [0]}, k))
        token = int(PAIR.tokens(request_id, request.tree.positions[:1] + 1)[0])
        true.append(token)
        commit(state, [source], request_id, [], token)
    return rows, np.array(true)


def test_hit_rates_match_rank_probabilities():
    """3000 positions, shares within 5 standard deviations (false alarm 6e-7 each)."""
    num = 3000
    rows, true = follow(11, num, 64)
    tokens = np.concatenate([r.tokens for r in rows])
    assert all(len(set(row)) == 64 for row in tokens.tolist())
    hit = tokens == true[:, None]
    law = PAIR.rank_probabilities()
    for k in (1, 2, 4, 8, 16, 32, 64):
        share, wanted = hit[:, :k].any(axis=1).mean(), law[:k].sum()
        # All 64 ranks sum to 1 up to rounding, which differs between processors.
        deviation = np.sqrt(max(wanted * (1 - wanted), 0.0) / num)
        assert abs(share - wanted) <= 5 * deviation + 1e-12, k


def test_the_default_law_is_the_1b_draft_of_the_config():
    """Top-32 is stated by SpecPipe 3.3.1; the config's figures, its comment and the code agree."""
    law = PAIR.rank_probabilities().cumsum()
    wanted = {1: 0.65, 2: 0.79, 4: 0.88, 8: 0.94, 16: 0.97, 32: 0.99}
    assert {k: round(float(law[k - 1]), 2) for k in wanted} == wanted
    text = resources.files("conf").joinpath("model/synthetic.yaml").read_text(encoding="utf-8")
    found = yaml.safe_load(text)
    same = SyntheticPair(**{key: found[key] for key in ("weights", "top1", "decay", "miss")})
    assert np.array_equal(same.class_probs, SyntheticPair().class_probs)
    for k, share in wanted.items():
        assert f"{share}" in text.partition(f"top-{k} ")[2][:5], k


def test_the_draft_knows_where_it_is_unsure():
    """Where it says p for its first candidate, it is right a share p of the time."""
    rows, true = follow(12, 3000, 8)
    first = np.array([r.tokens[0, 0] for r in rows]) == true
    said = np.exp([r.logprobs[0, 0] for r in rows])
    assert len(np.unique(said.round(6))) == 3
    for p in np.unique(said.round(6)):
        at = said.round(6) == p
        assert abs(first[at].mean() - p) < 5 * np.sqrt(p * (1 - p) / at.sum())


def test_candidates_do_not_depend_on_order_or_batch():
    """Batches, the order of questions and other requests change nothing."""
    rows, true = follow(5, 6, 4)
    source, state = SyntheticSource(pair=PAIR), make_state()
    a = open_request(state, source, make_request(5, [9, 9, 9], max_new_tokens=99))
    b = open_request(state, source, make_request(6, [1], max_new_tokens=99))
    slot = 0
    for token in true[:5]:  # the whole target path as nodes, beside wrong ones
        a.tree.append(np.array([slot]), np.array([7]), np.array([-1.0]))
        slot = int(a.tree.append(np.array([slot]), np.array([token]), np.array([-1.0]))[0])
    path = a.tree.path(slot)[::-1]
    got = expand(state, source, {6: [0], 5: path.tolist()}, 4)
    assert (got.tokens[1:] == np.concatenate([r.tokens for r in rows[5::-1]])).all()
    assert (got.logprobs[1:] == np.concatenate([r.logprobs for r in rows[5::-1]])).all()
    assert b.tree.expanded[0]


def test_rows_and_catch_up_are_those_of_a_draft_model():
    source, state = SyntheticSource(pair=PAIR, prefill_chunk=10), make_state()
    charged = []
    state.clock = MeasuredClock()
    state.clock.charge = lambda rank, kind, num: charged.append(num)  # type: ignore[method-assign]
    request = open_request(state, source, make_request(5, np.zeros(26), max_new_tokens=99))
    expand(state, source, {5: [0]}, 4)
    assert charged == [10, 10, 6]  # 25 prompt tokens, then the root
    request.tree.take(np.array([0, 0]), np.array([0, 1]))
    expand(state, source, {5: [1]}, 4)
    request.tree.take(np.array([2]), np.array([0])) if request.tree.expanded[2] else None
    commit(state, [source], 5, [2], 3)  # the retired node 2 was never expanded
    expand(state, source, {5: [0]}, 4)
    assert charged[3:] == [1, 2]
    assert source.counters.catch_up_rows == 26
    assert source.counters.rows == sum(charged)
    assert source.counters.passes == len(charged)


def test_deep_trees_and_long_outputs_stay_inside_the_tables():
    source, state = SyntheticSource(pair=PAIR), make_state()
    request = open_request(state, source, make_request(5, [9], max_new_tokens=5))
    slot = np.zeros(1, np.int64)
    for _ in range(1200):
        slot = request.tree.append(slot, np.array([1]), np.array([0.0]))
    got = source.expand(state, Nodes(((5, request.tree.ids[slot]),)), 4)
    assert got.counts.tolist() == [4]
