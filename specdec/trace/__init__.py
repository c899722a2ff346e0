"""Traces of a run: recording, files and plots of the ranks' timeline and the trees' growth."""

from specdec.trace.files import TIMELINE_FILE, TREES_FILE, write_trace
from specdec.trace.recorder import MAX_STEPS, ObservedExecutor, RunTrace, TreeRecord

__all__ = [
    "MAX_STEPS",
    "TIMELINE_FILE",
    "TREES_FILE",
    "ObservedExecutor",
    "RunTrace",
    "TreeRecord",
    "write_trace",
]
