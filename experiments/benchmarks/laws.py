"""Certifies the law of whole short outputs: ``python -m experiments.benchmarks.laws``.

Every verifier with every kind of tree decodes 20,000 requests of three tokens on the tables of
``specdec.certify.laws`` (five tokens; half of the requests with a draft opposed to the target, half
with one that crowds a token; stages and heads as in ``specdec verify``), each request with its own
keyed draws. The counts of the 125 possible outputs are compared with their exact probabilities,
which are enumerated.

Statistics: the e-value of ``specdec.certify.laws`` and the total variation with McDiarmid's
bound. False-alarm rate: 1e-6 for the whole table, divided equally among rows and statistics.
Controls: for each verifier a planted bug, which must be found. Verifiers and trees that do not fit
together are listed with the reason.

    nice python -m experiments.benchmarks.laws [--requests 20000] [--rows NAME ...] [--result FILE]

The result file is written after every row; rows that it has are not decoded again if the number of
requests is the same. Exit status: 1 if a row is biased, or a control is not found.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from time import process_time
from typing import Any
from unittest.mock import patch

import numpy as np

from specdec.certify.cases import Case
from specdec.certify.laws import (
    CROWDED_TABLES,
    FALSE_ALARM,
    OPPOSED_TABLE,
    TARGET_TABLE,
    Table,
    log_evidence,
)
from specdec.certify.oracle import reference_probs
from specdec.certify.subject import Subject, decode_cases
from specdec.config.job import run_job_of
from specdec.errors import UserError
from specdec.files import write_json
from specdec.pairs import TablePair
from specdec.report.provenance import provenance
from specdec.sampling.keyed_draws import KeyedDraws, Purpose
from specdec.sampling.transform import SamplingParams
from specdec.state import StopRules
from specdec.types import FloatArray, IntArray

NUM_TOKENS = 3
BATCH = 200
SAMPLING = SamplingParams(temperature=1.0)
RESULT = Path(__file__).with_name("results") / "laws.json"
VERIFIERS = ("rejection", "match")
TREES: dict[str, tuple[str, ...]] = {
    "chain": ("strategy=speculative",),
    "static": ("strategy=specinfer", "policy.branching=[3,2]", "serving=dynamic"),
    "staged": ("strategy=staged",),
    "early exit": ("strategy=eesd",),
    "multi-exit": ("strategy=eesd_multi",),
    "medusa": ("strategy=medusa",),
    "ppsd": ("strategy=ppsd",),
    "swiftspec": ("strategy=swiftspec",),
    "specpipe": ("strategy=specpipe",),
}
"""Kind of tree -> the configuration that grows it."""

TABLES: dict[str, tuple[Table, Table]] = {
    "opposed": (TARGET_TABLE, OPPOSED_TABLE),
    "crowded": CROWDED_TABLES,
}
"""Kind of draft -> logits of the target and of the draft."""


def _correction_from_target() -> Any:
    return patch("specdec.verifiers.rejection._residual", lambda target, _: target)


def _shared_draws() -> Any:
    """Two neighbouring positions share their draws."""
    honest = KeyedDraws.uniform

    def uniform(self: KeyedDraws, prompt_id: int, positions: IntArray, *key: Any) -> FloatArray:
        return honest(self, prompt_id, positions // 2 * 2, *key)

    return patch.object(KeyedDraws, "uniform", uniform)


def _shared_tests() -> Any:
    """All siblings are tested with the first one's draw."""
    honest = KeyedDraws.uniform

    def uniform(
        self: KeyedDraws, prompt_id: int, positions: IntArray, purpose: Purpose, *key: Any
    ) -> FloatArray:
        if purpose is Purpose.ACCEPT:
            key = tuple(0 * np.asarray(number) for number in key)
        return honest(self, prompt_id, positions, purpose, *key)

    return patch.object(KeyedDraws, "uniform", uniform)


CONTROLS: tuple[tuple[str, str, str, str, Callable[[], Any]], ...] = (
    ("rejection", "chain", "opposed", "correction from the target", _correction_from_target),
    ("rejection", "static", "crowded", "siblings share a test", _shared_tests),
    ("match", "chain", "opposed", "two positions share draws", _shared_draws),
)
"""Verifier, tree and draft, the planted bug, and a context manager that plants it."""


def exact_law(target: Table) -> FloatArray:
    """float64[V ** 3]: the probability of every output after the prompt [0]."""
    table = np.stack([reference_probs(np.array(row), SAMPLING) for row in target])
    law = table[0]
    for _ in range(NUM_TOKENS - 1):
        law = law[..., None] * table
    return law.ravel()


