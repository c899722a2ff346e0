"""Compares the keyed draws of a run with a second implementation of the generator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from specdec.certify.oracle import reference_draw
from specdec.sampling.keyed_draws import KeyedDraws, Purpose

_SPAN = 7  # positions per call; not a divisor of the block size
_FEW = (0, 1, 2)  # siblings
_MANY = (0, 1, 16, 127, 128, 300)
_BACKWARDS = (900, 380, 377, 255, 0, 900)  # first positions of calls, in no order
_LARGE_IDS = (1 << 32, (1 << 40) + 1)


def draw_problems(draws: KeyedDraws, prompt_id: int, num_positions: int) -> Iterator[str]:
    """Yields draws that differ from the reference, the first one per purpose.

    Positions rise to ``num_positions``, through every block, then go back and forth; siblings are
    few and many; some prompt ids have more than 32 bits.
    """
    rising = [(prompt_id, start, _FEW) for start in range(0, num_positions, _SPAN)]
    jumping = [
        (prompt_id + high, start, siblings)
        for high in (0, *_LARGE_IDS)
        for start, siblings in zip(_BACKWARDS, 3 * (_FEW, _MANY), strict=True)
    ]
    for purpose in Purpose:
        for key in [*rising, *jumping]:
            at = _first_wrong(draws, purpose, *key)
            if at is not None:
                yield f"the {purpose.name.lower()} draw of position {at} is not the generator's"
                break


def _first_wrong(
    draws: KeyedDraws, purpose: Purpose, prompt_id: int, start: int, siblings: Sequence[int]
) -> int | None:
    """Returns the first position from ``start`` on with a wrong draw."""
    positions = np.arange(start, start + _SPAN)
    drawn = draws.uniform(prompt_id, positions, purpose, np.array(siblings)[:, None])
    expected = [
        [reference_draw(draws.seed, prompt_id, at, purpose, index) for at in positions.tolist()]
        for index in siblings
    ]
    wrong = (drawn != np.array(expected)).any(axis=0)
    return int(positions[wrong][0]) if wrong.any() else None
