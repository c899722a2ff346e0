"""Expected time per token of strategies whose draft works beside the target, or in a pipeline.

Every law is for independent positions, constant times of a pass (or stage) of the target and of a
draft pass, free transfers and long outputs. Times share one unit, such as milliseconds: of a pass
of the ``target`` or a pipeline's ``stage``, of a ``middle`` model, of a ``draft``. ``alpha`` is the
chance that a draft token is accepted if those before it were. Tests compare simulated runs with
them.

PipeInfer and FlowSpec: a node that enters the pipeline in step s is answered at the end of step
s + stages - 1. A miss empties pipeline and tree, so what follows does not depend on what was
before: the time per token is the expected time from one miss to the next, over its expected tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from math import floor

from specdec.metrics.speedup import expected_accepted

_NEGLIGIBLE = 1e-10


def _check(alpha: float) -> None:
    if not 0.0 <= alpha < 1.0:
        raise ValueError(f"alpha={alpha} must be at least 0 and below 1")


def pearl_time(*, alpha: float, gamma: int, target: float, draft: float) -> float:
    """Expected time per token of PEARL (arXiv 2408.11850).

    A round takes max(target, gamma draft). Pre-verify emits one token and is followed by
    post-verify with probability alpha. Post-verify judges gamma tokens: it emits those before the
    first rejection and a correction, or all gamma and stays, with probability alpha^gamma.

    Args:
        gamma: draft tokens per round.
    """
    per_post = 1.0 + expected_accepted(alpha, gamma - 1)
    leaves = 1.0 - alpha**gamma
    share_post = alpha / (alpha + leaves) if alpha else 0.0
    tokens = (1.0 - share_post) + share_post * per_post
    return max(target, gamma * draft) / tokens


def ssd_time(
    *, ranks: Sequence[float], fan_outs: Sequence[int], target: float, draft: float
) -> float:
    """Expected time per token of SSD (arXiv 2603.03251).

    A round takes max(target, (gamma + 1) draft) and emits 1 + ``expected_accepted`` tokens. After a
    miss gamma draft passes precede it.

    Args:
        ranks: chance that the target's token is the draft's first, second, ... candidate.
        fan_outs: F_k, outcomes for each accepted length k = 0 .. gamma.
        target: time of a target pass over gamma + 1 rows.
        draft: time of a draft pass, alike over one row and over all outcomes.
    """
    gamma, alpha = len(fan_outs) - 1, ranks[0]
    tokens = 1.0 + expected_accepted(alpha, gamma)
    hit = ssd_hit_rate(ranks=ranks, fan_outs=fan_outs)
    return (max(target, (gamma + 1) * draft) + (1.0 - hit) * gamma * draft) / tokens


def ssd_hit_rate(*, ranks: Sequence[float], fan_outs: Sequence[int]) -> float:
    """Chance that a verdict of SSD ends in a prepared outcome; arguments as of ``ssd_time``.

    Before the chain's end the outcomes are the candidates after the first, at its end all.
    """
    *others, last = fan_outs
    alpha = ranks[0]
    rejected = sum(alpha**k * sum(ranks[1 : 1 + num]) for k, num in enumerate(others))
    return rejected + alpha ** len(others) * sum(ranks[:last])


def amusd_time(*, alpha: float, target: float, draft: float) -> float:
    """Expected time per token of AMUSD (arXiv 2410.17375), with an unlimited chain.

    A chain of passes begins when the draft's first token after a miss is there. With x = target /
    draft, floor(k x) + 1 tokens are drafted when pass k ends. Pass 1 judges the first of them and
    every further pass what the pass before has left, always one more token than it has: its last
    answer judges a token drafted meanwhile. A miss at the end of pass k ends the chain; the draft
    pass that then begins or runs is lost, and the next one drafts the next chain's first token.

    Raises:
        ValueError: ``alpha`` not below 1, or a target pass shorter than two draft passes, which may
            find no token of the draft.
    """
    _check(alpha)
    ratio = target / draft
    if ratio < 2.0:
        raise ValueError(f"target={target} must be at least twice draft={draft}")
    time = tokens = 0.0
    reached, passes, judged = 1.0, 1, 2
    while reached > 1e-12:
        tokens += reached * (1.0 + expected_accepted(alpha, judged - 1))
        ends = reached * (1.0 - alpha**judged)
        drafted = floor(passes * ratio + 1e-9) + 1
        time += ends * (drafted + 1) * draft
        reached -= ends
        judged = drafted - (floor((passes - 1) * ratio + 1e-9) + 1)
        passes += 1
    return time / tokens


def pipespec_time(
    *, draft_right: float, middle_right: float, target: float, middle: float, draft: float
) -> float:
    """Approximate time per token of PipeSpec (arXiv 2505.01572) with one middle model.

    Draft and middle model are AMUSD: as long as the middle model is right, the draft agrees with it
    with probability draft_right / middle_right, and they write at the pace of ``amusd_time``. The
    target judges what is written at that pace. A miss restarts all three: the target waits for the
    end of the middle model's pass or for the draft's next first token, whichever is later, and for
    a pass of the middle model. The mean pace replaces the single passes of the two.

    Args:
        draft_right: chance that the draft's token is the target's if those before it were.
        middle_right: that of the middle model, which is right wherever the draft is; below 1.

    Raises:
        ValueError: chances out of this order, or a middle model faster than two draft passes.
    """
    if not 0.0 <= draft_right <= middle_right < 1.0:
        raise ValueError(
            f"draft_right={draft_right} and middle_right={middle_right} must be at least 0, below"
            " 1, and in this order"
        )
    agree = min(draft_right / middle_right if middle_right else 0.0, 1.0 - 1e-9)
    pace = amusd_time(alpha=agree, target=middle, draft=draft)
    first = 1.5 * draft  # the rest of the draft's lost pass, and one more
    restart = (middle**2 + first**2) / (2.0 * middle) + middle  # E max(U(0, middle), first), + pass
    time, tokens, reached = restart, 0.0, 1.0
    judged = 2.0 + agree  # what the first pass writes, and the token after it
    while reached > 1e-12:
        stays = middle_right**judged
        time += reached * target
        tokens += reached * (1.0 - stays) / (1.0 - middle_right)
        reached *= stays
        judged = target / pace
    return time / tokens


def dsi_time(*, alpha: float, lookahead: int, target: float, draft: float) -> float:
    """Expected time per token of DSI (arXiv 2405.14105) with as many copies as are ever at work.

    After a miss the new root has a copy at once. If the first token is wrong, its answer ends the
    cycle. Otherwise the answer that ends it comes from the block of the last right token, which is
    complete when all its tokens are drafted, after the rest of the draft pass that the miss made
    useless.

    Args:
        lookahead: draft tokens per block.
    """
    _check(alpha)
    lost = draft * (floor(target / draft + 1e-9) + 1) - target
    blocks = alpha / (1.0 - alpha**lookahead)  # E ceil(right tokens / lookahead)
    cycle = target + alpha * lost + blocks * lookahead * draft
    return cycle * (1.0 - alpha)


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
        tokens: tokens of a run, draft passes per step.
        cutoff, recovery, decay: the cut-off and its moves. Default: none.
    """
    _check(alpha)
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
