"""Whole chains of a draft model in one call of ONNX Runtime.

One graph is several passes of a draft model, of which each reads the token that was chosen by the
logits of the one before: all passes of a chain run without Python in between. They read one copy of
the weights, which is not packed: packed ones, per pass, would take the caches from each other.
Every session has its own copy, so that this is for small drafts: with large ones the time between
passes does not count.

Shape letters: R rows of the first pass, S passes, K tokens kept by top-k.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.attention.kv_cache import Rows
from specdec.attention.tree_attention import ScoreOptions
from specdec.device import SupportProbs
from specdec.models.onnx_choices import Choice
from specdec.models.onnx_graph import Graph, GraphWriter
from specdec.models.onnx_session import Array, Bindings, Memory, new_session
from specdec.models.slicing import final_norm, layers_name
from specdec.types import FloatArray, IntArray

MAX_FIRST_ROWS = 4
"""Largest R: without packed weights, passes over many rows take longer than others."""

MAX_BYTES = 256 << 20
"""Weights of all sessions of a model."""

_MAX_PASSES = 8  # of one graph; longer chains take several calls
_RARE = 32  # chains of a length that is no longer than others, before it gets its own session
_CALLS = 64  # sizes and choices whose arrays are kept


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeChain:
    """The tokens of one call.

    Attributes:
        tokens: int64[S].
        logprobs: float64[S], at most 0.
        probs: the distributions [S, V] that the tokens were drawn from; None if they were not.
    """

    tokens: IntArray
    logprobs: FloatArray
    probs: SupportProbs | None


def num_bytes(model: PreTrainedModel) -> int:
    """Bytes of a model's weights in float32, which its graph reads."""
    return sum(4 * parameter.numel() for parameter in model.parameters())


def build_chain_graph(
    model: PreTrainedModel,
    options: Mapping[int, ScoreOptions],
    choice: Choice,
    num_passes: int,
) -> Graph:
    """Writes passes of a whole model, each over the token after the pass before, as one graph.

    Inputs: tokens and positions_0 int64[1, R], positions_1 and so on int64[1, 1], the slots of
    every pass, and those of the choice. Outputs per pass: the token int64[1, 1], and those of the
    choice.

    Every pass writes to the caches that the next one reads as inputs. ONNX Runtime does not know
    that they are the same memory, but the order is right: a pass needs the token of the one before,
    and so the results of all its layers.

    Args:
        model: the whole model, without sliding windows.
        options: layer -> scaling of its attention.
        choice: of the tokens.
        num_passes: S.
    """
    config, rotary = model.config.get_text_config(), model.base_model.rotary_emb
    writer = GraphWriter(config, rotary, options, masked=False)  # type: ignore[arg-type]
    table = writer.weight("embeddings", model.get_input_embeddings().weight)
    output = model.get_output_embeddings()
    assert isinstance(output, nn.Linear)
    token = writer.declare_indices("tokens", [1, "R"])
    choice.declare(writer)
    for number in range(num_passes):
        writer.suffix = f"_{number}"
        writer.declare_rows(1 if number else "R")
        stream, update = writer.op("Gather", table, token), None
        for index, layer in enumerate(model.get_submodule(layers_name(model))):  # type: ignore[arg-type]
            stream, update = writer.layer(index, layer, stream, update)
        normed, _ = writer.norm(final_norm(model), stream, update)
        last = writer.constant("last", [-1])
        if not number:
            normed = writer.op("Gather", normed, last, axis=1)
        chosen = choice.write(writer, writer.linear("output", [output], normed))
        token = writer.op("Squeeze", chosen, last)
        writer.output_indices(f"token_{number}", token, [1, 1])
    return writer.finish()


