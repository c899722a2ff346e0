"""Records of runs: what ``record=true`` writes and ``model=replay`` reads."""

from specdec.recording.record import Record, RecordedRequest, read_record, write_record
from specdec.recording.recorder import DraftRecorder, check_recordable, record_run
from specdec.recording.traces import TracedRequest, read_traces

__all__ = [
    "DraftRecorder",
    "Record",
    "RecordedRequest",
    "TracedRequest",
    "check_recordable",
    "read_record",
    "read_traces",
    "record_run",
    "write_record",
]
