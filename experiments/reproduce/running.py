"""Runs items in one or several processes, measured ones alone, and continues an earlier run.

The order is: items that measure this machine's times, one at a time; all others, in ``jobs``
processes; then the paced columns, one at a time. Results are written as soon as an item is done.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

from experiments.reproduce.findings import Findings
from experiments.reproduce.items import Item, all_items
from experiments.reproduce.lab import Lab, code_hash
from experiments.reproduce.results import read_item, write_item
from experiments.reproduce.stated import ROOT
from specdec.errors import UserError

_RESULTS = (":!experiments/*/results/*", ":!docs/reproduction.md")
_FAILED = ("failed: ", "not run: ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Conditions of all items of a command.

    Attributes:
        out, runs: folders of the results and of the runs.
        facts: provenance of the command.
        resume: keep results in ``out`` of this revision, code and size.
        jobs: number of processes of items that measure nothing.
        record: a record.npz of the user's own models.
    """

    out: Path
    runs: Path
    facts: Mapping[str, Any]
    quick: bool
    paced: bool = False
    resume: bool = False
    jobs: int = 1
    record: Path | None = None


@dataclass(frozen=True, slots=True)
class Done:
    """A finished item: its findings, its conditions, and whether an earlier run made it."""

    findings: Findings
    conditions: Mapping[str, Any]
    kept: bool = False

    @property
    def failed(self) -> bool:
        """Whether a part of it could not be run, or raised."""
        return any(text.startswith(_FAILED) for text in self.findings.missing)


def run_items(chosen: Sequence[Item], settings: Settings) -> Iterator[tuple[Item, Done]]:
    """Runs items and yields each as it is done; an item with a paced column comes twice."""
    alone = [item for item in chosen if item.alone]
    others = [item for item in chosen if not item.alone]
    for item in alone:
        yield item, run_item(item, settings)
    if settings.jobs == 1:
        for item in others:
            yield item, run_item(item, settings)
    else:
        yield from _in_processes(others, settings)
    for item in chosen if settings.paced else ():
        if "paced" in item.config:
            yield item, run_item(item, settings, paced=True)


def _in_processes(items: Sequence[Item], settings: Settings) -> Iterator[tuple[Item, Done]]:
    context = multiprocessing.get_context("spawn")
    longest_first = sorted(items, key=_known_seconds, reverse=True)
    with ProcessPoolExecutor(settings.jobs, mp_context=context) as pool:
        tasks = {pool.submit(_run_by_name, item.id, settings): item for item in longest_first}
        for task in as_completed(tasks):
            yield tasks[task], task.result()


def _known_seconds(item: Item) -> float:
    """CPU time of the item's result that is checked in; 0 if it has none."""
    stored = read_item(item)
    return float(stored[1]["cpu_seconds"]) if stored else 0.0


def _run_by_name(name: str, settings: Settings) -> Done:
    """In a process of its own: pictures stay there, results are files."""
    import torch

    torch.set_num_threads(1)
    done = run_item(all_items()[name], settings)
    done.findings.figure = None
    return done


def run_item(item: Item, settings: Settings, *, paced: bool = False) -> Done:
    """Runs one item and writes its result, or keeps that of an earlier run.

    With its paced column, the time of the run without it is added.
    """
    stored = read_item(item, settings.out)
    earlier = (0.0, 0.0)
    key = _key(item, settings)
    if stored is not None and all(stored[1].get(name) == value for name, value in key.items()):
        done = Done(*stored, kept=True)
        if settings.resume and not done.failed and stored[1].get("paced", False) >= paced:
            return done
        if paced:
            earlier = (stored[1]["seconds"], stored[1]["cpu_seconds"])
    lab = Lab(
        folder=settings.runs,
        quick=settings.quick,
        paced=paced,
        own_record=settings.record,
        say=lambda text: print(f"  run {text}", file=sys.stderr),
    )
    start, cpu_start = perf_counter(), process_time()
    findings = _findings(item, lab)
    if stored is not None and not paced and "paced" in item.config and not settings.quick:
        _keep_paced(findings, *stored)
    times = (perf_counter() - start + earlier[0], process_time() - cpu_start + earlier[1])
    conditions = {**_conditions(item, settings, times), **key, "paced": paced}
    write_item(item, findings, settings.out, conditions)
    return Done(findings, conditions)


def _keep_paced(findings: Findings, stored: Findings, conditions: Mapping[str, Any]) -> None:
    """Adds the paced figures of an earlier result, each with its date and revision."""
    date = f"; of {conditions['time'][:10]}, revision {conditions['revision']}"
    for measure in stored.measures:
        if measure.origin == "paced":
            dated = measure.conditions + ("" if "; of 20" in measure.conditions else date)
            findings.measures.append(replace(measure, conditions=dated))
    for table in stored.tables:
        if table.title.startswith("Paced"):
            dated = table.title + ("" if "; of 20" in table.title else date)
            findings.tables.append(replace(table, title=dated))


def _findings(item: Item, lab: Lab) -> Findings:
    """The item's findings; a builder that fails leaves the reason (other items continue)."""
    if not item.builder or item.absent:
        return Findings(missing=[item.status])
    try:
        return item.build(lab)
    except UserError as error:
        return Findings(missing=[f"not run: {error}"])
    except Exception as error:
        traceback.print_exc()
        return Findings(missing=[f"failed: {type(error).__name__}: {error}"])


def _key(item: Item, settings: Settings) -> dict[str, Any]:
    """What must be equal for an earlier result to stand."""
    kind = "quick" if settings.quick else "full"
    prompts, tokens = item.size[kind]
    return {
        "size": f"{kind}: up to {prompts} prompts x {tokens} tokens",
        **{name: settings.facts[name] for name in ("revision", "code")},
        "record": settings.record.name if settings.record else "none",
    }


def _conditions(item: Item, settings: Settings, seconds: tuple[float, float]) -> dict[str, Any]:
    """Command, machine and time of a result; ``seconds`` exclude runs that were reused."""
    facts = settings.facts
    machine = facts["hardware"]
    return {
        "command": " ".join(facts["command"]),
        "machine": f"{machine['machine']}, {machine['cores']} cores, torch with 1 thread"
        + (f", {settings.jobs} items at a time" if settings.jobs > 1 and not item.alone else ""),
        "time": facts["time"],
        "seconds": round(seconds[0], 1),
        "cpu_seconds": round(seconds[1], 1),
    }


def revision_facts(facts: Mapping[str, Any]) -> dict[str, str]:
    """``revision`` of the source, and ``code``, the hash of all code and configuration.

    Results and the page made of them are no source: rewriting them leaves the revision as it is.
    """
    revision = "unknown"
    if facts["git"]:
        revision = facts["git"]["revision"][:10]
        command = ["git", "status", "--porcelain", "--", ".", *_RESULTS]
        changed = subprocess.run(command, cwd=ROOT.parent, capture_output=True, check=False)
        if changed.returncode or changed.stdout.strip():
            revision += " with local changes"
    digest = hashlib.sha256(code_hash().encode())
    for folder, pattern in ((ROOT, "*.py"), (ROOT, "*.yaml"), (ROOT.parent / "conf", "*.yaml")):
        for path in sorted(folder.rglob(pattern)):
            digest.update(path.read_bytes())
    return {"revision": revision, "code": digest.hexdigest()[:16]}
