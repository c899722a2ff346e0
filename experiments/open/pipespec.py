"""PipeSpec's published asynchronous runs, predicted from its synchronous ones.

A synchronous run gives, by position, whether the draft's token was the target's, and the times of
passes. The asynchronous form is decoded with these hits on a simulated clock with these times.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from experiments.reproduce.findings import Findings
from experiments.reproduce.items import Item
from experiments.reproduce.lab import Lab
from specdec.clocks import CostCurve, LatencyProfile, SimulatedClock
from specdec.compose.workbench import Workbench
from specdec.data.files import data_folder, read_text
from specdec.errors import UserError
from specdec.pairs.recorded import RecordedPair
from specdec.sampling.transform import SamplingParams
from specdec.sources import Background, ModelChain, SyntheticSource
from specdec.sources.hashing import hash_u64, hash_uniform
from specdec.state import RequestState, StopRules
from specdec.types import FloatArray, IntArray
from specdec.verifiers import MatchVerifier
from strategies.pipespec import FreeChain

_VOCABULARY = 4096
_FOLDER = "acceptance_traces/pipespec"
_TOKEN, _UNKNOWN = range(2)  # streams of the hash


@dataclass(frozen=True, slots=True)
class Run:
    """One prompt of a synchronous run.

    Attributes:
        hits: int64[T], by position: 1 where the draft's token is the target's, -1 if not known.
        fixed_s: seconds outside of passes, and the prompt's passes.
    """

    hits: IntArray
    num_tokens: int
    fixed_s: float
    draft_s: tuple[float, ...]
    target_s: tuple[float, ...]


class Matches:
    """Made-up tokens whose draft is right where a synchronous run's was; a ``HiddenPair``."""

    vocab_size = _VOCABULARY
    num_depths = 1
    class_logprobs: FloatArray = np.log([[0.9, 0.1]])

    def __init__(self, runs: Sequence[Run], longest: int) -> None:
        """Positions that are not known are right as often as those after as many right ones.

        Args:
            runs: of a synchronous chain.
            longest: draft tokens of each of its passes.
        """
        after = "".join("01?"[hit] for run in runs for hit in run.hits.tolist())
        known = re.findall(f"(?={'1' * (longest - 1)}([01]))", after)
        self.share = known.count("1") / len(known)
        self._hits = [
            np.where(
                run.hits < 0,
                hash_uniform(_UNKNOWN, number, np.arange(len(run.hits))) < self.share,
                run.hits,
            )
            for number, run in enumerate(runs)
        ]

    def tokens(self, request_id: int, positions: IntArray) -> IntArray:
        drawn = hash_u64(_TOKEN, request_id, positions)
        return (drawn % np.uint64(_VOCABULARY)).astype(np.int64)

    def classes(self, request_id: int, positions: IntArray) -> IntArray:
        return np.zeros(len(positions), np.int64)

    def ranks(self, request_id: int, positions: IntArray, depth: int = 0) -> IntArray:
        """Beyond the run's end the draft is right."""
        hits = self._hits[request_id]
        padded = np.append(hits, 1)
        return 1 - padded[np.minimum(positions, len(hits))]

    def reach(self, request_id: int, positions: IntArray) -> IntArray | None:
        return None

    def node_keys(
        self, request_id: int, positions: IntArray, tokens: IntArray
    ) -> tuple[IntArray, IntArray]:
        return (tokens + 1) % _VOCABULARY, np.zeros(len(positions), np.int64)


def read_runs(path: Path) -> list[Mapping[str, Any]]:
    """The measurements of every prompt in one of the repository's result files.

    Raises:
        UserError: the file is not there.
    """
    if not path.is_file():
        raise UserError(f"{path.name} is not there: SPECDEC_DATA names the folder of the data sets")
    return [result["metrics"] for result in json.loads(read_text(path))["results"]]


def synchronous_runs(path: Path, longest: int) -> list[Run]:
    """The prompts of a synchronous chain whose passes have ``longest`` draft tokens at most."""
    runs = []
    for measured in read_runs(path):
        draft, target = (tuple(times) for times in measured["model_times"])
        hits: list[int] = []
        for emitted in measured["accepted_tokens"][0]:
            hits += [1] * (emitted - 1) + [0 if emitted <= longest else -1]
        runs.append(
            Run(
                hits=np.array(hits),
                num_tokens=int(measured["tokens_generated"]),
                fixed_s=float(measured["total_time"]) - sum(draft) - sum(target),
                draft_s=draft,
                target_s=target,
            )
        )
    return runs


def predicted_ms(runs: Sequence[Run], *, longest: int, least: int) -> list[float]:
    """Milliseconds per token of the asynchronous form, prompt by prompt.

    Args:
        runs: of the synchronous form.
        longest: draft tokens of its passes.
        least: new tokens that the target waits for.
    """
    times = {
        "draft": 1e3 * median(t for run in runs for t in run.draft_s),
        "stage": 1e3 * median(t for run in runs for t in run.target_s),
    }
    costs = {kind: CostCurve(tokens=(1,), ms=(ms,)) for kind, ms in times.items()}
    hidden = Matches(runs, longest)
    found = []
    for number, run in enumerate(runs):
        clock = SimulatedClock(LatencyProfile(name="synchronous run", costs=costs))
        source = Background(source=SyntheticSource(pair=hidden), free_rank=2)
        parts = Workbench(RecordedPair(hidden), clock=clock).parts(
            source=ModelChain(sources=[source]),
            policy=FreeChain(ahead=64, least=least),
            verifier=MatchVerifier(),
            stages=1,
        )
        request = RequestState(
            request_id=number,
            prompt=np.array([1]),
            stop=StopRules(max_new_tokens=run.num_tokens),
            sampling=SamplingParams(),
        )
        for _ in parts.decode(parts.new_state(), [request]):
            pass
        found.append(1e3 * (run.fixed_s + clock.now()) / run.num_tokens)
    return found


def asynchronous_runs(item: Item, lab: Lab) -> Findings:
    """Predicted and published time per token of asynchronous runs. Key: ``runs``."""
    findings, rows = Findings(), []
    folder = data_folder(name="acceptance_traces", places=_FOLDER) / _FOLDER
    for name, keys in item.config["runs"].items():
        runs = synchronous_runs(folder / keys["synchronous"], keys["longest"])
        published = [
            1e3 * float(measured["time_per_token"])
            for measured in read_runs(folder / keys["asynchronous"])
        ]
        ours = predicted_ms(runs, longest=keys["longest"], least=keys["least"])
        num = min(len(ours), len(published))  # prompts that both runs have, in the same order
        ratio = mean(ours[:num]) / mean(published[:num])
        together = float(np.corrcoef(ours[:num], published[:num])[0, 1])
        rows.append(
            (name, keys["least"], num, mean(published[:num]), mean(ours[:num]), ratio, together)
        )
        if claim := keys.get("claim"):
            findings.add(claim, ratio, "simulated", name, kind="calibrated")
    columns = ("run", "least", "prompts", "published ms", "predicted ms", "ratio", "correlation")
    findings.table("Time per token, mean over prompts", columns, rows)
    return findings
