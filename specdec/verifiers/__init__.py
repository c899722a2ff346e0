"""Verifiers turn the target's answers into accepted paths."""

from specdec.verifiers.match import MatchVerifier
from specdec.verifiers.rejection import RejectionVerifier
