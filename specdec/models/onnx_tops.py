"""Most probable tokens and their log-probabilities in ONNX Runtime, from the logits of a session.

A graph without weights reads the logits where another session has written them. It takes about half
as long as to copy them and to search them in torch and numpy.

Shape letters: A rows, K tokens per row, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from transformers import PreTrainedConfig

from specdec.models.onnx_graph import Graph, GraphWriter
from specdec.models.onnx_session import Array, Memory, new_session
from specdec.sampling.filters import check_finite
from specdec.types import FloatArray, IntArray


def build_tops_graph() -> Graph:
    """Writes the search as a graph.

    Inputs: logits float32[A, V], temperature float32[1] and count int64[1], K <= V. Outputs: tokens
    int64 and logprobs float32[A, K], best first, of equal log-probabilities the lower token id.
    """
    writer = GraphWriter(PreTrainedConfig())
    logits = writer.declare_floats("logits", ["A", "V"])
    temperature = writer.declare_floats("temperature", [1])
    count = writer.declare_indices("count", [1])
    scores = writer.op("LogSoftmax", writer.op("Div", logits, temperature), axis=-1)
    logprobs, tokens = writer.ops("TopK", [scores, count], ["best", "ids"], axis=-1)
    writer.output("logprobs", logprobs, ["A", "K"])
    writer.output_indices("tokens", tokens, ["A", "K"])
    return writer.finish()


class OnnxTops:
    """Reads the logits [1, A, V] of passes out of their ``Memory``."""

    def __init__(self) -> None:
        """Makes the session."""
        self._session = new_session(build_tops_graph())

    def run(self, memory: Memory, k: int, temperature: float) -> tuple[IntArray, FloatArray]:
        """As ``SamplingTransform.top``, up to rounding in float32.

        Args:
            memory: of the latest pass, with an output "logits".
            k: tokens per row, reduced to at most V.
            temperature: 1 if greedy.

        Returns:
            tokens int64[A, K], best first, of equal ones the lower token id; float64[A, K], at
            most 0, their log-probabilities.

        Raises:
            ValueError: for logits that are not finite.
        """
        tops = memory.tops.get(k)
        if tops is None:
            tops = memory.tops[k] = _Tops(self._session, memory.outputs["logits"], k)
        tops.temperature[0] = temperature
        self._session.run_with_iobinding(tops.binding)
        check_finite(tops.logprobs[:, 0])
        return tops.tokens.copy(), np.minimum(tops.logprobs, 0.0, dtype=np.float64)


class _Tops:
    """Arrays and the binding for logits [1, A, V] and one K.

    Attributes:
        tokens, logprobs: int64 and float32[A, K], outputs.
        temperature: float32[1].
    """

    def __init__(self, session: Any, logits: Array, k: int) -> None:
        rows = logits[0]
        shape = len(rows), min(k, rows.shape[1])
        self.tokens, self.logprobs = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
        self.temperature = np.ones(1, np.float32)
        inputs = {"logits": rows, "temperature": self.temperature, "count": np.array(shape[1:])}
        self._memory = Memory(inputs, {"tokens": self.tokens, "logprobs": self.logprobs})
        self.binding = session.io_binding()
        self._memory.bind(self.binding)
