"""The message loop of a worker: lines of JSON in, one line of JSON out for each.

Nothing of specdec is imported here: the interpreter is another runtime's.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any


def serve(handlers: Mapping[str, Callable[..., dict[str, Any]]]) -> None:
    """Answers messages by ``handlers[op](**message)`` until standard input ends.

    The real standard output is kept for the replies: libraries may print.
    """
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        message = json.loads(line)
        try:
            reply = handlers[message.pop("op")](**message)
        except Exception as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
