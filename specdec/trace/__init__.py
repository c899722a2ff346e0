"""Traces of a run: recording, files and plots of the ranks' timeline and the trees' growth."""

from specdec.trace.files import write_trace
from specdec.trace.recorder import MAX_STEPS, ObservedExecutor, RunTrace

__all__ = ["MAX_STEPS", "ObservedExecutor", "RunTrace", "write_trace"]
