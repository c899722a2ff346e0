"""Exceptions with messages for users rather than developers."""


class UserError(ValueError):
    """The user's input is invalid; the message is one paragraph that names the value and the
    remedy.

    The command line prints only the message and exits with status 2. Other exceptions, except
    ``RankFailure``, are defects of the library and keep their traceback.
    """


class RankFailure(RuntimeError):
    """A rank died, timed out or raised; all other ranks have been terminated.

    ``rank`` is the one that failed first, or None if that is unknown; ``host`` is the name of its
    machine, if there are several.
    """

    def __init__(self, *, rank: int | None, cause: str, host: str = "") -> None:
        self.rank = rank
        self.cause = cause
        subject = "a rank" if rank is None else f"rank {rank}"
        subject += f" on {host}" if host else ""
        super().__init__(
            f"{subject} of the distributed executor failed: {cause}. All ranks have been ended;"
            " finished prompts are in the run folder; rerun the same command to continue"
        )
