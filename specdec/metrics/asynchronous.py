"""Expected time per token of strategies whose draft works beside the target.

Every law is for independent positions, constant times of a target pass and of a draft pass, free
transfers and long outputs. Times share one unit, such as milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import floor

from specdec.metrics.speedup import expected_accepted


def pearl_time(*, alpha: float, gamma: int, target: float, draft: float) -> float:
    """Expected time per token of PEARL (arXiv 2408.11850).

    A round takes max(target, gamma draft). Pre-verify emits one token and is followed by
    post-verify with probability alpha. Post-verify judges gamma tokens: it emits those before the
    first rejection and a correction, or all gamma and stays, with probability alpha^gamma.

    Args:
        alpha: chance that a draft token is accepted if those before it were.
        gamma: draft tokens per round.
        target, draft: times of a pass.

    Raises:
        ValueError: ``alpha`` outside 0 .. 1.
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

    Args:
        alpha: chance that a draft token is accepted if those before it were; below 1.
        target, draft: times of a pass.

    Raises:
        ValueError: ``alpha`` not below 1, or a target pass shorter than two draft passes, which may
            find no token of the draft.
    """
    if not 0.0 <= alpha < 1.0:
        raise ValueError(f"alpha={alpha} must be at least 0 and below 1")
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
        target, middle, draft: times of a pass.

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
        alpha: chance that a draft token is accepted if those before it were; below 1.
        lookahead: draft tokens per block.
        target, draft: times of a pass.

    Raises:
        ValueError: ``alpha`` not below 1.
    """
    if not 0.0 <= alpha < 1.0:
        raise ValueError(f"alpha={alpha} must be at least 0 and below 1")
    lost = draft * (floor(target / draft + 1e-9) + 1) - target
    blocks = alpha / (1.0 - alpha**lookahead)  # E ceil(right tokens / lookahead)
    cycle = target + alpha * lost + blocks * lookahead * draft
    return cycle * (1.0 - alpha)
