"""Verifiers: from the target's answers to accepted paths (lossless first, lossy ones labelled)."""

from specdec.verifiers.answers import RootAnswered, record_answers
from specdec.verifiers.lossy import RelaxedVerifier, StrictVerifier, TypicalVerifier
from specdec.verifiers.match import MatchVerifier
from specdec.verifiers.rejection import RejectionVerifier

__all__ = [
    "MatchVerifier",
    "RejectionVerifier",
    "RelaxedVerifier",
    "RootAnswered",
    "StrictVerifier",
    "TypicalVerifier",
    "record_answers",
]
