"""Forward passes of a model, or of a slice of its layers, over this library's caches.

Shape letters: R rows of one request, A rows whose logits are computed, E hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.attention.backends import Attention
from specdec.attention.kv_cache import Rows, TreeCache
from specdec.attention.kv_storage import BlockPool, Paged
from specdec.clocks.meter import Meter
from specdec.device import model_call
from specdec.models.backends.factory import make_backend, replace_modules
from specdec.models.backends.interface import ModelSlice, RunnerOutput
from specdec.models.execution import PLAIN, Execution
from specdec.models.probe import probed
from specdec.models.slicing import check_slice, layers_name, slice_model
from specdec.types import HiddenName, IntArray

if TYPE_CHECKING:
    from specdec.tensor_parallel.collective import Collective

NO_ROWS: IntArray = np.zeros(0, np.int64)
"""``logits_rows`` of a pass without logits, such as prefill."""


class ModelRunner:
    """Runs layers ``first_layer .. last_layer - 1`` of a model; ``name`` labels its passes in the
    meter.

    ``is_first`` and ``is_last`` say whether they follow the embeddings and precede the output head.
    """

    def __init__(
        self,
        *,
        model: PreTrainedModel,
        name: str,
        meter: Meter,
        first_layer: int = 0,
        last_layer: int | None = None,
        capture: Sequence[HiddenName] = (),
        attention: str = Attention.DENSE,
        execution: Execution = PLAIN,
        group: Collective | None = None,
    ) -> None:
        """Prepares the slice and runs one token through it as a check.

        Models of families outside ``CERTIFIED`` should first pass ``check_family``.

        Args:
            model: the whole model, or layers of it as loaded; it is not changed.
            name: "target", "draft", ...
            first_layer, last_layer: the slice; None: to the last layer.
            capture: hidden states, of layers of the slice, that every pass returns.
            attention: a value of ``Attention``.
            group: tensor-parallel ranks that share the layers; only exact passes use it.
        """
        total = len(model.get_submodule(layers_name(model)))
        last_layer = total if last_layer is None else last_layer
        check_slice(first_layer, last_layer, total, capture)
        config = model.config.get_text_config()
        self.name = name
        self.first_layer, self.last_layer = first_layer, last_layer
        self.num_layers = last_layer - first_layer
        self.is_first, self.is_last = first_layer == 0, last_layer == total
        self.vocab_size: int = config.vocab_size
        self.hidden_size: int = config.hidden_size
        self.max_positions: int = config.max_position_embeddings
        self._meter = meter
        states = {name._replace(normed=False) for name in capture} | {HiddenName(last_layer - 1)}
        own = slice_model(model, first_layer, last_layer, states)
        replace_modules(own, execution, device=_device(own))
        self.spec, probe = probed(own, first_layer)
        self.dtype, self.device = self.spec.dtype, self.spec.device
        layers = ModelSlice(
            model=own,
            first_layer=first_layer,
            is_first=self.is_first,
            is_last=self.is_last,
            capture=tuple(capture),
            spec=self.spec,
            options=probe.options,
            num_heads=probe.num_heads,
            group=group,
        )
        self.backend = make_backend(layers, attention, execution)

    def new_cache(self, capacity: int, pool: BlockPool | None = None) -> TreeCache:
        """Returns an empty cache for one request, with ``capacity`` slots at first.

        ``pool`` allocates the slots in blocks; None means contiguous memory.
        """
        if pool is not None:
            return TreeCache(spec=self.spec, capacity=capacity, storage=Paged(pool=pool))
        return self.backend.new_cache(capacity)

    def forward(
        self,
        rows: Sequence[Rows],
        *,
        hidden: Tensor | None = None,
        logits_rows: IntArray | None = None,
    ) -> RunnerOutput:
        """Runs one packed pass over the rows of one or more requests and fills their caches.

        Args:
            rows: results of ``TreeCache.rows`` in packing order, with at least one row in total.
            hidden: [sum R, E], the previous stage's output; None for the first slice.
            logits_rows: int64[A], packed row indices; None: every row; empty: no logits.
        """
        assert (hidden is None) == self.is_first, "hidden states enter every slice but the first"
        # Steps of the loop are in inference mode already; entering it again costs microseconds.
        mode: AbstractContextManager[Any] = (
            nullcontext() if torch.is_inference_mode_enabled() else torch.inference_mode()
        )
        # Times include making masks and cache views, as do those of the baselines, which run
        # transformers' own forward.
        with mode, model_call(self._meter, self.name, self.device):
            return self.backend.run(rows, hidden, logits_rows)


def _device(model: PreTrainedModel) -> torch.device:
    """Returns the device of a slice's layers; its other parameters may be on meta."""
    layers = model.get_submodule(layers_name(model))
    return next(layers.parameters()).device
