"""Passes of EAGLE and Medusa heads in ONNX Runtime, on a CPU (``model.backend=onnx``).

For an EAGLE head, one session call computes logits of one request's rows from the target's features
or the head's own outputs. Adjacent rows of one cache share a call: those that recompute or extend
its prefix, and tree nodes. Medusa heads have no cache: a pass applies norm, block and output matrix
to the rows of all requests; heads that use the target's output matrix share one session for it, so
that ONNX Runtime stores one copy of the matrix.

Shape letters: R rows of a pass, A rows whose logits are computed, E hidden size, S feature size, U
draft vocabulary, V vocabulary, K heads.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.attention.tree_attention import CacheSpec, Rows, ScoreOptions
from specdec.errors import UserError
from specdec.models.eagle import EagleHead
from specdec.models.exits import spread
from specdec.models.medusa import MedusaHead
from specdec.models.onnx.graph import BOOL, Graph, GraphWriter
from specdec.models.onnx.session import Array, CacheSession, new_session
from specdec.models.onnx.support import problem
from specdec.types import IntArray


def build_head_graph(head: EagleHead, bits: int | None = None) -> Graph:
    """Writes a pass of an EAGLE head as an ONNX graph; ``problem`` must accept its config. Matrices
    are quantised to ``bits`` per weight; None leaves float32.

    Inputs: tokens and positions int64[1, R]; features [1, R, S] of the target; own [1, R, E], the
    head's outputs; is_feature bool[R, 1], which of the two a row reads; logits_rows int64[A]; and
    masks and the cache. Outputs: states [1, R, E], logits [1, A, U], the cache.
    """
    config = head.config
    options = dict.fromkeys(range(len(head.layers)), ScoreOptions())
    writer = GraphWriter(config.layer, head.rotary, options, bits)
    table = writer.weight("embeddings", head.embedding)
    embedded = writer.op("Gather", table, writer.declare_indices("tokens", [1, "R"]))
    fused = _fused(writer, head, writer.declare_floats("features", [1, "R", config.feature_size]))
    own = writer.declare_floats("own", [1, "R", config.layer.hidden_size])
    is_feature = writer.declare(writer.inputs, "is_feature", BOOL, ["R", 1])
    stream = writer.op("Where", is_feature, fused, own)
    writer.declare_rows()
    if config.version == 1:
        stream = writer.linear("fc", [head.fc], writer.op("Concat", embedded, stream, axis=-1))
    for index, layer in enumerate(head.layers):
        stream = _layer(writer, index, layer, stream, embedded)
    rows = writer.declare_indices("logits_rows", ["A"])
    normed = stream
    if config.version == 3:
        normed, _ = writer.norm(head.norm, stream, None)
    chosen = writer.op("Gather", normed, rows, axis=1)
    fed_back = normed if config.norm_output else stream
    writer.output("states", fed_back, ["one", "R", "E"])
    output = head.output
    assert isinstance(output, nn.Linear)
    writer.output("logits", writer.linear("output", [output], chosen), ["one", "A", "U"])
    return writer.finish()


def _fused(writer: GraphWriter, head: EagleHead, features: str) -> str:
    config = head.config
    if config.version == 1:
        return features
    if config.fc_norm:
        streams = writer.split(features, [config.target_hidden_size] * len(config.layers))
        normed = [
            writer.norm(norm, s, None)[0] for norm, s in zip(head.fc_norm, streams, strict=True)
        ]
        features = writer.op("Concat", *normed, axis=-1)
    if config.norm_before_fc:
        features, _ = writer.norm(head.input_norm, features, None)
    return writer.linear("fc", [head.fc], features)


def _layer(writer: GraphWriter, index: int, layer: Any, stream: str, embedded: str) -> str:
    residual = inputs = stream
    if layer.first:
        normed, _ = writer.norm(layer.hidden_norm, stream, None)
        residual = normed if layer.norm_before_residual else stream
        token, _ = writer.norm(layer.input_layernorm, embedded, None)
        inputs = writer.op("Concat", token, normed, axis=-1)
    elif not isinstance(layer.input_layernorm, nn.Identity):
        inputs, _ = writer.norm(layer.input_layernorm, stream, None)
    attended = writer.attention(index, layer.self_attn, inputs)
    update = writer.linear(f"{index}.o", [layer.self_attn.o_proj], attended)
    normed, stream = writer.norm(layer.post_attention_layernorm, residual, update)
    return writer.op("Add", stream, writer.mlp(index, layer.mlp, normed))


class OnnxHead:
    def __init__(self, head: EagleHead, spec: CacheSpec, bits: int | None = None) -> None:
        config = head.config
        reason = problem(config.layer, spec.dtype, spec.device)
        if reason:
            raise UserError(
                f"model.backend=onnx cannot run this EAGLE head: {reason}; use model.backend=eager"
            )
        self._feature_size, self._hidden_size = config.feature_size, config.layer.hidden_size
        self._draft_vocab_size = config.draft_vocab_size
        graph = build_head_graph(head, bits)
        # Read by a pass: all but the embedding, of which it reads rows.
        self.weight_bytes = sum(w.nbytes for n, w in graph.weights.items() if n != "embeddings")
        self._session = CacheSession(graph, [None])

    def run(
        self,
        rows: Sequence[Rows],
        features: Tensor,
        feature_rows: IntArray,
        states: Tensor,
        logits_rows: IntArray,
    ) -> tuple[Tensor, Tensor]:
        """Returns states [R, E] and logits [A, U]; arguments are as in ``EagleRunner.forward``."""
        num_rows = sum(map(len, rows))
        is_feature = np.zeros(num_rows, np.bool_)
        is_feature[feature_rows] = True
        # The graph maps a row's feature and its parent's output, of which one is zeros.
        given = np.zeros((num_rows, self._feature_size), np.float32)
        own = np.zeros((num_rows, self._hidden_size), np.float32)
        if len(features):
            given[feature_rows] = features.numpy()
        if len(states):
            own[~is_feature] = states.numpy()
        found, start = [], 0
        for part in _joined(rows):
            stop = start + len(part)
            chosen = logits_rows[(logits_rows >= start) & (logits_rows < stop)] - start
            inputs: dict[str, Array] = {
                "tokens": part.tokens[None],
                "features": given[None, start:stop],
                "own": own[None, start:stop],
                "is_feature": is_feature[start:stop, None],
                # At least one row: graphs with none are not tested.
                "logits_rows": chosen if len(chosen) else np.zeros(1, np.int64),
            }
            shapes = {
                "states": (1, len(part), self._hidden_size),
                "logits": (1, max(len(chosen), 1), self._draft_vocab_size),
            }
            outputs, logits = self._session.run(part, inputs, shapes)
            found.append((outputs, logits[: len(chosen)]))
            start = stop
        if len(found) == 1:
            return found[0]
        all_states, all_logits = zip(*found, strict=True)
        return torch.cat(all_states), torch.cat(all_logits)


def _joined(rows: Sequence[Rows]) -> Iterator[Rows]:
    joined: Rows | None = None
    for part in rows:
        if not len(part):
            continue
        if joined is None or joined.cache is not part.cache or joined.end != part.start:
            if joined is not None:
                yield joined
            joined = part
            continue
        size, first = len(joined), joined.first_masked
        visible = np.zeros((size + len(part), part.end - first), np.bool_)
        visible[:size, : joined.end - first] = joined.visible
        visible[size:, : part.first_masked - first] = True
        visible[size:, part.first_masked - first :] = part.visible
        joined = replace(
            joined,
            tokens=np.concatenate([joined.tokens, part.tokens]),
            positions=np.concatenate([joined.positions, part.positions]),
            node_ids=np.concatenate([joined.node_ids, part.node_ids]),
            num_prefix=joined.num_prefix + part.num_prefix,
            visible=visible,
        )
    if joined is not None:
        yield joined


# Medusa.


class OnnxMedusa:
    def __init__(self, target: PreTrainedModel, heads: Sequence[MedusaHead]) -> None:
        config, weight = target.config.get_text_config(), target.get_output_embeddings().weight
        reason = problem(config, weight.dtype, weight.device)
        if reason:
            raise UserError(
                f"model.backend=onnx cannot run Medusa heads: {reason}; use model.backend=eager"
            )
        self._sessions = [new_session(_head_graph(target, head)) for head in heads]
        shared = any(head.output is None for head in heads)
        self._output = new_session(_output_graph(target)) if shared else None
        self._heads = heads

    def logits(self, number: int, hidden: Tensor) -> Tensor:
        """Returns logits [R, V], R >= 1, of head ``number`` (1 .. K) for states [R, E] on a CPU."""
        head, session = self._heads[number - 1], self._sessions[number - 1]
        found = _run(session, hidden.numpy())
        if head.output is None:
            found = _run(self._output, found)
        return spread(torch.from_numpy(found), head.ids, head.vocab_size)


def _head_graph(target: PreTrainedModel, head: MedusaHead) -> Graph:
    """Builds the graph of a Medusa head; a target's output matrix is not part of it."""
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
    writer = GraphWriter(target.config.get_text_config())
    size = target.config.get_text_config().hidden_size
    output = target.get_output_embeddings()
    assert isinstance(output, nn.Linear)
    value = writer.linear("output", [output], writer.declare_floats("hidden", ["R", size]))
    writer.output("result", value, ["R", "V"])
    return writer.finish()


def _run(session: Any, hidden: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    found: np.ndarray[Any, Any] = session.run(["result"], {"hidden": hidden})[0]
    return found
