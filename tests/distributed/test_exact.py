"""``model.exact=true`` over processes: bfloat16 tokens equal plain decoding on the same ranks."""

from collections.abc import Callable
from typing import Any

import pytest

from specdec.certify.numerics import plain_config
from tests.distributed.support import MAX_NEW_TOKENS, config, run

pytestmark = pytest.mark.distributed

EXACT = {"model__dtype": "bfloat16", "model__exact": True, "model__logit_scale": 4.0}


def _outputs(values: dict[str, Any]) -> dict[int, tuple[int, ...]]:
    return {key: result.output for key, result in run(values)[0].items()}


def test_shares_equal_plain_decoding_on_the_same_shares(keep_ranks: Callable[..., None]) -> None:
    """Three ranks, whose sums are in the order of ranks; the draft has a fourth."""
    keep_ranks()
    degrees = {"executor__target_degree": 3, "executor__draft_degree": 1}
    values = config("swiftspec", 1, "t06", distributed=True, **degrees, **EXACT)
    outputs = _outputs(values)
    assert outputs == _outputs(plain_config(values))
    assert {len(output) for output in outputs.values()} == {MAX_NEW_TOKENS}


@pytest.mark.exhaustive
def test_stages_equal_plain_decoding_on_one_device(keep_ranks: Callable[..., None]) -> None:
    """Ranks with slices of layers have the bits of the whole model."""
    keep_ranks()
    values = config("specpipe", 2, "t06", distributed=True, **EXACT)
    assert _outputs(values) == _outputs(plain_config(values))
