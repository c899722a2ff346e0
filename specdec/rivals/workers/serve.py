"""The message loop of a worker: each line of JSON on standard input gets one line in reply.

Nothing of specdec is imported here, since another runtime's interpreter runs this module.
"""

import importlib
import json
import os
import sys
from types import SimpleNamespace
from typing import Any


def serve(name: str) -> None:
    """Answers each message by the function of the module ``name`` that its ``op`` names. A function
    receives the fields of all messages so far, to which it may add. ``baseline_of_runtime`` sends
    those of ``load``; ``generate`` gets prompt, max_new_tokens and sampling, ``score`` tokens. What
    libraries print goes to standard error.
    """
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    worker, state = importlib.import_module(name), SimpleNamespace()
    for line in sys.stdin:
        vars(state).update(json.loads(line))
        try:
            reply = {"result": getattr(worker, state.op)(state)}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=replies)


def nats_of(logits: Any, tokens: list[int]) -> float:
    import numpy as np

    logits = np.asarray(logits, np.float64)[:-1]
    top = logits.max(-1)
    sums = top + np.log(np.exp(logits - top[:, None]).sum(-1))
    return float((sums - logits[np.arange(len(sums)), tokens[1:]]).sum())


if __name__ == "__main__":
    serve(sys.argv[1])
