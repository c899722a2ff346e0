"""AMUSD (arXiv 2410.17375): draft and target run at the same time, without waiting for each other.

A rejection prunes the draft's chain; the draft pass that runs at that moment is not interrupted,
and its candidates are dropped.
"""

from specdec.parts.fields import DraftCount, validated
from specdec.policies.free_draft import FreeDraft


class FreeRunning(FreeDraft):
    """Submits every drafted token as soon as the target is ready; the draft never stops.

    Args:
        ahead: maximum number of draft tokens after the last committed one, submitted or not.
        wait: submit no root without a draft token below it, as in the paper. False: the target
            never waits.
    """

    @validated
    def __init__(self, *, ahead: DraftCount, wait: bool = True) -> None:
        super().__init__(ahead, least=int(wait))
