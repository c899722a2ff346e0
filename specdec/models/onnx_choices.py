"""How a graph chooses the next token of a chain from logits: the best one, or by a draw.

Shape letters: S passes, V vocabulary, K kept tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeAlias

import numpy as np

from specdec.device import SupportProbs
from specdec.models.onnx_graph import GraphWriter
from specdec.models.onnx_session import Array
from specdec.sampling.filters import check_finite
from specdec.types import FloatArray, IntArray

MAX_KEPT = 256
"""Largest K for which ``Drawn`` sums weights in the order of ``sampling.host``."""

Arrays: TypeAlias = dict[str, Array]


class Choice(Protocol):
    """Writes the choice into graphs, and makes the arrays that its inputs and outputs need.

    Choices of one class share graphs, equal ones arrays too.

    Attributes:
        draws: whether every pass has an input ``draw``, float64[1].
    """

    draws: ClassVar[bool]

    def declare(self, writer: GraphWriter) -> None:
        """Declares the inputs that all passes share."""

    def write(self, writer: GraphWriter, logits: str) -> str:
        """Writes the choice of one pass, whose names end in ``writer.suffix``.

        Args:
            writer: of the graph.
            logits: float32[1, 1, V].

        Returns:
            Name of the token, int64[1, 1, 1].
        """

    def shared(self) -> Arrays:
        """Name -> array of the inputs that all passes share, with their values."""

    def outputs(self, num_passes: int) -> Arrays:
        """Name without suffix -> array [S, ...] of their outputs besides the token."""

    def read(
        self, tokens: IntArray, outputs: Sequence[Array], vocab_size: int
    ) -> tuple[FloatArray, SupportProbs | None]:
        """Results from copies of the outputs.

        Args:
            tokens: int64[S], chosen.
            outputs: as of ``outputs``, in its order.
            vocab_size: V.

        Returns:
            float64[S], log-probabilities of the tokens; the distributions [S, V] that they were
            drawn from, if they were.

        Raises:
            ValueError: for logits that were not finite.
        """


@dataclass(frozen=True, slots=True)
class Best:
    """The most probable token, of equal ones the first, and its log-probability.

    Attributes:
        temperature: of the log-probability, above 0.
    """

    draws: ClassVar[bool] = False
    temperature: float

    def declare(self, writer: GraphWriter) -> None:
        """The temperature, float32[1]."""
        writer.declare_floats("temperature", [1])

    def write(self, writer: GraphWriter, logits: str) -> str:
        """See ``Choice``; outputs ``logprob`` float32[1, 1, 1]."""
        best = writer.op("ArgMax", logits, axis=-1)
        scores = writer.op("LogSoftmax", writer.op("Div", logits, "temperature"), axis=-1)
        found = writer.op("GatherElements", scores, best, axis=-1)
        writer.output(f"logprob{writer.suffix}", found, [1, 1, 1])
        return best

    def shared(self) -> Arrays:
        """The temperature."""
        return {"temperature": np.full(1, self.temperature, np.float32)}

    def outputs(self, num_passes: int) -> Arrays:
        """``logprob``."""
        return {"logprob": np.zeros((num_passes, 1, 1), np.float32)}

    def read(
        self,
        tokens: IntArray,
        outputs: Sequence[Array],
        vocab_size: int,
    ) -> tuple[FloatArray, None]:
        """See ``Choice``."""
        (logprobs,) = outputs
        check_finite(logprobs)
        return np.minimum(logprobs[:, 0, 0], 0.0, dtype=np.float64), None


@dataclass(frozen=True, slots=True)
class Drawn:
    """A token drawn by inverse CDF from the K most probable ones, cut by top-p.

    The weights are float64. They equal those of ``sampling.host`` up to rounding, except that of
    tokens that tie at a cut some may be missing: rejection sampling is lossless for any weights, as
    long as the token was drawn from them.

    Attributes:
        temperature: above 0.
        top_k: K, from 1 to V.
        top_p: 1 keeps all K.
    """

    draws: ClassVar[bool] = True
    temperature: float
    top_k: int
    top_p: float

    def declare(self, writer: GraphWriter) -> None:
        """Temperature and the share that is cut, float64[1]; the number of tokens, int64[1]."""
        writer.declare_doubles("temperature", [1])
        writer.declare_doubles("cut_share", [1])
        writer.declare_indices("count", [1])

    def write(self, writer: GraphWriter, logits: str) -> str:
        """See ``Choice``; input ``draw`` float64[1], outputs ``ids`` and ``weights`` [1, 1, K]."""
        op, suffix = writer.op, writer.suffix
        last = writer.constant("last", [-1])
        draw = writer.declare_doubles(f"draw{suffix}", [1])
        names = [f"top{suffix}", f"top_ids{suffix}"]
        values, ids = writer.ops("TopK", [logits, "count"], names, axis=-1)
        weights = op("Softmax", op("Div", writer.to_double(values), "temperature"), axis=-1)
        # The mass of a token and all that are less probable, summed from the least probable one.
        mass = op("CumSum", weights, last, reverse=1)
        weights = op("Mul", weights, writer.to_double(op("Greater", mass, "cut_share")))
        names = [f"ids_in_order{suffix}", f"order{suffix}"]
        ids, order = writer.ops("TopK", [ids, "count"], names, axis=-1, largest=0)
        weights = op("GatherElements", weights, order, axis=-1)
        cdf = op("CumSum", weights, last)
        threshold = op("Mul", op("Gather", cdf, last, axis=-1), draw)
        above = writer.to_double(op("Greater", cdf, threshold))
        column = op("ArgMax", above, axis=-1)  # the first of the largest: of those above
        writer.output_indices(f"ids{suffix}", ids, [1, 1, "K"])
        writer.output_doubles(f"weights{suffix}", weights, [1, 1, "K"])
        return op("GatherElements", ids, column, axis=-1)

    def shared(self) -> Arrays:
        """Temperature, cut share and count."""
        return {
            "temperature": np.full(1, self.temperature),
            "cut_share": np.full(1, 1.0 - self.top_p),
            "count": np.array([self.top_k]),
        }

    def outputs(self, num_passes: int) -> Arrays:
        """``ids`` and ``weights``."""
        shape = num_passes, 1, self.top_k
        return {"ids": np.zeros(shape, np.int64), "weights": np.zeros(shape)}

    def read(
        self, tokens: IntArray, outputs: Sequence[Array], vocab_size: int
    ) -> tuple[FloatArray, SupportProbs]:
        """See ``Choice``."""
        ids, weights = (array[:, 0] for array in outputs)
        total = weights.cumsum(axis=1)[:, -1:]
        check_finite(total)
        probs = weights / total
        logprobs = np.log(probs[ids == tokens[:, None]])
        return logprobs, SupportProbs(ids, probs, vocab_size)
