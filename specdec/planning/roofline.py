"""Times of passes of a described machine: a roofline with fitted efficiencies.

A pass of R rows of a model on d devices that share every layer takes

    L (layer_ms + [d > 1] reduce_ms) + max(B / (d memory_share bandwidth),
                                           2 P R / (d flop_share peak)),

with L layers, P parameters and B bytes of weights and of the keys and values that are read.
``eager_layer_ms`` replaces ``layer_ms`` for engines without captured graphs. The constants are
fitted to published pass times by ``experiments/plan/roofline.py``, which states the error on models
that the fit does not use.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """What a roofline needs besides a data sheet.

    Attributes:
        memory_share, flop_share: share of the data sheet's bandwidth and peak that passes reach.
        layer_ms, eager_layer_ms: fixed time of a layer with and without captured graphs.
        reduce_ms: time per layer of the sums over devices that share it.
    """

    memory_share: float
    flop_share: float
    layer_ms: float
    eager_layer_ms: float
    reduce_ms: float


CONSTANTS = Constants(
    memory_share=0.75, flop_share=0.5, layer_ms=0.08, eager_layer_ms=0.2, reduce_ms=0.06
)
ERROR = 0.25
"""Three quarters of the held-out pass times have a smaller relative error; the median is 11 %."""

SOURCE = "156 published pass times"
"""The data of the fit: 16-bit weights of 10 models, 0.07 to 71 billion parameters, on 8 GPUs.

AnthonyHuo/An-Empirical-Study-on-Tree-based-Speculative-Decoding 0428ac25, jianc99/FastHesse,
swiss-ai/apertus-speculative-decoding, spitzblattr/spec-bench-vllm.
"""

_LAYERS = (
    *((0.07, 2), (0.5, 24), (1.2, 16), (3.0, 28), (8.0, 32)),
    *((13.0, 40), (33.0, 60), (70.0, 80)),
)
"""(billions of parameters, layers) of published Llama and Qwen models."""


def layers_of(parameters: float) -> int:
    """Returns the layers of the published model whose number of parameters is nearest."""
    return min(_LAYERS, key=lambda known: abs(known[0] * 1e9 / parameters - 1.0))[1]


def hidden_of(parameters: float, layers: int) -> float:
    """Returns the width of hidden states, assuming 12 width^2 parameters per layer."""
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
    eager: bool = False,
    constants: Constants = CONSTANTS,
) -> float:
    """Returns the milliseconds of a pass by the module's formula.

    Args:
        num_bytes: bytes that are read, keys and values included.
        bytes_per_s, flops_per_s: limits of one device by its data sheet.
        degree: devices that share every layer (d).
        eager: whether the engine runs without captured graphs.
    """
    reading = num_bytes / (degree * constants.memory_share * bytes_per_s)
    computing = 2.0 * parameters * rows / (degree * constants.flop_share * flops_per_s)
    fixed = constants.eager_layer_ms if eager else constants.layer_ms
    fixed += constants.reduce_ms if degree > 1 else 0.0
    return fixed * layers + 1e3 * max(reading, computing)
