"""Forward passes of a model, or of a slice of its layers, over our own caches.

Letters: R rows of one request, A rows whose logits are asked for, V vocabulary, E hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any
from weakref import proxy

import numpy as np
import torch
from transformers import PreTrainedModel

from specdec.attention.kv_cache import Rows, TreeCache
from specdec.attention.kv_storage import BlockPool, CacheSpec, Paged
from specdec.attention.tree_attention import (
    Attention,
    AttentionStep,
    Step,
    StepCache,
    attending,
    kernel_of,
)
from specdec.clocks.meter import Meter
from specdec.device import Graphs, current, resolve_graphs, to_device
from specdec.errors import UserError
from specdec.models.captured import Computed, StaticPasses
from specdec.models.execution import PLAIN, Execution, OpaqueCache, prepare
from specdec.models.inspection import CERTIFIED
from specdec.models.slicing import layers_name, own_instance
from specdec.types import IntArray

NO_ROWS: IntArray = np.zeros(0, np.int64)
"""``logits_rows`` of a pass that wants none, such as prefill."""

_SAMPLE = 8  # tokens that an untested family is compared on

_HARMLESS = frozenset(
    {"is_causal", "layer_idx", "output_attentions", "position_ids", "use_cache", "cache_position"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerOutput:
    """What one pass gives.

    Attributes:
        hidden: [sum R, E], after the last layer of the slice and before the final norm: what the
            next stage takes.
        logits: [A, V] in the order of ``logits_rows``; None where none were asked for, or where
            the slice is not the last.
        captured: global layer index (from 0) -> [sum R, E] after that layer.
    """

    hidden: torch.Tensor
    logits: torch.Tensor | None = None
    captured: Mapping[int, torch.Tensor] = field(default_factory=dict)


class ModelRunner:
    """Layers ``first_layer .. last_layer - 1`` of a model.

    Attributes:
        name: under which its passes are metered.
        first_layer, last_layer, num_layers: the slice.
        is_first, is_last: whether it begins with the embeddings, ends with the logits.
        spec: what its caches hold.
        vocab_size, hidden_size, max_positions: of the model.
        dtype, device: of its weights.
    """

    _call: Any = None  # the model, or its compiled form; none in the probe

    def __init__(
        self,
        *,
        model: PreTrainedModel,
        name: str,
        meter: Meter,
        first_layer: int = 0,
        last_layer: int | None = None,
        capture_layers: Sequence[int] = (),
        attention: str = Attention.DENSE,
        execution: Execution = PLAIN,
    ) -> None:
        """Prepares the slice and runs one token through it, as a check.

        Args:
            model: the whole model, or what ``load_stage`` gave; it is not changed.
            name: "target", "draft", ...
            meter: told of every pass.
            first_layer, last_layer: the slice; to the end where ``last_layer`` is None.
            capture_layers: layers (global, from 0) whose output every pass hands out.
            attention: a value of ``Attention``.
            execution: graphs, fused modules, compilation.

        Raises:
            UserError: for a family, kernel or graphs that cannot be used here.
            ValueError: for layers that the model has not.
        """
        total = len(model.get_submodule(layers_name(model)))
        last_layer = total if last_layer is None else last_layer
        _check_slice(first_layer, last_layer, total, capture_layers, attention)
        config = model.config.get_text_config()
        self.name = name
        self.first_layer, self.last_layer = first_layer, last_layer
        self.num_layers = last_layer - first_layer
        self.is_first, self.is_last = first_layer == 0, last_layer == total
        self.vocab_size: int = config.vocab_size
        self.hidden_size: int = config.hidden_size
        self.max_positions: int = config.max_position_embeddings
        self._meter = meter
        self._attention = Attention(attention)
        self._static: StaticPasses | None = None
        self._captured = tuple(capture_layers)
        self._model = own_instance(
            model,
            first_layer=first_layer,
            last_layer=last_layer,
            capture_layers={*capture_layers, last_layer - 1},
        )
        weight = next(self._model.get_submodule(layers_name(self._model))[0].parameters())
        self.dtype, self.device = weight.dtype, weight.device
        self._guard = current(self.device)
        self._kernel = kernel_of(self._attention, self.device, self.dtype)
        embedding = model.get_input_embeddings()
        self._embedding_dim: int = embedding.embedding_dim
        self.spec = self._probe(config.model_type)
        self._call = prepare(self._model, execution, self.device, self.dtype)
        self._static = self._static_passes(execution)
        whole = self.is_first and self.is_last and not any(p.is_meta for p in model.parameters())
        if whole and config.model_type not in CERTIFIED:
            self._compare(model)

    def new_cache(self, capacity: int, pool: BlockPool | None = None) -> TreeCache:
        """An empty cache for one request: blocks of ``pool``, or room for ``capacity`` at first."""
        if pool is not None:
            return TreeCache(spec=self.spec, capacity=capacity, storage=Paged(pool=pool))
        if self._static is not None:
            return self._static.arenas.new_cache(capacity)
        return TreeCache(spec=self.spec, capacity=capacity)

    @property
    def static(self) -> StaticPasses | None:
        """The captured passes, where ``execution.graphs`` asks for them."""
        return self._static

    def forward(
        self,
        rows: Sequence[Rows],
        *,
        hidden: torch.Tensor | None = None,
        logits_rows: IntArray | None = None,
    ) -> RunnerOutput:
        """One packed pass over the rows of one or many requests; fills their caches.

        Args:
            rows: at least one row in all; what ``TreeCache.rows`` returned, in packing order.
            hidden: [sum R, E], what the stage before gave; for the first slice None.
            logits_rows: int64[A], packed row indices; every row where None, no logits where empty.
        """
        assert (hidden is None) == self.is_first, "hidden states enter every slice but the first"
        wants_logits = self.is_last and (logits_rows is None or len(logits_rows) > 0)
        run = self._launched
        if self._static is not None and self._static.serves(rows):
            run = self._replayed
        with torch.inference_mode(), self._guard:
            # Masks and views of the cache are made in the timed part: transformers' own forward,
            # which baselines are timed by, makes them too.
            start = perf_counter()
            found = run(rows, hidden, logits_rows, wants_logits)
            if wants_logits and self.device.type == "cuda":
                # Whoever asked for logits waits for them now; here the wait is the model's time.
                torch.cuda.current_stream(self.device).synchronize()
            self._meter.add(self.name, perf_counter() - start)
        return RunnerOutput(hidden=found.hidden, logits=found.logits, captured=found.captured)

    def _launched(
        self,
        rows: Sequence[Rows],
        hidden: torch.Tensor | None,
        logits_rows: IntArray | None,
        wants_logits: bool,
    ) -> Computed:
        """One packed pass, operation by operation."""
        if len(rows) == 1:
            tokens, positions = rows[0].tokens, rows[0].positions
        else:
            tokens = np.concatenate([part.tokens for part in rows])
            positions = np.concatenate([part.positions for part in rows])
        keep: int | torch.Tensor = 0
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

    def _replayed(
        self,
        rows: Sequence[Rows],
        hidden: torch.Tensor | None,
        logits_rows: IntArray | None,
        wants_logits: bool,
    ) -> Computed:
        """One replay per request; logits of all rows cost no more than those of some."""
        assert self._static is not None, "asked by forward"
        received = None if hidden is None else hidden.to(self.device)
        found = self._static.run(rows, received, wants_logits)
        if logits_rows is None or found.logits is None:
            return found
        if np.array_equal(logits_rows, np.arange(len(found.logits))):
            return found
        wanted = to_device(logits_rows, self.device)
        return Computed(found.hidden, found.logits[wanted], found.captured)

    def _compute(
        self,
        step: Step,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        wants_logits: bool,
        keep: int | torch.Tensor = 0,
    ) -> Computed:
        """The model's own forward over rows: int64[R] tokens and positions."""
        inputs = self._inputs(tokens, positions, step.cache)
        with attending(step):
            if wants_logits:
                logits = self._call(**inputs, logits_to_keep=keep).logits[0]
            else:
                self._model.base_model(**inputs)
                logits = None
        captured = {layer: step.captured[layer][0] for layer in self._captured}
        return Computed(step.captured[self.last_layer - 1][0], logits, captured)

    def _static_passes(self, execution: Execution) -> StaticPasses | None:
        """Captured passes, where they are asked for.

        Raises:
            UserError: where they cannot be had.
        """
        graphs = resolve_graphs(execution.graphs, self.device)
        if graphs is Graphs.OFF:
            return None
        if self._attention is Attention.TWO_LEVEL:
            raise UserError(
                "model.attention=two_level splits where the host says, which a captured pass cannot"
                " change; use model.attention=flash or dense, or model.graphs=off"
            )
        return StaticPasses(
            spec=self.spec,
            graphs=graphs,
            # A reference back would keep weights and graphs until cycles are collected next.
            compute=partial(ModelRunner._compute, proxy(self)),
            first_layer=self.first_layer,
            hidden_size=None if self.is_first else self.hidden_size,
            kernel=self._kernel,
            reads_lengths=self._attention in (Attention.TRITON, Attention.FLASH),
        )

    def _inputs(
        self, tokens: torch.Tensor, positions: torch.Tensor, cache: StepCache
    ) -> dict[str, Any]:
        """Arguments of transformers' forward; in a later slice the embeddings are placeholders."""
        given = cache if self._call in (None, self._model) else OpaqueCache(cache)
        inputs: dict[str, Any] = {"position_ids": positions[None], "past_key_values": given}
        if self.is_first:
            inputs["input_ids"] = tokens[None]
        else:
            shape = (1, len(tokens), self._embedding_dim)
            inputs["inputs_embeds"] = torch.empty(shape, dtype=self.dtype, device=self.device)
        return inputs

    def _probe(self, model_type: str) -> CacheSpec:
        """Runs one token through the slice to learn what its layers keep."""
        probe = _Probe(model_type=model_type, first_layer=self.first_layer)
        probe.hidden = torch.zeros(1, 1, self.hidden_size, dtype=self.dtype, device=self.device)
        zero = torch.zeros(1, dtype=torch.int64, device=self.device)
        try:
            with torch.inference_mode(), attending(probe):
                self._model.base_model(**self._inputs(zero, zero, probe.cache))
        except (AttributeError, TypeError, KeyError, IndexError) as error:  # other kinds of caches
            raise UserError(
                f"model type {model_type!r} cannot be used: it asks its cache for what a cache of "
                f"keys and values does not have ({error}); use a plain decoder-only family such as "
                "llama, qwen3 or gpt2"
            ) from error
        if (
            sorted(probe.shapes) != list(range(self.num_layers))
            or len({*probe.shapes.values()}) > 1
        ):
            raise UserError(
                f"model type {model_type!r} cannot be used: its layers do not all attend through "
                "transformers' attention interface with keys and values of one shape (seen: "
                f"{probe.shapes}); use a plain decoder-only family such as llama, qwen3 or gpt2"
            )
        config = self._model.config.get_text_config()
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * self.num_layers
        windowed = {i for i, kind in enumerate(kinds) if kind == "sliding_attention"}
        if {*kinds} - {"full_attention", "sliding_attention"} or not windowed <= probe.windowed:
            raise UserError(
                f"model type {model_type!r} cannot be used: its layers are {sorted({*kinds})}, and "
                f"{len(probe.windowed)} of {self.num_layers} said that they slide; use a family "
                "with full and sliding attention only, such as llama, qwen3 or gemma3_text"
            )
        num_kv_heads, head_dim = probe.shapes[0]
        return CacheSpec(
            num_layers=self.num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=self.dtype,
            device=self.device,
        )

    def _compare(self, model: PreTrainedModel) -> None:
        """Refuses an untested family unless it decodes a few tokens as transformers does."""
        tokens = np.arange(_SAMPLE) % self.vocab_size
        half = _SAMPLE // 2
        cache = self.new_cache(_SAMPLE)
        meter, self._meter = self._meter, Meter()
        prefix = self.forward([cache.rows(prefix_tokens=tokens[:half])]).logits
        nodes = np.arange(_SAMPLE - half)
        rows = cache.rows(
            node_ids=nodes,
            node_tokens=tokens[half:],
            parent_ids=nodes - 1,
            node_positions=half + nodes,
        )
        chain = self.forward([rows]).logits
        self._meter = meter
        assert prefix is not None and chain is not None  # noqa: PT018 - for the type checker
        with torch.inference_mode():
            expected = model(torch.from_numpy(tokens).to(self.device)[None]).logits[0]
        error = (torch.cat([prefix, chain]) - expected).abs().max().item()
        bound = max(torch.finfo(self.dtype).eps, 1e-7) ** 0.5 * expected.abs().max().item()
        if not error <= bound:
            raise UserError(
                f"model type {model.config.model_type!r} cannot be used: its logits under tree "
                f"attention differ by {error:.2g} from transformers' own; use one of "
                f"{', '.join(sorted(CERTIFIED))}"
            )


