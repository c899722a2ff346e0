"""Options of how a ``ModelRunner`` runs passes: CUDA graphs, fused kernels, backend."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """Options that change the speed of a pass, and its results at most by rounding."""

    graphs: str = "off"  # one of ``specdec.models.runner.GRAPHS``
    # "torch"; "triton" for a fused SwiGLU; "packed" for weights in oneDNN's layout, on a CPU
    kernels: str = "torch"
    backend: str = "eager"  # "eager" for PyTorch, "onnx" for ONNX Runtime
    bits: int | None = None  # bits per weight of linear layers in ONNX Runtime; None: float32
    exact: bool = False  # whether a row's bits must not depend on the other rows


PLAIN = Execution()
