"""Verifiers: turn the target's answers into accepted paths; lossless and lossy ones."""

from specdec.verifiers.match import MatchVerifier
from specdec.verifiers.rejection import RejectionVerifier

__all__ = [
    "MatchVerifier",
    "RejectionVerifier",
]
