"""Verifiers decide, from the target's answers, which draft tokens are accepted."""

from specdec.verifiers.match import MatchVerifier
from specdec.verifiers.rejection import RejectionVerifier
