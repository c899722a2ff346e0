"""Chains of most probable tokens in one call of ONNX Runtime.

One graph is several passes of a draft model, of which each reads the token that the one before
found most probable: all passes of a chain run without Python in between. Its weights are read as
they lie in memory, by all sessions and passes; packed copies per pass would take the caches from
each other.

Shape letters: R rows of the first pass, S passes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
from torch import nn
from transformers import PreTrainedModel

from specdec.attention.kv_cache import Rows
from specdec.attention.tree_attention import ScoreOptions
from specdec.models.onnx_graph import Graph, GraphWriter
from specdec.models.onnx_session import Array, Bindings, Memory, new_session
from specdec.models.slicing import final_norm, layers_name
from specdec.sampling.filters import check_finite
from specdec.types import FloatArray, IntArray

MAX_FIRST_ROWS = 4
"""Largest R: without packed weights, passes over many rows take longer than others."""

_MAX_PASSES = 8  # of one graph; longer chains take several calls
_LAST = [-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class BestChain:
    """A chain of most probable tokens.

    Attributes:
        tokens: int64[S].
        logprobs: float64[S], at most 0.
        seconds: inside calls, and to set their inputs.
    """

    tokens: IntArray
    logprobs: FloatArray
    seconds: float


def build_chain_graph(
    model: PreTrainedModel,
    options: Mapping[int, ScoreOptions],
    num_passes: int,
    weights: dict[str, Array],
) -> Graph:
    """Writes passes of a whole model, each over the token after the pass before, as one graph.

    Inputs: tokens and positions_0 int64[1, R], positions_1 and so on int64[1, 1], the slots of
    every pass, and temperature float32[1]. Outputs per pass: the token int64[1, 1], of equal ones
    the first; its log-probability float32[1, 1, 1] at the temperature.

    Every pass writes to the caches that the next one reads as inputs. ONNX Runtime does not know
    that they are the same memory, but the order is right: a pass needs the token of the one before,
    and so the results of all its layers.

    Args:
        model: the whole model, without sliding windows.
        options: layer -> scaling of its attention.
        num_passes: S.
        weights: of earlier graphs of this model, which are read again; new ones are added.
    """
    config, rotary = model.config.get_text_config(), model.base_model.rotary_emb
    writer = GraphWriter(config, rotary, options, weights=weights, masked=False)  # type: ignore[arg-type]
    table = writer.weight("embeddings", model.get_input_embeddings().weight)
    output = model.get_output_embeddings()
    assert isinstance(output, nn.Linear)
    token = writer.declare_indices("tokens", [1, "R"])
    temperature = writer.declare_floats("temperature", [1])
    for number in range(num_passes):
        writer.suffix = f"_{number}"
        writer.declare_rows(1 if number else "R")
        stream, update = writer.op("Gather", table, token), None
        for index, layer in enumerate(model.get_submodule(layers_name(model))):  # type: ignore[arg-type]
            stream, update = writer.layer(index, layer, stream, update)
        normed, _ = writer.norm(final_norm(model), stream, update)
        if not number:
            normed = writer.op("Gather", normed, writer.constant("last", _LAST), axis=1)
        logits = writer.linear("output", [output], normed)
        best = writer.op("ArgMax", logits, axis=-1)  # [1, 1, 1]
        scores = writer.op("LogSoftmax", writer.op("Div", logits, temperature), axis=-1)
        found = writer.op("GatherElements", scores, best, axis=-1)
        token = writer.op("Squeeze", best, writer.constant("last", _LAST))
        writer.output(f"logprob_{number}", found, [1, 1, 1])
        writer.output_indices(f"token_{number}", token, [1, 1])
    return writer.finish()


class OnnxChains:
    """Drafts chains of one model; sessions are made at the first call of each length.

    They share one copy of the weights, beside that of ``OnnxPasses``.
    """

    def __init__(self, model: PreTrainedModel, options: Mapping[int, ScoreOptions]) -> None:
        """Makes no session yet; arguments as of ``build_chain_graph``."""
        self._model, self._options = model, options
        self._weights: dict[str, Array] = {}
        self._sessions: dict[int, tuple[Any, Bindings]] = {}  # by the number of passes
        self._memories: dict[tuple[int, int], _Memory] = {}

    def run(self, rows: Rows, num_first: int, temperature: float) -> BestChain:
        """Runs a pass over the first rows, and one over each of the others.

        Args:
            rows: each of which sees all slots before its own. The tokens of the first R are known,
                the others are written here.
            num_first: R, from 1 to ``MAX_FIRST_ROWS``.
            temperature: of the log-probabilities.

        Raises:
            ValueError: for logits that are not finite.
        """
        began = perf_counter()
        keys_values, done = rows.cache.buffers(rows)
        tokens: list[int] = []
        logprobs: list[float] = []
        num_passes, first, start = len(rows) - num_first + 1, num_first, 0
        while (left := num_passes - len(tokens)) > 0:
            num = min(left, _MAX_PASSES)
            session, bindings = self._sessions.get(num) or self._new_session(num)
            memory = self._memories.get((first, num)) or self._new_memory(first, num)
            stop = start + first
            memory.tokens[0] = tokens[-1] if tokens else rows.tokens[:first]
            memory.positions[:] = rows.positions[start : stop + num - 1]
            np.add(memory.steps, rows.start + stop - 1, out=memory.slots)
            memory.temperature[0] = temperature
            session.run_with_iobinding(bindings.of(rows.cache, keys_values, memory))
            tokens += memory.found.tolist()
            logprobs += memory.logprobs.tolist()
            start, first = stop + num - 1, 1
        rows.tokens[num_first:] = tokens[:-1]
        done()
        scores = np.array(logprobs)
        check_finite(scores)
        return BestChain(
            tokens=np.array(tokens),
            logprobs=np.minimum(scores, 0.0, out=scores),
            seconds=perf_counter() - began,
        )

    def _new_session(self, num_passes: int) -> tuple[Any, Bindings]:
        graph = build_chain_graph(self._model, self._options, num_passes, self._weights)
        session = new_session(graph, prepack=False)
        bindings = Bindings(session, [f"_{number}" for number in range(num_passes)])
        self._sessions[num_passes] = session, bindings
        return session, bindings

    def _new_memory(self, num_first: int, num_passes: int) -> _Memory:
        memory = self._memories[num_first, num_passes] = _Memory(num_first, num_passes)
        return memory


class _Memory(Memory):
    """Arrays of calls of one size; those of the base class are views of them.

    Attributes:
        tokens: int64[1, R].
        positions: int64[R + S - 1], of the rows of all passes.
        slots: int32[S + 1]; a pass has the last slot ``slots[i]``, and ``slots[i + 1]`` in use.
        steps: int32[S + 1], 0 to S.
        temperature: float32[1].
        found, logprobs: int64[S] and float32[S], outputs.
    """

    def __init__(self, num_first: int, num_passes: int) -> None:
        self.tokens = np.zeros((1, num_first), np.int64)
        self.positions = np.zeros(num_first + num_passes - 1, np.int64)
        self.steps = np.arange(num_passes + 1, dtype=np.int32)
        self.slots = self.steps.copy()
        self.temperature = np.ones(1, np.float32)
        self.found = np.zeros(num_passes, np.int64)
        self.logprobs = np.zeros(num_passes, np.float32)
        inputs: dict[str, Array] = {"tokens": self.tokens, "temperature": self.temperature}
        outputs: dict[str, Array] = {}
        for i in range(num_passes):
            last = num_first + i
            inputs[f"positions_{i}"] = self.positions[last - 1 if i else 0 : last][None]
            inputs[f"last_slot_{i}"] = self.slots[i : i + 1]
            inputs[f"num_slots_{i}"] = self.slots[i + 1 : i + 2]
            outputs[f"token_{i}"] = self.found[i : i + 1, None]
            outputs[f"logprob_{i}"] = self.logprobs[i : i + 1, None, None]
        super().__init__(inputs, outputs)
