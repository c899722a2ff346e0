"""Forward passes of a model, or of a slice of its layers, over this library's caches.

Shape letters: R rows of one request, A rows whose logits are computed, V vocabulary, E hidden size,
H query heads, G key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from weakref import proxy

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.attention.backends import Attention, attention_kernel
from specdec.attention.kv_cache import Rows, TreeCache
from specdec.attention.kv_storage import BlockPool, CacheSpec, Paged
from specdec.attention.tree_attention import (
    AttentionStep,
    Step,
    StepCache,
    attending,
)
from specdec.clocks.meter import Meter
from specdec.device import model_call, to_device
from specdec.errors import UserError
from specdec.kernels.graphs import Graphs, resolve_graphs
from specdec.models.cache_argument import cache_argument
from specdec.models.captured import RunnerOutput, StaticPasses
from specdec.models.exact_modules import use_exact_modules
from specdec.models.exact_passes import ExactPasses, Slice
from specdec.models.execution import PLAIN, Execution, OpaqueCache, pack_weights, prepare
from specdec.models.family_check import NUM_TOKENS, compare_with_transformers
from specdec.models.inspection import CERTIFIED
from specdec.models.onnx_passes import OnnxPasses
from specdec.models.probe import Probe
from specdec.models.row_counts import Setting, eager_operators
from specdec.models.slicing import check_slice, layers_name, slice_model
from specdec.tensor_parallel.collective import Collective
from specdec.types import HiddenName, IntArray

NO_ROWS: IntArray = np.zeros(0, np.int64)
"""``logits_rows`` of a pass without logits, such as prefill."""


class ModelRunner:
    """Runs layers ``first_layer .. last_layer - 1`` of a model.

    Attributes:
        name: label of its passes in the meter.
        first_layer, last_layer, num_layers: the slice.
        is_first, is_last: whether the slice starts with the embeddings, ends with the output head.
        spec: shape and type of its caches.
        static: its captured passes; None if ``execution.graphs`` is off.
        onnx: its passes in ONNX Runtime; None with ``execution.backend`` eager.
        exact: its exact passes; None unless ``execution.exact``.
        vocab_size, hidden_size, max_positions: of the model.
        dtype, device: of its weights.
    """

    _call: Any = None  # the model, or its compiled form; None during the probe
    static: StaticPasses | None = None
    onnx: OnnxPasses | None = None
    exact: ExactPasses | None = None

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

        Args:
            model: the whole model, or the result of ``load_stage``; it is not changed.
            name: "target", "draft", ...
            meter: records the time of every pass.
            first_layer, last_layer: the slice; None: to the last layer.
            capture: hidden states, of layers of the slice, that every pass returns.
            attention: a value of ``Attention``.
            execution: graphs, fused modules, compilation, exactness.
            group: tensor-parallel ranks that share the layers; exact passes only.

        Raises:
            UserError: for a family, kernel or mode of graphs that cannot be used here.
            ValueError: for layers outside the model or the slice.
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
        self._capture = tuple(capture)
        self._output = HiddenName(last_layer - 1)
        self._model = slice_model(model, first_layer, last_layer, {*capture, self._output})
        weight = next(self._model.get_submodule(layers_name(self._model))[0].parameters())
        self.dtype, self.device = weight.dtype, weight.device
        self._kernel = attention_kernel(attention, self.device, self.dtype)
        self._attention = Attention(attention)
        self._embedding_dim: int = model.get_input_embeddings().embedding_dim
        self._prepare(model, config, execution, group)

    def _prepare(
        self, model: PreTrainedModel, config: Any, execution: Execution, group: Collective | None
    ) -> None:
        """Replaces modules, probes the slice and makes its captured or exact passes."""
        if execution.exact:
            use_exact_modules(self._model)
        pack_weights(self._model, execution, self.device, self.dtype)
        self.spec = self._probe(config.model_type)
        self._call = prepare(self._model, execution, self.device, self.dtype)
        self.static = self._static_passes(execution)
        self.onnx = self._onnx_passes() if execution.backend == "onnx" else None
        self.exact = self._exact_passes(config, group) if execution.exact else None
        whole = self.is_first and self.is_last and not any(p.is_meta for p in model.parameters())
        if whole and config.model_type not in CERTIFIED:
            meter, self._meter = self._meter, Meter()
            cache = self.new_cache(NUM_TOKENS)
            compare_with_transformers(model, cache, lambda rows: self.forward([rows]).logits)
            self._meter = meter

    def new_cache(self, capacity: int, pool: BlockPool | None = None) -> TreeCache:
        """Returns an empty cache for one request.

        Args:
            capacity: slots to allocate at first.
            pool: allocates the slots in blocks; None: contiguous memory.
        """
        if pool is not None:
            return TreeCache(spec=self.spec, capacity=capacity, storage=Paged(pool=pool))
        if self.static is not None:
            return self.static.arenas.new_cache(capacity)
        return TreeCache(spec=self.spec, capacity=capacity)

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
        wants_logits = self.is_last and (logits_rows is None or len(logits_rows) > 0)
        run = self._run_plain if self.onnx is None else self.onnx.run
        if self.static is not None and self.static.serves(rows):
            run = self.static.run
        elif self.exact is not None:
            run = self.exact.run
        # Steps of the loop are in inference mode already; to enter it again costs microseconds.
        mode: AbstractContextManager[Any] = (
            nullcontext() if torch.is_inference_mode_enabled() else torch.inference_mode()
        )
        # Times include making masks and cache views: so do the times of the baselines, which
        # run transformers' own forward.
        with mode, model_call(self._meter, self.name, self.device):
            return run(rows, hidden, logits_rows, wants_logits)

    def _run_plain(
        self,
        rows: Sequence[Rows],
        hidden: Tensor | None,
        logits_rows: IntArray | None,
        wants_logits: bool,
    ) -> RunnerOutput:
        """Runs one packed, uncaptured pass."""
        if len(rows) == 1:
            tokens, positions = rows[0].tokens, rows[0].positions
        else:
            tokens = np.concatenate([part.tokens for part in rows])
            positions = np.concatenate([part.positions for part in rows])
        keep: int | Tensor = 0
        if logits_rows is not None:
            keep = to_device(logits_rows, self.device)
        step = AttentionStep(
            rows=rows,
            first_layer=self.first_layer,
            attention=self._attention,
            hidden=None if hidden is None else hidden.to(self.device)[None],
            kernel=self._kernel,
        )
        ids, places = (to_device(array, self.device) for array in (tokens, positions))
        return self._compute(step, ids, places, wants_logits, keep)

    def _compute(
        self,
        step: Step,
        tokens: Tensor,
        positions: Tensor,
        wants_logits: bool,
        keep: int | Tensor = 0,
    ) -> RunnerOutput:
        """Calls the model's own forward on int64[R] tokens and positions."""
        inputs = self._inputs(tokens, positions, step.cache)
        with attending(step):
            if wants_logits:
                logits = self._call(**inputs, logits_to_keep=keep).logits[0]
            else:
                self._model.base_model(**inputs)
                logits = None
        captured = {name: step.captured[name][0] for name in self._capture}
        hidden = step.captured[self._output][0]
        return RunnerOutput(hidden=hidden, logits=logits, captured=captured)

    def _static_passes(self, execution: Execution) -> StaticPasses | None:
        """The captured passes; None if ``execution.graphs`` is off."""
        graphs = resolve_graphs(execution.graphs, self.device)
        if graphs is Graphs.OFF:
            return None
        if self._attention is Attention.TWO_LEVEL:
            raise UserError(
                "model.attention=two_level splits the context on the host, which a captured pass"
                " cannot repeat; use model.attention=flash or dense, or model.graphs=off"
            )
        return StaticPasses(
            spec=self.spec,
            graphs=graphs,
            # A weak reference: a cycle would keep weights and graphs alive until collected.
            compute=partial(ModelRunner._compute, proxy(self)),
            first_layer=self.first_layer,
            hidden_size=None if self.is_first else self.hidden_size,
            kernel=self._kernel,
            reads_lengths=self._attention in (Attention.TRITON, Attention.FLASH),
        )

    def _onnx_passes(self) -> OnnxPasses:
        """Passes in ONNX Runtime, compared with eager ones on a few tokens."""
        passes = OnnxPasses(
            self._model,
            options=self._options,
            output=self._output,
            capture=self._capture,
            spec=self.spec,
            first_layer=self.first_layer,
            is_first=self.is_first,
            is_last=self.is_last,
        )
        with torch.inference_mode():
            passes.compare(self._run_plain)
        return passes

    def _exact_passes(self, config: Any, group: Collective | None) -> ExactPasses:
        """The exact passes, whose operators are proved here."""
        setting = Setting.here(self.dtype, self.device)
        shapes = [(n, tuple(p.shape), p.stride()) for n, p in self._model.named_parameters()]
        return ExactPasses(
            spec=self.spec,
            layers=Slice(
                key=(config.to_json_string(), self.first_layer, self.last_layer, *shapes),
                first_layer=self.first_layer,
                hidden_size=None if self.is_first else self.hidden_size,
                vocab_size=self.vocab_size,
                max_positions=self.max_positions,
                has_logits=self.is_last,
            ),
            # A weak reference: a cycle would keep weights alive until collected.
            compute=partial(ModelRunner._compute, proxy(self)),
            operators=eager_operators(self._model, self._num_heads, self.spec, setting),
            setting=setting,
            group=group,
        )

    def _inputs(self, tokens: Tensor, positions: Tensor, cache: StepCache) -> dict[str, Any]:
        """Arguments of transformers' forward; a later slice gets placeholders as embeddings."""
        plain = self._call in (None, self._model)
        inputs: dict[str, Any] = {"position_ids": positions[None]}
        inputs[cache_argument(self._model)] = cache if plain else OpaqueCache(cache)
        if self.is_first:
            inputs["input_ids"] = tokens[None]
        else:
            shape = (1, len(tokens), self._embedding_dim)
            inputs["inputs_embeds"] = torch.empty(shape, dtype=self.dtype, device=self.device)
        return inputs

    def _probe(self, model_type: str) -> CacheSpec:
        """Runs one token through the slice to determine the shape of its keys and values."""
        hidden = torch.zeros(1, 1, self.hidden_size, dtype=self.dtype, device=self.device)
        probe = Probe(model_type=model_type, first_layer=self.first_layer, hidden=hidden)
        zero = torch.zeros(1, dtype=torch.int64, device=self.device)
        try:
            with torch.inference_mode(), attending(probe):
                self._model.base_model(**self._inputs(zero, zero, probe.cache))
        except (AttributeError, TypeError, KeyError, IndexError) as error:  # other kinds of caches
            raise UserError(
                f"model type {model_type!r} cannot be used: it needs another cache than one of keys"
                f" and values ({error}); use a plain decoder-only family such as llama, qwen3 or"
                " gpt2"
            ) from error
        if (
            sorted(probe.shapes) != list(range(self.num_layers))
            or len({*probe.shapes.values()}) > 1
        ):
            raise UserError(
                f"model type {model_type!r} cannot be used: its layers do not all attend through "
                "transformers' attention interface with keys and values of one shape (observed: "
                f"{probe.shapes}); use a plain decoder-only family such as llama, qwen3 or gpt2"
            )
        config = self._model.config.get_text_config()
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * self.num_layers
        windowed = {i for i, kind in enumerate(kinds) if kind == "sliding_attention"}
        if {*kinds} - {"full_attention", "sliding_attention"} or not windowed <= probe.windowed:
            raise UserError(
                f"model type {model_type!r} cannot be used: its layers are {sorted({*kinds})}, and "
                f"{len(probe.windowed)} of {self.num_layers} use a sliding window; use a family "
                "with full and sliding attention only, such as llama, qwen3 or gemma3_text"
            )
        num_kv_heads, head_dim = probe.shapes[0]
        self._options = probe.options
        self._num_heads = probe.num_heads
        return CacheSpec(
            num_layers=self.num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=self.dtype,
            device=self.device,
        )
