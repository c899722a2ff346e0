"""Times of passes and transfers of a described machine: a roofline with fitted efficiencies.

A pass of R rows of a model on d devices that share every layer takes

    ms = LAYER_MS L + (d > 1) REDUCE_MS L + max(B / (d MEMORY_SHARE bandwidth),
                                                2 P R / (d FLOP_SHARE peak)),

with L layers, P parameters and B bytes of weights and of the keys and values that are read. The
four constants are fitted to published pass times by ``experiments/plan/roofline.py``, which states
their error on models and machines that the fit does not see.
"""

from __future__ import annotations

MEMORY_SHARE = 0.8
FLOP_SHARE = 0.5
LAYER_MS = 0.02
REDUCE_MS = 0.03
ERROR = 0.2
"""Relative error of three quarters of the held-out times."""

SOURCE = "placeholder"

_LAYERS = (
    (0.07, 2),
    (0.5, 24),
    (1.2, 16),
    (3.0, 28),
    (8.0, 32),
    (13.0, 40),
    (33.0, 60),
    (70.0, 80),
)
"""Billions of parameters -> layers of published Llama and Qwen models."""


def layers_of(parameters: float) -> int:
    """Layers of a published model of about so many parameters."""
    return min(_LAYERS, key=lambda known: abs(known[0] * 1e9 / parameters - 1.0))[1]


def hidden_of(parameters: float, layers: int) -> float:
    """Width of hidden states, from 12 width^2 parameters per layer."""
    return float((parameters / (12.0 * layers)) ** 0.5)


def pass_ms(
    rows: int,
    *,
    parameters: float,
    num_bytes: float,
    layers: int,
    bytes_per_s: float,
    flops_per_s: float,
    degree: int = 1,
) -> float:
    """Milliseconds of a pass; see the module.

    Args:
        rows: tokens of the pass.
        parameters, num_bytes, layers: of the layers that the pass runs; ``num_bytes`` with keys
            and values.
        bytes_per_s, flops_per_s: limits of one device.
        degree: devices that share every layer.
    """
    reading = num_bytes / (degree * MEMORY_SHARE * bytes_per_s)
    computing = 2.0 * parameters * rows / (degree * FLOP_SHARE * flops_per_s)
    per_layer = LAYER_MS + (REDUCE_MS if degree > 1 else 0.0)
    return per_layer * layers + 1e3 * max(reading, computing)
