"""Replaces a decoder layer's norms and projections by fused modules, on a runner's own copy.

Shape letters: R rows, E hidden size, F inner size, N outputs of a projection.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.errors import UserError
from specdec.kernels.swiglu import norm_projection, swiglu

FAMILIES = ("llama", "mistral", "qwen3")
"""Supported families: layers of norm + q/k/v projections and norm + SwiGLU, without biases."""

_TOLERANCE = 2e-2  # relative, for a norm's output in bfloat16
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def fuse(model: PreTrainedModel) -> int:
    """Replaces norms and projections in every layer of ``model``; returns how many layers.

    The fused modules share the model's parameters.

    Raises:
        UserError: for an unsupported family, activation, norm or kind of weights.
    """
    kind = model.config.model_type
    if kind not in FAMILIES:
        raise UserError(
            f"model.kernels=triton supports the families {', '.join(FAMILIES)}, not {kind!r}; use"
            " model.kernels=torch"
        )
    count = 0
    for layer in model.modules():
        if hasattr(layer, "input_layernorm") and hasattr(layer, "self_attn"):
            _fuse_layer(layer, kind)
            count += 1
    return count


def _fuse_layer(layer: Any, kind: str) -> None:
    attention, mlp = layer.self_attn, layer.mlp
    matrices = [_plain_weight(getattr(attention, name), kind) for name in _PROJECTIONS]
    projections = _Projections(layer.input_layernorm, matrices)
    gated = _GatedUnit(
        layer.post_attention_layernorm,
        _plain_weight(mlp.gate_proj, kind),
        _plain_weight(mlp.up_proj, kind),
        mlp.down_proj,
    )
    if not isinstance(mlp.act_fn, nn.SiLU) and "silu" not in type(mlp.act_fn).__name__.lower():
        raise UserError(
            f"model.kernels=triton computes SwiGLU, but this {kind} model's activation is"
            f" {type(mlp.act_fn).__name__}; use model.kernels=torch"
        )
    for index, name in enumerate(_PROJECTIONS):
        _put(attention, name, _Projection(projections, index))
    _put(layer, "mlp", gated)
    for name in ("input_layernorm", "post_attention_layernorm"):
        _put(layer, name, nn.Identity())


def _plain_weight(linear: Any, kind: str) -> Tensor:
    """The weight of an unquantised linear layer without a bias; others are refused."""
    weight: Any = getattr(linear, "weight", None)
    plain = isinstance(linear, nn.Linear) and linear.bias is None and weight is not None
    if not plain or type(weight.data) is not Tensor or not weight.is_contiguous():
        raise UserError(
            f"model.kernels=triton needs plain weights without biases, but this {kind} model has"
            " biased, quantised or transposed ones; use model.kernels=torch"
        )
    checked: Tensor = weight
    return checked


def _put(parent: nn.Module, name: str, child: nn.Module) -> None:
    """Replaces a child, also in the ``__dict__`` entry that ``specdec.models.shortcuts`` adds."""
    parent._modules[name] = child
    parent.__dict__[name] = child


def _norm(module: Any) -> tuple[Tensor, float]:
    """Weight and epsilon of a root-mean-square norm; other functions are refused."""
    weight, eps = module.weight, getattr(module, "variance_epsilon", getattr(module, "eps", None))
    sample = torch.linspace(-2, 2, len(weight), device=weight.device, dtype=weight.dtype)[None]
    if isinstance(eps, float):
        expected = torch.rms_norm(sample, weight.shape, weight, eps)
        if (module(sample) - expected).abs().max() <= _TOLERANCE * expected.abs().max():
            return weight, eps
    raise UserError(
        f"model.kernels=triton supports plain root-mean-square norms, not {type(module).__name__};"
        " use model.kernels=torch"
    )


class _Projections:
    """Norm and q/k/v projections of a layer in one launch, which the call for q triggers."""

    def __init__(self, norm: nn.Module, matrices: list[Tensor]) -> None:
        self.weight, self.eps = _norm(norm)
        self.matrices = matrices
        self.sizes = [len(matrix) for matrix in matrices]
        self._input: Tensor | None = None
        self._outputs: tuple[Tensor, ...] = ()

    def output(self, hidden: Tensor, index: int) -> Tensor:
        """Projection ``index`` of the norm of ``hidden``, [..., E]."""
        if self._input is not hidden:
            flat = norm_projection(
                hidden.flatten(0, -2), self.weight, self.matrices, self.eps
            ).unflatten(0, hidden.shape[:-1])
            self._input, self._outputs = hidden, flat.split(self.sizes, -1)
        output = self._outputs[index]
        if index == len(self.sizes) - 1:  # the last of the three: frees the results
            self._input, self._outputs = None, ()
        return output


class _Projection(nn.Module):
    """One of the three projections of the same input."""

    def __init__(self, shared: _Projections, index: int) -> None:
        super().__init__()
        self._shared = shared
        self._index = index

    def forward(self, hidden: Tensor) -> Tensor:
        return self._shared.output(hidden, self._index)


class _GatedUnit(nn.Module):
    """Norm, gate and up projections and their product in one launch, then the down projection."""

    def __init__(self, norm: nn.Module, gate: Tensor, up: Tensor, down: nn.Module) -> None:
        super().__init__()
        self._norm_weight, self._eps = _norm(norm)
        self._gate, self._up = gate, up
        self.down_proj = down

    def forward(self, hidden: Tensor) -> Tensor:
        inner = swiglu(
            hidden.flatten(0, -2), self._gate, self._up, norm=self._norm_weight, eps=self._eps
        )
        output: Tensor = self.down_proj(inner.unflatten(0, hidden.shape[:-1]))
        return output
