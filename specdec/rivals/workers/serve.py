"""The message loop of a worker: each line of JSON on standard input gets one line in reply.

Nothing of specdec is imported here, since another runtime's interpreter runs this module.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any


def serve(*functions: Callable[..., dict[str, Any]]) -> None:
    """Answers each message by the function that its ``op`` names (without a final "_" of the
    function's name); what libraries print goes to standard error.
    """
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    handlers = {function.__name__.rstrip("_"): function for function in functions}
    for line in sys.stdin:
        message = json.loads(line)
        try:
            reply = handlers[message.pop("op")](**message)
        except Exception as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def nats_of(logits: Any, tokens: list[int]) -> dict[str, float]:
    import numpy as np

    logits = np.asarray(logits, np.float64)[:-1]
    top = logits.max(-1)
    sums = top + np.log(np.exp(logits - top[:, None]).sum(-1))
    return {"nats": float((sums - logits[np.arange(len(sums)), tokens[1:]]).sum())}
