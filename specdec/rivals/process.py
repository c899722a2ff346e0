"""Decodes prompts in a worker process of another runtime, one at a time.

Messages are lines of JSON over the worker's standard input and output. The worker measures the
times itself, so that they exclude the messages.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.errors import UserError
from specdec.rivals.environments import RUNTIMES, worker_command

_SHOWN = 400  # characters of a worker's error that a message shows


@dataclass(frozen=True, slots=True, kw_only=True)
class RivalOutput:
    """The tokens, times and counts that a worker returns for one prompt.

    Attributes:
        tokens: generated tokens, including the end token.
        times_s: per token, seconds from the start of the request.
        wall_s, cpu_s: of the request, prefill included; CPU time of all threads.
        prefill_s: part of ``wall_s`` before the first decoding pass; 0 if unknown.
        rounds: target passes that produced tokens.
        proposed: draft tokens; 0 without drafts, None if the runtime does not count them.
        accepted: draft tokens that the target accepted.
    """

    tokens: tuple[int, ...]
    times_s: tuple[float, ...]
    wall_s: float
    cpu_s: float
    prefill_s: float
    rounds: int
    proposed: int | None
    accepted: int
    draft_passes: int


class RivalProcess:
    """One runtime with its models loaded in a worker process."""

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        """Starts the worker of a runtime in ``RUNTIMES`` and loads the models.

        ``settings`` are those of the worker's ``open`` message: target and draft (converted
        folders), method, threads, eos (token ids), options.
        """
        self._title = RUNTIMES[name].title
        threads = str(settings["threads"])
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1"}
        environment.pop("PYTHONPATH", None)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(  # noqa: S603 - a script of our own
            worker_command(name),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
        )
        self.pids = (self._process.pid,)
        self.version: str = self._ask({"op": "open", **settings})["version"]

    def generate(
        self, prompt: Sequence[int], *, max_new_tokens: int, sampling: Mapping[str, Any]
    ) -> RivalOutput:
        """Decodes token ids; ``sampling`` has temperature (0 for greedy), top_p, top_k and seed."""
        reply = self._ask(
            {
                "op": "generate",
                "prompt": list(prompt),
                "max_new_tokens": max_new_tokens,
                "sampling": dict(sampling),
            }
        )
        values = {name: reply[name] for name in RivalOutput.__dataclass_fields__}
        return RivalOutput(
            **{**values, "tokens": tuple(reply["tokens"]), "times_s": tuple(reply["times_s"])}
        )

    def close(self) -> None:
        if self._process.stdin:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def _ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
            reply = json.loads(self._process.stdout.readline() or "{}")
        except (OSError, ValueError):
            reply = {}
        if not reply or "error" in reply:
            self._errors.seek(0)
            reason = reply.get("error") or self._errors.read().decode(errors="replace")
            self.close()
            words = " ".join(str(reason).split())[-_SHOWN:] or "it ended without a message"
            raise UserError(f"{self._title} failed: {words}; leave its rows out")
        return dict(reply)