class OnnxChains:
    """Drafts chains of one model.

    A session is made at the first call of a length that is longer than all before; others take
    several calls at first, because the last chains of requests have many lengths and a session
    takes some 50 ms to make. All have ``MAX_BYTES`` of weights in total; beyond these only sessions
    of one pass are made.
    """

    def __init__(self, model: PreTrainedModel, options: Mapping[int, ScoreOptions]) -> None:
        """Makes no session yet; arguments as of ``build_chain_graph``."""
        self._model, self._options = model, options
        self._vocab_size: int = model.config.get_text_config().vocab_size
        self._max_sessions = MAX_BYTES // num_bytes(model)
        self._sessions: dict[tuple[type[Choice], int], Any] = {}  # by kind and number of passes
        self._calls: dict[tuple[Choice, int, int], _Call] = {}  # by choice, R and S
        self._rare: Counter[tuple[type[Choice], int]] = Counter()  # chains without a session

    def run(
        self,
        rows: Rows,
        num_first: int,
        choice: Choice,
        draws: FloatArray,
        timed: Callable[[float, int], None],
    ) -> WholeChain:
        """Runs a pass over the first rows, and one over each of the others.

        Args:
            rows: each of which sees all slots before its own. The tokens of the first R are known,
                the others are written here.
            num_first: R, from 1 to ``MAX_FIRST_ROWS``.
            choice: of the tokens.
            draws: float64[S], of the tokens; not read where none are drawn.
            timed: called with the seconds and number of the passes.

        Raises:
            ValueError: for logits that are not finite.
        """
        began = perf_counter()
        tokens, outputs = self._run(rows, num_first, choice, draws)
        timed(perf_counter() - began, len(tokens))
        logprobs, probs = choice.read(tokens, outputs, self._vocab_size)
        return WholeChain(tokens=tokens, logprobs=logprobs, probs=probs)

    def _run(
        self, rows: Rows, num_first: int, choice: Choice, draws: FloatArray
    ) -> tuple[IntArray, list[Array]]:
        """Calls for all passes; the tokens, and copies of the choice's outputs [S, ...]."""
        keys_values, done = rows.cache.buffers(rows)
        num_passes, first, start = len(rows) - num_first + 1, num_first, 0
        tokens = np.empty(num_passes, np.int64)
        parts: list[list[Array]] = []
        while start < num_passes:
            num = self._length(type(choice), min(num_passes - start, _MAX_PASSES), not start)
            call = self._calls.get((choice, first, num))
            if call is None:
                call = self._new_call(choice, first, num)
            row, stop = start + num_first - first, start + num  # of the first row, of the passes
            call.tokens[0] = tokens[start - 1] if start else rows.tokens[:first]
            call.positions[:] = rows.positions[row : row + first + num - 1]
            np.add(call.steps, rows.start + row + first - 1, out=call.slots)
            if call.draws is not None:
                call.draws[:] = draws[start:stop]
            call.run(rows, keys_values)
            tokens[start:stop] = call.found
            parts.append([array.copy() for array in call.outputs.values()])
            start, first = stop, 1
        rows.tokens[num_first:] = tokens[:-1]
        done()
        if len(parts) == 1:
            return tokens, parts[0]
        return tokens, [np.concatenate(arrays) for arrays in zip(*parts, strict=True)]

    def _length(self, kind: type[Choice], wanted: int, is_first: bool) -> int:
        """Passes of the next call, which is a chain's first or not; at most ``wanted``."""
        if (kind, wanted) in self._sessions:
            return wanted
        made = [length for of, length in self._sessions if of is kind]
        self._rare[kind, wanted] += is_first
        if len(self._sessions) < self._max_sessions and (
            wanted > max(made, default=0) or self._rare[kind, wanted] > _RARE
        ):
            return wanted
        return max((length for length in made if length < wanted), default=1)

    def _new_call(self, choice: Choice, num_first: int, num_passes: int) -> _Call:
        if len(self._calls) >= _CALLS:
            self._calls.clear()
        key = type(choice), num_passes
        session = self._sessions.get(key)
        if session is None:
            graph = build_chain_graph(self._model, self._options, choice, num_passes)
            session = self._sessions[key] = new_session(graph, prepack=False)
        call = _Call(session, choice, num_first, num_passes)
        self._calls[choice, num_first, num_passes] = call
        return call


class _Call:
    """Calls of one size: arrays, and bindings to them and to caches.

    Attributes:
        tokens: int64[1, R].
        positions: int64[R + S - 1], of the rows of all passes.
        slots: int32[S + 1]; a pass has the last slot ``slots[i]``, and ``slots[i + 1]`` in use.
        steps: int32[S + 1], 0 to S.
        found: int64[S], the tokens.
        draws: float64[S]; None where tokens are not drawn.
        outputs: name -> [S, ...], of the choice.
    """

    def __init__(self, session: Any, choice: Choice, num_first: int, num_passes: int) -> None:
        self.tokens = np.zeros((1, num_first), np.int64)
        self.positions = np.zeros(num_first + num_passes - 1, np.int64)
        self.steps = np.arange(num_passes + 1, dtype=np.int32)
        self.slots = self.steps.copy()
        self.found = np.zeros(num_passes, np.int64)
        self.outputs = choice.outputs(num_passes)
        self.draws = np.zeros(num_passes) if choice.draws else None
        inputs = {"tokens": self.tokens, **choice.shared()}
        outputs: dict[str, Array] = {}
        for i in range(num_passes):
            one, row = slice(i, i + 1), num_first + i
            inputs[f"positions_{i}"] = self.positions[row - 1 if i else 0 : row][None]
            inputs[f"last_slot_{i}"] = self.slots[one]
            inputs[f"num_slots_{i}"] = self.slots[i + 1 : i + 2]
            if self.draws is not None:
                inputs[f"draw_{i}"] = self.draws[one]
            outputs[f"token_{i}"] = self.found[one, None]
            outputs |= {f"{name}_{i}": array[one] for name, array in self.outputs.items()}
        self._session, self._memory = session, Memory(inputs, outputs)
        # Of this size alone: to bind other arrays takes longer than a pass of a small draft.
        self._bindings = Bindings(session, [f"_{i}" for i in range(num_passes)])

    def run(self, rows: Rows, keys_values: Tensor) -> None:
        """Calls the session on the cache of ``rows``, whose memory is ``keys_values``."""
        binding = self._bindings.of(rows.cache, keys_values, self._memory)
        self._session.run_with_iobinding(binding)
