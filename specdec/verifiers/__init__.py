"""Verifiers: turn the target's answers into accepted paths; lossless and lossy ones."""

from specdec.verifiers.answers import RootAnswered, record_answers
from specdec.verifiers.match import MatchVerifier
from specdec.verifiers.rejection import RejectionVerifier

__all__ = [
    "MatchVerifier",
    "RejectionVerifier",
    "RootAnswered",
    "record_answers",
]
