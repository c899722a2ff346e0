"""The one exception that is meant for the user rather than for a developer."""

from __future__ import annotations


class UserError(ValueError):
    """Input that cannot be used: the message is one paragraph naming the value and the remedy.

    The command line prints the message alone and exits with status 2; in Python it is an ordinary
    ``ValueError``. Anything else that escapes is a defect of the library and keeps its traceback.
    """
