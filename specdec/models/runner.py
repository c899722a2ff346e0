"""Forward passes of a model, or of a slice of its layers, over this library's caches.

Shape letters: R rows of one request, A rows whose logits are computed, E hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from einops import rearrange
from torch import Tensor
from transformers import PreTrainedModel

from specdec.attention.backends import Attention
from specdec.attention.kv_cache import BlockPool, CacheSpec, Paged, Rows, TreeCache
from specdec.attention.tree_attention import PassPlan, ScoreOptions
from specdec.clocks.meter import Meter
from specdec.device import model_call
from specdec.errors import UserError
from specdec.models.backends.eager import ModelSlice, RunnerOutput, forward_inputs
from specdec.models.backends.factory import make_backend, replace_modules
from specdec.models.config_values import config_value
from specdec.models.execution import PLAIN, Execution
from specdec.models.inspection import CERTIFIED
from specdec.models.slicing import check_slice, layers_name, slice_model
from specdec.types import HiddenName, IntArray, TreeRows

if TYPE_CHECKING:
    from specdec.tensor_parallel.collective import Collective

NO_ROWS: IntArray = np.zeros(0, np.int64)
"""``logits_rows`` of a pass without logits, such as prefill."""

_IGNORED = frozenset(
    {"is_causal", "layer_idx", "output_attentions", "position_ids", "use_cache", "cache_position"}
)
_NUM_CHECKED = 8  # tokens


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


class Probe(PassPlan):
    """A plan that records the shapes of keys and rejects unsupported attention arguments.

    Attributes:
        shapes: index within the slice -> (key/value heads G, head size D).
        options: index within the slice -> how the layer computes its scores.
        windowed: layers of the slice with a sliding window.
    """

    def __init__(self, *, model_type: str, first_layer: int, hidden: Tensor | None) -> None:
        super().__init__(first_layer=first_layer, hidden=hidden)
        self.shapes: dict[int, tuple[int, int]] = {}
        self.options: dict[int, ScoreOptions] = {}
        self.num_heads = 0
        self.windowed: set[int] = set()
        self._model_type = model_type

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: ScoreOptions) -> Tensor:
        unknown = [k for k, v in options.others.items() if k not in _IGNORED and v is not None]
        if unknown or key.shape != value.shape:
            raise UserError(
                f"model type {self._model_type!r} cannot be used: tree attention does not support "
                f"features of its attention ({', '.join(unknown) or 'unequal key and value'}); use "
                "a plain decoder-only family such as llama, qwen3 or gpt2"
            )
        self.shapes[self.cache.layer] = (key.shape[1], key.shape[3])
        self.options[self.cache.layer] = options
        self.num_heads = query.shape[1]
        if options.window is not None:
            self.windowed.add(self.cache.layer)
        return rearrange(torch.zeros_like(query), "b h r d -> b r h d")


def probed(model: PreTrainedModel, first_layer: int) -> tuple[CacheSpec, Probe]:
    """Returns the shape and dtype of a slice's keys and values, and the recorded options."""
    config = model.config.get_text_config()
    kind = config.model_type
    layers = model.get_submodule(layers_name(model))
    like = next(layers[0].parameters())  # type: ignore[index]
    hidden = like.new_zeros(1, 1, config.hidden_size) if first_layer else None
    probe = Probe(model_type=kind, first_layer=first_layer, hidden=hidden)
    zero = torch.zeros(1, dtype=torch.int64, device=like.device)
    try:
        with torch.inference_mode():
            model.base_model(**forward_inputs(model, probe, zero, zero))
    except (AttributeError, TypeError, KeyError, IndexError) as error:  # other kinds of caches
        raise UserError(
            f"model type {kind!r} cannot be used: it needs another cache than one of keys"
            f" and values ({error}); use a plain decoder-only family such as llama, qwen3 or"
            " gpt2"
        ) from error
    num_layers = len(layers)  # type: ignore[arg-type]
    if sorted(probe.shapes) != list(range(num_layers)) or len({*probe.shapes.values()}) > 1:
        raise UserError(
            f"model type {kind!r} cannot be used: its layers do not all attend through "
            "transformers' attention interface with keys and values of one shape (observed: "
            f"{probe.shapes}); use a plain decoder-only family such as llama, qwen3 or gpt2"
        )
    kinds = config_value(config, "layer_types", ["full_attention"] * num_layers)
    windowed = {i for i, name in enumerate(kinds) if name == "sliding_attention"}
    if {*kinds} - {"full_attention", "sliding_attention"} or not windowed <= probe.windowed:
        raise UserError(
            f"model type {kind!r} cannot be used: its layers are {sorted({*kinds})}, and "
            f"{len(probe.windowed)} of {num_layers} use a sliding window; use a family "
            "with full and sliding attention only, such as llama, qwen3 or gemma3_text"
        )
    num_kv_heads, head_dim = probe.shapes[0]
    spec = CacheSpec(
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=like.dtype,
        device=like.device,
    )
    return spec, probe


def check_family(model: PreTrainedModel) -> None:
    """Refuses a model whose logits under tree attention differ from those of transformers' forward.

    Certified families are not compared, nor models of which only some layers are loaded.
    """
    kind = model.config.get_text_config().model_type
    if kind in CERTIFIED or any(p.is_meta for p in model.parameters()):
        return
    runner = ModelRunner(model=model, name="checked", meter=Meter())
    embeddings: Tensor = model.get_input_embeddings().weight  # type: ignore[assignment]
    tokens = np.arange(_NUM_CHECKED) % runner.vocab_size
    half, nodes = _NUM_CHECKED // 2, np.arange(_NUM_CHECKED - _NUM_CHECKED // 2)
    cache = runner.new_cache(_NUM_CHECKED)
    found = [runner.forward([cache.rows(prefix_tokens=tokens[:half])]).logits]
    tree = TreeRows.within(
        prefix_len=half, node_ids=nodes, tokens=tokens[half:], parent_ids=nodes - 1
    )
    found.append(runner.forward([cache.rows(tree=tree)]).logits)
    with torch.inference_mode():
        expected = model(torch.from_numpy(tokens).to(embeddings.device)[None]).logits[0]
    both = torch.cat([logits for logits in found if logits is not None])
    error = (both - expected).abs().max().item()
    bound = max(torch.finfo(embeddings.dtype).eps, 1e-7) ** 0.5 * expected.abs().max().item()
    if not error <= bound:
        raise UserError(
            f"model type {kind!r} cannot be used: its logits under tree "
            f"attention differ by {error:.2g} from transformers' own; use one of "
            f"{', '.join(sorted(CERTIFIED))}"
        )
