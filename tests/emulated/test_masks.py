"""Uncaptured passes make their masks on the device, once per pass, from the rows' bits."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import pytest

from specdec.pairs import build_pair
from specdec.runs.runners import PartsRunner, TokenPrompt
from specdec.state import StopRules
from tests.emulated.device import Device, emulated
from tests.matrix.cells import Cell, base, config

LONG = TokenPrompt(7, 7 * np.arange(300) % 11 + 1)
NUM_TOKENS = 4
CHUNK = 16
CELL = Cell("draft_model", "static", "match", "local", "greedy")


def decoded(emulation: Device | None = None, **model: Any) -> list[int]:
    """Tokens of the long prompt, prefilled in chunks, without graphs; forgets copies of loading."""
    values = config(CELL)
    values["model"].update(model, max_positions=512)
    values["serving"] = deepcopy(base()["serving"])
    values["prefill_chunk"] = values["source"]["prefill_chunk"] = CHUNK
    stop = StopRules(max_new_tokens=NUM_TOKENS)
    runner = PartsRunner(cfg=values, pair=build_pair(values["model"]), stop=stop)
    if emulation is not None:
        emulation.to_device.clear()
        emulation.waits.clear()
    outputs: list[int] = []
    runner.run([LONG], lambda result: outputs.extend(result.output))
    runner.close()
    return outputs


def on_the_device(**model: Any) -> tuple[list[int], Device]:
    with emulated() as device:
        return decoded(device, device="cuda", **model), device


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["dense", "two_level"])
def test_no_mask_is_copied(attention):
    """Copies to the device are of tokens, positions and bits: no row of the context among them."""
    tokens, device = on_the_device(attention=attention)
    assert tokens == decoded(device="cpu", attention=attention)
    assert max(device.to_device) <= CHUNK * CHUNK  # bits of a chunk's rows
    assert set(device.waits) <= {"a copy to the host"}
