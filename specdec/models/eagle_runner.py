"""Incremental passes of an EAGLE head over this library's caches.

An entry of the head's cache comes from the token at position p and the hidden state of position
p - 1. It has position p - 1 in the cache, so the cache begins with the sequence's second token.

Shape letters: R rows of a pass, F of them whose state is a feature of the target, A rows whose
logits are computed, E hidden size, S feature size, U draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from specdec.attention.backends import Attention, attention_kernel
from specdec.attention.tree_attention import AttentionPlan, CacheSpec, Rows, ScoreOptions, TreeCache
from specdec.clocks.meter import Meter
from specdec.device import to_device
from specdec.models.eagle import EagleHead
from specdec.models.mtp import MtpHead, mtp_head
from specdec.models.runner import backend_module, refuse_wrong
from specdec.types import HiddenName, IntArray, TreeRows

METER_NAME = "eagle"


@dataclass(frozen=True, slots=True)
class HeadOutput:
    """Results of one pass: ``states`` [R, E], inputs of child rows, and draft ``logits`` [A, U]."""

    states: Tensor
    logits: Tensor


class EagleRunner:
    """Runs a copy of a head over the rows of one or more requests.

    ``weight_bytes``: bytes of weights that a pass reads. An output matrix shared with the target
    counts, the embedding does not.
    """

    def __init__(
        self,
        head: EagleHead | MtpHead,
        *,
        meter: Meter,
        attention: str = Attention.DENSE,
        backend: str = "eager",
        bits: int | None = None,
    ) -> None:
        """Wraps a head in evaluation mode, whose weights must not change later. If ``backend`` is
        "onnx", raises UserError if results for a few tokens differ from PyTorch's, then quantises
        the weights to ``bits`` unless it is None; this can change only drafts and is not compared.
        """
        weight, config = head.fc.weight, head.config
        self.head = head.shared_copy()
        self._meter = meter
        self.device = weight.device
        self._kernel = attention_kernel(attention, self.device, weight.dtype)
        self.spec = CacheSpec(
            num_layers=config.layer.num_hidden_layers,
            num_kv_heads=config.layer.num_key_value_heads,
            head_dim=config.layer.head_dim,
            dtype=weight.dtype,
            device=self.device,
        )
        self.max_positions = config.layer.max_position_embeddings
        self.weight_bytes = head.shared_output_bytes + sum(
            p.nbytes for name, p in head.named_parameters() if not name.startswith("embed_tokens.")
        )
        self._onnx: Any = None
        if backend == "onnx":
            heads = backend_module("specdec.models.onnx.heads")
            self._onnx = heads.OnnxHead(self.head, self.spec)
            self._compare()
            if bits is not None:
                self._onnx = heads.OnnxHead(self.head, self.spec, bits)
                self.weight_bytes = self._onnx.weight_bytes

    @classmethod
    def from_pair(cls, pair: Any, *, version: Literal[1, 3, "mtp"], meter: Meter) -> EagleRunner:
        """Wraps ``HuggingFacePair.eagle_head`` or, for version "mtp", the target's MTP layer."""
        if version == "mtp":
            return cls(mtp_head(pair), meter=meter, attention=pair.attention)
        head = pair.eagle_head(version)
        backend = pair.backend_of(head.config.layer)
        bits = pair.options.head_bits
        return cls(head, meter=meter, attention=pair.attention, backend=backend, bits=bits)

    @property
    def names(self) -> tuple[HiddenName, ...]:
        return self.head.config.names

    @property
    def vocab_size(self) -> int:
        return self.head.config.layer.vocab_size

    @property
    def target_ids(self) -> Tensor | None:
        """Returns the target's id of each draft token, int64[U]; None if the ids are the same."""
        return self.head.target_ids

    def target_logits(self, logits: Tensor) -> Tensor:
        return self.head.target_logits(logits)

    def new_cache(self, capacity: int) -> TreeCache:
        return TreeCache(spec=self.spec, capacity=capacity)

    def forward(
        self,
        rows: Sequence[Rows],
        *,
        features: Tensor,
        feature_rows: IntArray,
        states: Tensor,
        logits_rows: IntArray,
    ) -> HeadOutput:
        """Runs one packed pass and fills the caches.

        Args:
            rows: results of ``TreeCache.rows`` or ``rewritten``; of two for the same cache, the
                later one sees the rows of the earlier one.
            features: [F, S], the target's hidden states of the position before each of F rows.
            feature_rows: int64[F], packed indices of these F rows, increasing.
            states: [R - F, E], the head's output at the parent of each other row, in packed order.
            logits_rows: int64[A], packed indices of rows that need logits, increasing.
        """
        run = self._run_eager if self._onnx is None else self._onnx.run
        with torch.inference_mode(), self._meter.model(METER_NAME, self.device):
            return HeadOutput(*run(rows, features, feature_rows, states, logits_rows))

    def _run_eager(
        self,
        rows: Sequence[Rows],
        features: Tensor,
        feature_rows: IntArray,
        states: Tensor,
        logits_rows: IntArray,
    ) -> tuple[Tensor, Tensor]:
        tokens = np.concatenate([part.tokens for part in rows])
        positions = np.concatenate([part.positions for part in rows])
        step = AttentionPlan(rows=rows, first_layer=0, kernel=self._kernel)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            step.cache.update(key, value, layer)
            return step.attend(query, key, value, ScoreOptions())

        ids, places = (to_device(array, self.device)[None] for array in (tokens, positions))
        inputs = self._inputs(len(tokens), features, feature_rows, states)
        outputs = self.head(ids, inputs[None], places, attend)[0]
        kept = outputs[to_device(logits_rows, self.device)]
        return self.head.fed_back(outputs), self.head.logits(kept)

    def _inputs(
        self, num_rows: int, features: Tensor, feature_rows: IntArray, states: Tensor
    ) -> Tensor:
        if not len(feature_rows):
            return states
        fused = self.head.states(features.to(self.device, self.spec.dtype))
        if len(feature_rows) == num_rows:
            return fused
        own_rows = np.setdiff1d(np.arange(num_rows), feature_rows)
        order = np.concatenate([feature_rows, own_rows]).argsort()
        return torch.cat([fused, states])[to_device(order, self.device)]

    def _compare(self) -> None:
        generator = torch.Generator().manual_seed(0)
        features = torch.randn(7, self.head.config.feature_size, generator=generator)
        states = torch.randn(3, self.head.config.layer.hidden_size, generator=generator)
        places = np.arange(4)
        results: list[Tensor] = []
        with torch.inference_mode():
            for way in (self._onnx.run, self._run_eager):
                cache = self.new_cache(8)
                prompt = cache.rows(prefix_tokens=places)
                results += way([prompt], features[:4], places, states[:0], places[3:])
                corrected = rewritten(cache, places[2:], 2)
                tree = TreeRows.within(
                    prefix_len=4,
                    node_ids=places,
                    tokens=4 + places,
                    parent_ids=np.maximum(-1, places - 2),  # two roots, and a child of each
                )
                nodes = cache.rows(tree=tree)
                with_feature, wanted = places[:3], 2 + places
                results += way([corrected, nodes], features[4:], with_feature, states, wanted)
        refuse_wrong(results[:4], results[4:], "EAGLE head")


def rewritten(cache: TreeCache, tokens: IntArray, start: int) -> Rows:
    """Returns rows that compute R entries of a cache's prefix again, in place, from slot ``start``
    on; ``tokens``, int64[R], are the tokens of these entries.
    """
    num = len(tokens)
    assert start + num <= cache.cached_len, "only entries of the prefix can be computed again"
    return Rows(
        cache=cache,
        tokens=tokens,
        positions=np.arange(start, start + num),
        node_ids=np.zeros(0, np.int64),
        num_prefix=num,
        start=start,
        first_masked=start,
        visible=np.tri(num, dtype=np.bool_),
    )
