"""The checks of `specdec verify`, for tests of parts outside this library (docs/verify.md).

    from specdec.testing import assert_lossless, assert_lossless_parts

    def test_my_preset():
        assert_lossless(["strategy=mine"], config_dirs=["conf"])

    def test_my_policy():
        assert_lossless_parts(lambda bench: bench.parts(source=..., policy=..., verifier=...))

``check_source``, ``check_policy`` and ``check_executor`` test one part alone. The building blocks
of the checks are exported too: a reference decoder that is independent of the decode loop
(``Oracle``, ``plain_decode``), test requests (``Case``), the exact distributions of table models,
and observers of caches while a strategy runs.
"""

from typing import TYPE_CHECKING

from specdec.lazy import lazy_exports

if TYPE_CHECKING:
    from specdec.certify import CHECKS, Check, Report
    from specdec.certify.cases import Case, ending_cases, parity_cases
    from specdec.certify.invariants import Fresh, Watch
    from specdec.certify.laws import FALSE_ALARM, OPPOSED_TABLE, TARGET_TABLE, log_evidence
    from specdec.certify.oracle import Oracle, plain_decode, reference_probs, reference_token
    from specdec.certify.subject import Decoded, Subject, decode_cases, decode_steps
    from specdec.pairs import RandomPair, TablePair
    from specdec.testing.contracts import check_executor, check_policy, check_source
    from specdec.testing.losslessness import (
        assert_lossless,
        assert_lossless_parts,
        certify_parts,
    )

__getattr__, __dir__ = lazy_exports(__name__)