def counts_of(
    overrides: tuple[str, ...], tables: tuple[Table, Table], num_requests: int
) -> IntArray:
    """int64[V ** 3]: how often each output was decoded.

    Raises:
        UserError: the parts do not fit together.
    """
    subject = Subject(run_job_of(["model=random", *overrides]).config)
    target, draft = tables
    pair = TablePair(target=target, draft=draft)
    section = {"kind": "table", "target": target, "draft": draft}
    stop = StopRules(max_new_tokens=NUM_TOKENS)
    weights = len(target) ** np.arange(NUM_TOKENS)[::-1]
    counts = np.zeros(len(target) ** NUM_TOKENS, np.int64)
    with subject.composed(pair=pair, model=section) as parts:
        for first in range(0, num_requests, BATCH):
            ids = range(first, min(first + BATCH, num_requests))
            cases = [Case(i, "", (0,), SAMPLING, stop) for i in ids]
            outputs = decode_cases(parts, cases, batch_size=BATCH)
            tokens = np.array([outputs[case.id].output for case in cases])
            counts += np.bincount(tokens @ weights, minlength=len(counts))
    return counts


def total_variation(
    counts: IntArray, law: FloatArray, *, false_alarm: float
) -> tuple[float, float]:
    """Returns the total variation of counts[C] from ``law``[C], and its bound.

    For N counts drawn from ``law`` the mean is at most sqrt(cells / N) / 2, and by McDiarmid's
    inequality the mean is exceeded by t with probability at most exp(-2 N t ** 2).
    """
    num = int(counts.sum())
    mean = np.sqrt(np.count_nonzero(law) / num) / 2
    slack = np.sqrt(np.log(1 / false_alarm) / (2 * num))
    return float(np.abs(counts / num - law).sum() / 2), float(mean + slack)


def tested(
    overrides: tuple[str, ...], tables: tuple[Table, Table], num_requests: int, level: float
) -> dict[str, Any]:
    """One row of the table; ``level`` is the false-alarm rate of each of its two statistics."""
    start = process_time()
    try:
        counts = counts_of(overrides, tables, num_requests)
    except UserError as error:
        return {"refused": str(error)}
    law = exact_law(tables[0])
    evidence = log_evidence(counts, law)
    distance, bound = total_variation(counts, law, false_alarm=level)
    return {
        "requests": int(counts.sum()),
        "log10_e_value": round(min(evidence / math.log(10), 1e6), 3),
        "total_variation": round(distance, 5),
        "bound": round(bound, 5),
        "biased": bool(evidence >= math.log(1 / level) or distance > bound),
        "cpu_s": round(process_time() - start, 1),
    }


def jobs() -> Iterator[tuple[str, tuple[str, ...], tuple[Table, Table], Callable[[], Any]]]:
    """Name of a row, its configuration, tables, and a context manager in which it is decoded."""
    for verifier, tree, draft, bug, plant in CONTROLS:
        yield f"control: {verifier}, {tree}, {bug}", words(verifier, tree), TABLES[draft], plant
    for verifier, tree, draft in product(VERIFIERS, TREES, TABLES):
        name = f"{verifier}, {tree}, {draft} draft"
        yield name, words(verifier, tree), TABLES[draft], nullcontext


def words(verifier: str, tree: str) -> tuple[str, ...]:
    return (*TREES[tree], f"verifier={verifier}", "sampling=t08")


def is_wrong(name: str, row: dict[str, Any]) -> bool:
    return "refused" not in row and row["biased"] != name.startswith("control")


def line(name: str, row: dict[str, Any]) -> str:
    if "refused" in row:
        return f"{name:56} refused: {row['refused'][:100]}"
    return (
        f"{name:56}{row['log10_e_value']:>12.2f}{row['total_variation']:>9.4f}{row['bound']:>9.4f}"
        f"   {'BIASED' if row['biased'] else 'the law'}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--rows", nargs="*", help="names of rows, or parts of them; default: all")
    parser.add_argument("--result", type=Path, default=RESULT)
    args = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    if args.result.is_file():
        stored = json.loads(args.result.read_text("utf-8"))
        rows = stored["rows"] if stored["requests"] == args.requests else {}
    print(f"{args.requests} requests, half of them a row")
    print(f"{'row':56}{'log10 e':>12}{'TV':>9}{'bound':>9}")
    about = {"requests": args.requests, "tokens": NUM_TOKENS, "false_alarm": FALSE_ALARM}
    level = FALSE_ALARM / (2 * len(VERIFIERS) * len(TREES) * len(TABLES))
    for name, overrides, tables, plant in jobs():
        if args.rows and not any(part in name for part in args.rows):
            continue
        if name not in rows:
            with plant():
                rows[name] = tested(overrides, tables, args.requests // len(TABLES), level)
            made = provenance(command=sys.argv, config={"requests": args.requests})
            args.result.parent.mkdir(parents=True, exist_ok=True)
            write_json(args.result, {**about, "rows": rows, "provenance": made})
        print(line(name, rows[name]), flush=True)
    return int(any(is_wrong(name, row) for name, row in rows.items()))


if __name__ == "__main__":
    sys.exit(main())