def _check_slice(
    first: int, last: int, total: int, capture_layers: Sequence[int], attention: str
) -> None:
    """Refuses layers that the model, or the slice, has not, and unknown kinds of attention."""
    if not 0 <= first < last <= total:
        raise ValueError(f"no layers {first} .. {last} in a model of {total} layers")
    for layer in capture_layers:
        if not first <= layer < last:
            raise ValueError(f"layer {layer} is not among layers {first} .. {last - 1}")
    if attention not in list(Attention):
        raise ValueError(f"attention={attention!r}; choose from {[a.value for a in Attention]}")


class _Probe:
    """A step that notes the shapes of keys and refuses what ``tree_attention`` does not do."""

    def __init__(self, *, model_type: str, first_layer: int) -> None:
        self.cache = StepCache(first_layer=first_layer)
        self.captured: dict[int, torch.Tensor] = {}
        self.hidden: torch.Tensor | None = None
        self.shapes: dict[int, tuple[int, int]] = {}
        self.windowed: set[int] = set()
        self._model_type = model_type

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        window: int | None,
        softcap: float | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """Zeros of the right shape."""
        unknown = [k for k, v in options.items() if k not in _HARMLESS and v is not None]
        if unknown or key.shape != value.shape:
            raise UserError(
                f"model type {self._model_type!r} cannot be used: its attention has features that "
                f"tree attention does not know ({', '.join(unknown) or 'unequal key and value'}); "
                "use a plain decoder-only family such as llama, qwen3 or gpt2"
            )
        self.shapes[self.cache.layer] = (key.shape[1], key.shape[3])
        if window is not None:
            self.windowed.add(self.cache.layer)
        return torch.zeros_like(query).transpose(1, 2)
