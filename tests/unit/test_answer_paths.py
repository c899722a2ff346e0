"""Answers are sampled along the target's path only, where no part reads the others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from specdec.compose.workbench import Parts, Workbench
from specdec.executors import ModelAnswerer
from specdec.policies import BestFirst
from specdec.sampling.keyed_draws import KeyedDraws
from specdec.sampling.transform import SamplingParams
from specdec.sources import DraftModelSource
from specdec.state import StopRules
from specdec.testing import Case, RandomPair, decode_cases
from specdec.types import NO_NODE, NO_TOKEN, Batch, Lossless, TreeRows
from specdec.verifiers import MatchVerifier

VOCAB = 4  # many nodes have the target's token
SAMPLINGS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=1.0),
    "filtered": SamplingParams(temperature=0.8, top_k=3, top_p=0.9),
    "history": SamplingParams(temperature=1.0, no_repeat_ngram=5),
}


class _Request:
    """What an answerer reads of a request."""

    def __init__(self, request_id: int, sampling: SamplingParams) -> None:
        self.id, self.sampling = request_id, sampling
        self.tokens = np.array([1, 2, 3])


def _tree(request_id: int, num: int, seed: int, first: int = 0) -> TreeRows:
    """A random tree; with ``first`` above 0, its first nodes were in an earlier batch."""
    rng = np.random.default_rng(seed)
    parents = np.array([NO_NODE] + [int(rng.integers(max(0, i - 4), i)) for i in range(1, num)])
    tree = TreeRows.within(
        request=request_id,
        prefix_len=3,
        node_ids=np.arange(num),
        tokens=rng.integers(0, VOCAB, num),
        parent_ids=parents,
    )
    return tree.take(np.arange(first, num))


def _answers(sampling: SamplingParams, follows: bool, logits: torch.Tensor, trees):
    answerer = ModelAnswerer(draws=KeyedDraws(seed=5), needs_probs=False)
    for tree in trees:
        answerer.open(_Request(tree.request, sampling))
        if tree.node_ids[0]:  # the rows before
            whole = _tree(tree.request, 40, seed=tree.request)
            answerer._paths.observe(whole.keep(whole.node_ids < tree.node_ids[0]))
    if follows:
        answerer.follow()
    return answerer.answer(Batch(step=0, trees=tuple(trees)), logits)


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("first", [0, 7], ids=["from the root", "below earlier batches"])
def test_tokens_on_the_path_are_the_same_and_others_are_left_out(
    monkeypatch: pytest.MonkeyPatch, name: str, first: int
) -> None:
    monkeypatch.setattr("specdec.executors.stage._FEW_LOGITS", 0)
    trees = [_tree(request_id, 40, seed=request_id, first=first) for request_id in range(30)]
    num = sum(len(tree.node_ids) for tree in trees)
    logits = 2.0 * torch.randn(num, VOCAB, generator=torch.Generator().manual_seed(1))
    every = _answers(SAMPLINGS[name], False, logits, trees)
    some = _answers(SAMPLINGS[name], True, logits, trees)
    left_out = followed = 0
    for tree, right, found in zip(trees, every, some, strict=True):
        assert (right.tokens != NO_TOKEN).all()
        answer = dict(zip(tree.node_ids.tolist(), right.tokens.tolist(), strict=True))
        live: set[int] = set()
        for node, parent, token, given in zip(
            tree.node_ids.tolist(),
            tree.parent_ids.tolist(),
            tree.tokens.tolist(),
            found.tokens.tolist(),
            strict=True,
        ):
            in_batch = parent in answer
            if not in_batch or (parent in live and answer[parent] == token):
                live.add(node)
                assert given == answer[node]
                followed += in_batch
            else:
                assert given == NO_TOKEN
                left_out += 1
    assert left_out > 100
    assert followed > 10, "the trees contain no path"


def _composed(verifier: MatchVerifier) -> Parts:
    pair = RandomPair(num_layers=4, hidden_size=16, num_heads=2, vocab_size=24, logit_scale=3.0)
    bench = Workbench(pair, seed=2)
    source = DraftModelSource(runner=pair.runner("draft", bench.meter))
    policy = BestFirst(bs=12, w=4, d=3)
    return bench.parts(source=source, policy=policy, verifier=verifier)


def _rows_without_token(parts: Parts) -> int:
    found = []
    collect = parts.executor.collect

    def counted(*, wait: bool = True):
        output = collect(wait=wait)
        found.extend((a.tokens == NO_TOKEN).sum() for a in output.answers)
        return output

    parts.executor.collect = counted  # type: ignore[method-assign]
    stop = StopRules(max_new_tokens=16)
    decode_cases(parts, [Case(5, "", (2, 3, 4), SAMPLINGS["sampled"], stop)])
    return int(sum(found))


def test_only_verifiers_that_take_the_targets_own_tokens_go_without() -> None:
    verifier = MatchVerifier()
    assert _rows_without_token(_composed(verifier)) > 10
    verifier.lossless = Lossless.LOSSY
    assert _rows_without_token(_composed(verifier)) == 0
    asking = MatchVerifier()
    asking.needs = replace(asking.needs, all_answers=True)
    assert _rows_without_token(_composed(asking)) == 0
