"""Medusa heads in ONNX Runtime, on a CPU (``model.backend=onnx``).

Heads keep no cache: a pass is norm, block and output matrix over the rows of all requests. Heads
that share the target's output matrix share one session for it, so that ONNX Runtime keeps one copy
of the matrix.

Shape letters: R rows, E hidden size, V vocabulary, K heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.errors import UserError
from specdec.models.onnx_graph import Graph, GraphWriter
from specdec.models.onnx_session import new_session, problem


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadWeights:
    """The weights of one head.

    Attributes:
        norm: root-mean-square norm of the hidden state.
        block: [E, E]; None: no block.
        output: [V, E]; None: the target's output head.
    """

    norm: nn.Module
    block: Tensor | None
    output: Tensor | None


class OnnxMedusa:
    """Runs Medusa heads, one at a time."""

    def __init__(self, target: PreTrainedModel, heads: Sequence[HeadWeights]) -> None:
        """Builds the graphs and the sessions.

        Args:
            target: the model whose hidden states they read.
            heads: at least one.

        Raises:
            UserError: for a target that graphs do not support.
        """
        config, weight = target.config.get_text_config(), target.get_output_embeddings().weight
        reason = problem(config, weight.dtype, weight.device)
        if reason:
            raise UserError(
                f"model.backend=onnx cannot run Medusa heads: {reason}; use model.backend=eager"
            )
        self._heads = [_Session(_head_graph(target, head)) for head in heads]
        self._has_output = [head.output is not None for head in heads]
        self._output = None if all(self._has_output) else _Session(_output_graph(target))

    def logits(self, number: int, hidden: Tensor) -> Tensor:
        """[R, V] of head ``number``, 1 .. K, from hidden [R, E] on the host, R >= 1."""
        found = self._heads[number - 1].run(hidden.numpy())
        if not self._has_output[number - 1]:
            assert self._output is not None, "a head has an output matrix, or shares the target's"
            found = self._output.run(found)
        return torch.from_numpy(found)


def _head_graph(target: PreTrainedModel, head: HeadWeights) -> Graph:
    """From ``hidden`` [R, E] to the head's logits [R, V], or to what the target's head reads."""
    writer = GraphWriter(target.config.get_text_config())
    size = target.config.get_text_config().hidden_size
    value, _ = writer.norm(head.norm, writer.declare_floats("hidden", ["R", size]), None)
    if head.block is not None:
        product = writer.op("MatMul", value, writer.weight("block", head.block.T))
        # SiLU: QuickGelu with factor 1.
        gate = writer.op("QuickGelu", product, domain="com.microsoft", alpha=1.0)
        value = writer.op("Add", value, gate)
    if head.output is not None:
        value = writer.op("MatMul", value, writer.weight("output", head.output.T))
    writer.output("result", value, ["R", "size"])
    return writer.finish()


def _output_graph(target: PreTrainedModel) -> Graph:
    """The target's output head."""
    writer = GraphWriter(target.config.get_text_config())
    size = target.config.get_text_config().hidden_size
    output = target.get_output_embeddings()
    assert isinstance(output, nn.Linear)
    value = writer.linear("output", [output], writer.declare_floats("hidden", ["R", size]))
    writer.output("result", value, ["R", "V"])
    return writer.finish()


class _Session:
    """A session from ``hidden`` to ``result``."""

    def __init__(self, graph: Graph) -> None:
        self._session = new_session(graph)

    def run(self, hidden: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        inputs: Mapping[str, Any] = {"hidden": hidden}
        found: np.ndarray[Any, Any] = self._session.run(["result"], inputs)[0]
        return found
