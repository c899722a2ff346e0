"""Verifiers turn the target's answers into accepted paths."""

from typing import TYPE_CHECKING

from specdec.lazy import lazy_exports

if TYPE_CHECKING:
    from specdec.verifiers.match import MatchVerifier
    from specdec.verifiers.rejection import RejectionVerifier

__getattr__, __dir__ = lazy_exports(__name__)
