"""Expected time per token of strategies that feed a pipeline short runs or tree segments.

Every law is for independent positions, constant times of a stage and of a draft pass, free
transfers and long outputs. Times share one unit, such as milliseconds. A node that enters the
pipeline in step s is answered at the end of step s + stages - 1.

Each is a renewal: a miss empties pipeline and tree, so what follows does not depend on what was
before, and the time per token is the expected time of a cycle, from one miss to the next, over its
expected tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush

_NEGLIGIBLE = 1e-10


def pipeinfer_time(
    *,
    alpha: float,
    tokens: int,
    stages: int,
    stage: float,
    draft: float,
    cutoff: float = 0.0,
    recovery: float = 0.0,
    decay: float = 0.0,
) -> float:
    """Expected time per token of PipeInfer (arXiv 2407.11798).

    The draft's probability of every token is ``alpha``, so until the miss all is determined: which
    steps begin a run, and when each token of the chain is answered.

    Without a cut-off, every step begins a run, and the time per token is
    step (1 - alpha) (stages + alpha / (1 - alpha^tokens)), step = max(stage, tokens draft): the
    root takes ``stages`` steps, each further step answers ``tokens`` tokens, and a cycle has
    1 / (1 - alpha) tokens.

    Args:
        alpha: chance that a draft token is right if those before it were; below 1.
        tokens: tokens of a run, draft passes per step.
        stages: of the pipeline.
        stage, draft: times of a stage and of a draft pass.
        cutoff, recovery, decay: the cut-off and its moves. Default: none.

    Raises:
        ValueError: ``alpha`` not below 1.
    """
    if not 0.0 <= alpha < 1.0:
        raise ValueError(f"alpha={alpha} must be at least 0 and below 1")
    cycle_time = cycle_tokens = 0.0
    reached = 1.0
    moves = (cutoff, recovery, decay)
    for now, is_followed in _judged(alpha, tokens, stages, stage, draft, moves):
        right = alpha if is_followed else 0.0
        cycle_tokens += reached
        cycle_time += reached * (1.0 - right) * now
        reached *= right
        if reached <= _NEGLIGIBLE:
            break
    return cycle_time / cycle_tokens


def _judged(
    alpha: float,
    tokens: int,
    stages: int,
    stage: float,
    draft: float,
    moves: tuple[float, float, float],
) -> Iterator[tuple[float, bool]]:
    """The tokens of PipeInfer's chain as long as all are right, in the order of their answers.

    Yields:
        When a token is answered, and whether the next one is drafted by then.
    """
    cutoff, recovery, decay = moves
    entered = [0]  # step in which each token of the chain goes to the pipeline, the root first
    judged = runs = fruitless = step = 0
    pending = False  # a drafted token after the last one that has entered
    now = 0.0
    while judged < len(entered):
        level = cutoff + recovery * runs - decay * fruitless
        passes = 0
        if level < 1.0 and level <= alpha:
            passes = tokens - pending
            entered += [step + 1] * tokens
            pending, runs = False, runs + 1
        elif level < 1.0:
            passes = int(not pending)
            pending, fruitless = True, fruitless + 1
        now += max(stage, passes * draft)
        while judged < len(entered) and entered[judged] == step - stages + 1:
            judged += 1
            runs = fruitless = 0
            if judged == len(entered) and pending:  # the pending token is the root
                entered.append(step + 1)
                pending = False
            yield now, judged < len(entered)
        step += 1


def flowspec_time(
    *,
    ranks: Sequence[float],
    segment: int,
    nodes: int,
    stages: int,
    stage: float,
    between: float,
) -> float:
    """Expected time per token of FlowSpec (arXiv 2507.02620).

    The draft's probabilities are those of ``ranks`` at every node, so below a node there is always
    the same tree, and of its nodes the target has the best k for some k. A verdict that moves the
    root to its r-th child leaves, of the best k nodes, those below that child, and they are the
    best of the new tree. Hence the state of a cycle is the number of best nodes that the target
    has had for 0, 1, ... steps, with that of the chosen nodes, and a step changes it by a known
    chance.

    The draft is deep enough, and as wide as a node has children; its passes are hidden beside a
    stage. Each step submits at most ``segment`` chosen nodes, and at a new root ``nodes`` are
    chosen in the step after the verdict.

    Args:
        ranks: chance that the target's token is the draft's first, second, ... candidate.
        segment: nodes per step.
        nodes: nodes of a round's first tree and of each later one, root included.
        stages: of the pipeline.
        stage: time of a stage over a segment.
        between: time of the drafting between a miss and the next root's step.
    """
    below = _best_below(ranks, nodes)
    states = {(nodes, *(0,) * stages): 1.0}  # chosen nodes; submitted for 0, 1, ... steps
    steps = tokens = 0.0
    while (reached := sum(states.values())) > _NEGLIGIBLE:
        steps += reached
        judged = []
        for (chosen, newest, *had), chance in states.items():
            sent = max(min(newest + segment, chosen), newest, 1)
            judged.append(((nodes, sent, newest, *had[:-1])[: stages + 1], chance))
        states = {}
        while judged:
            state, chance = judged.pop()
            if not state[-1]:  # the root is not answered yet
                states[state] = states.get(state, 0.0) + chance
                continue
            tokens += chance
            for rank, right in enumerate(ranks):
                if chance * right > _NEGLIGIBLE:
                    moved = tuple(below[rank][num] for num in state)
                    judged.append((moved, chance * right))
    return (between + steps * stage) / tokens


def _best_below(ranks: Sequence[float], num_nodes: int) -> list[list[int]]:
    """How many of the best n nodes, n = 0 .. ``num_nodes``, are below each child of the root.

    A node's score is the product of the ranks' chances along its path; the root is the best one.
    """
    counts = [[0, 0] for _ in ranks]  # of the best 0 and of the root alone
    heap: list[tuple[float, tuple[int, ...]]] = [
        (-chance, (rank,)) for rank, chance in enumerate(ranks) if chance
    ]
    heapify(heap)
    for _ in range(num_nodes - 1):
        score, path = heappop(heap)
        for rank, count in enumerate(counts):
            count.append(count[-1] + (path[0] == rank))
        for rank, chance in enumerate(ranks):
            if chance:
                heappush(heap, (score * chance, (*path, rank)))
    return counts
