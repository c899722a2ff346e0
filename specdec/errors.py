"""The exceptions that are meant for the user rather than for a developer."""

from __future__ import annotations


class UserError(ValueError):
    """Input that cannot be used: the message is one paragraph naming the value and the remedy.

    The command line prints the message alone and exits with status 2; in Python it is an ordinary
    ``ValueError``. What else escapes, ``RankFailure`` apart, is a defect of the library and keeps
    its traceback.
    """


class RankFailure(RuntimeError):
    """A rank died, hung, or raised; every other rank has been ended.

    Attributes:
        rank: the rank that failed first; None where it cannot be told.
        cause: what happened to it.
    """

    def __init__(self, *, rank: int | None, cause: str) -> None:
        """Names the rank and the cause."""
        self.rank = rank
        self.cause = cause
        who = "a rank" if rank is None else f"rank {rank}"
        super().__init__(
            f"{who} of the distributed executor failed: {cause}. All ranks have been ended;"
            " finished prompts are in the run folder, and the same command goes on behind them"
        )
