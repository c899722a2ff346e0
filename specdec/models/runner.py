"""Forward passes of a model, or of a slice of its layers, over this library's caches.

A runner copies the module tree, sharing all parameters, and keeps only its slice. Hooks insert and
extract hidden states, so transformers' own forward runs the slice and no model type needs specific
code. A ``Backend`` computes the passes: ``Eager`` calls that forward; those for CUDA graphs, ONNX
Runtime and independent rows (``model.exact``) are in modules that are imported when used.

Shape letters: R rows (tokens) of one request, A rows with logits, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from einops import rearrange
from torch import Tensor, nn

from specdec.attention import support
from specdec.attention.backends import Attention, Kernel, attention_kernel
from specdec.attention.tree_attention import (
    PLAN,
    AttentionPlan,
    BlockPool,
    CacheSpec,
    Paged,
    PassPlan,
    Rows,
    ScoreOptions,
    TreeCache,
    registered,
)
from specdec.clocks.meter import Meter
from specdec.device import to_device
from specdec.errors import UserError
from specdec.models.config_values import config_value
from specdec.models.execution import PLAIN, Execution
from specdec.models.inspection import CERTIFIED
from specdec.models.slicing import (
    cache_argument,
    final_norm,
    first_of,
    keep_layers,
    layers_name,
    shared_copy,
    with_hidden,
)
from specdec.types import HiddenName, IntArray, TreeRows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from specdec.tensor_parallel.collective import Collective

ROW_COUNTS = (1, 2, 4, 8, 16, 32, 64)
"""CUDA graphs and exact passes pad the rows of a pass to the next of these numbers."""


def round_up(number: int, choices: Sequence[int]) -> int:
    return next(choice for choice in choices if choice >= number)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSlice:
    # a copy of the module tree with these layers only, which shares the weights
    model: PreTrainedModel
    first_layer: int  # global index of the first layer
    # is_first and is_last: whether the slice starts with the embeddings, ends with the output head
    is_first: bool
    is_last: bool
    capture: tuple[HiddenName, ...]  # hidden states that every pass returns
    spec: CacheSpec
    # index within the slice -> how the layer computes its scores
    options: Mapping[int, ScoreOptions]
    num_heads: int
    # tensor-parallel ranks that share the layers; None without tensor parallelism
    group: Collective | None = None

    @property
    def output(self) -> HiddenName:
        return HiddenName(self.first_layer + len(self.options) - 1)

    @property
    def hidden_size(self) -> int:
        size: int = self.model.config.get_text_config().hidden_size
        return size

    @property
    def vocab_size(self) -> int:
        size: int = self.model.config.get_text_config().vocab_size
        return size

    def wants_logits(self, logits_rows: IntArray | None) -> bool:
        return self.is_last and (logits_rows is None or len(logits_rows) > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerOutput:
    # [sum R, E], after the slice's last layer, before any final norm: the next stage's input
    hidden: Tensor
    # [A, V]; None if no row was requested, or if the slice is not the last
    logits: Tensor | None = None
    # name -> [sum R, E], the states that the runner captures
    captured: Mapping[HiddenName, Tensor] = field(default_factory=dict)


def concatenate(parts: Sequence[RunnerOutput]) -> RunnerOutput:
    if len(parts) == 1:
        return parts[0]
    logits = [part.logits for part in parts if part.logits is not None]
    names = parts[0].captured
    return RunnerOutput(
        hidden=torch.cat([part.hidden for part in parts]),
        logits=torch.cat(logits) if logits else None,
        captured={name: torch.cat([part.captured[name] for part in parts]) for name in names},
    )


def refuse_wrong(found: Iterable[Tensor], expected: Iterable[Tensor], what: str) -> None:
    both = [torch.cat([part.flatten() for part in parts]) for parts in (found, expected)]
    # Tokens outside a draft vocabulary are -inf in both.
    error = (both[0] - both[1]).abs().masked_fill(both[0] == both[1], 0.0).max().item()
    largest = both[1][both[1].isfinite()].abs().max().item()
    bound = torch.finfo(torch.float32).eps ** 0.5 * largest
    if not error <= bound:
        raise UserError(
            f"model.backend=onnx cannot run this {what}: its outputs differ by {error:.2g} from"
            " those of model.backend=eager; use that"
        )


class Backend:
    layers: ModelSlice

    def run(
        self, rows: Sequence[Rows], hidden: Tensor | None, logits_rows: IntArray | None
    ) -> RunnerOutput:
        """Runs one packed pass and fills the caches; for arguments see ``ModelRunner.forward``."""
        raise NotImplementedError

    def new_cache(self, capacity: int) -> TreeCache:
        return TreeCache(spec=self.layers.spec, capacity=capacity)


def in_parts(
    parts: Sequence[Sequence[Rows]],
    hidden: Tensor | None,
    logits_rows: IntArray | None,
    run: Callable[[Sequence[Rows], Tensor | None, IntArray], RunnerOutput],
) -> RunnerOutput:
    """Runs a pass as several smaller ones, over ``parts`` of its rows; concatenates the outputs.

    ``run`` gets the rows of a part, their hidden states, and the ascending indices within the part
    of rows that need logits. ``hidden`` and ``logits_rows``: see ``ModelRunner.forward``.
    """
    num_rows = sum(len(rows) for part in parts for rows in part)
    wanted = np.arange(num_rows) if logits_rows is None else np.sort(logits_rows)
    outputs, start = [], 0
    for part in parts:
        stop = start + sum(map(len, part))
        own = wanted[slice(*wanted.searchsorted([start, stop]))] - start
        outputs.append(run(part, None if hidden is None else hidden[start:stop], own))
        start = stop
    output = concatenate(outputs)
    if output.logits is None or logits_rows is None:
        return output
    order = wanted.searchsorted(logits_rows)
    if np.array_equal(order, np.arange(len(order))):
        return output
    return replace(output, logits=output.logits[to_device(order, output.logits.device)])


class Eager(Backend):
    def __init__(self, layers: ModelSlice, attention: str) -> None:
        self.layers = layers
        spec = layers.spec
        self.kernel: Kernel | None = attention_kernel(attention, spec.device, spec.dtype)
        self.attention = Attention(attention)
        is_normed = any(name.normed for name in layers.capture)
        self._norm = final_norm(layers.model) if is_normed else None

    def run(
        self, rows: Sequence[Rows], hidden: Tensor | None, logits_rows: IntArray | None
    ) -> RunnerOutput:
        tokens = np.concatenate([part.tokens for part in rows])
        positions = np.concatenate([part.positions for part in rows])
        device, layers = self.layers.spec.device, self.layers
        step = AttentionPlan(
            rows=rows,
            first_layer=layers.first_layer,
            hidden=None if hidden is None else hidden.to(device)[None],
            kernel=self.kernel,
        )
        keep: int | Tensor | None = None
        if layers.wants_logits(logits_rows):
            keep = 0 if logits_rows is None else to_device(logits_rows, device)
        ids, places = (to_device(array, device) for array in (tokens, positions))
        return self.compute(step, ids, places, keep)

    def compute(
        self, step: PassPlan, tokens: Tensor, positions: Tensor, keep: int | Tensor | None
    ) -> RunnerOutput:
        """Calls the model's forward on tokens and positions int64[R]; ``keep`` lists the rows whose
        logits are computed, int64[A] (0: all, None: none).
        """
        layers, model = self.layers, self.layers.model
        inputs = forward_inputs(model, step, tokens, positions)
        if keep is None:
            model.base_model(**inputs)
            logits = None
        else:
            logits = model(**inputs, logits_to_keep=keep).logits[0]
        found = {name: states[0] for name, states in step.captured.items()}
        if self._norm is not None:
            found[layers.output._replace(normed=True)] = self._norm(found[layers.output])
        return RunnerOutput(
            hidden=found[layers.output],
            logits=logits,
            captured={name: found[name] for name in layers.capture},
        )


def forward_inputs(
    model: PreTrainedModel, step: PassPlan, tokens: Tensor, positions: Tensor
) -> dict[str, Any]:
    """Returns the arguments of a slice's forward for tokens and positions int64[R]; a slice that is
    not the first gets placeholders as embeddings, which a hook replaces.
    """
    inputs: dict[str, Any] = {
        "position_ids": positions[None],
        cache_argument(model): step.cache,
        PLAN: step,
    }
    if step.hidden is None:
        inputs["input_ids"] = tokens[None]
    else:
        width = model.get_input_embeddings().embedding_dim
        inputs["inputs_embeds"] = step.hidden.new_empty(1, len(tokens), width)
    return inputs


KERNELS = ("torch", "triton", "packed")
GRAPHS = ("off", "replay", "cuda", "auto")
"""Values of ``Execution.graphs``: "replay" uses buffers without graphs, "auto" graphs on GPUs."""


def replace_modules(model: Any, execution: Execution, *, device: torch.device) -> None:
    """Replaces modules of ``model``, a runner's own copy, in place as ``execution.kernels`` and
    ``execution.exact`` require. Call it before a pass, which would read the plain weights.
    """
    kernels, dtype = execution.kernels, model.dtype
    if kernels not in KERNELS:
        raise UserError(f"model.kernels={kernels} is unknown; choose {', '.join(KERNELS)}")
    if execution.exact:
        backend_module("specdec.models.backends.exact").use_exact_modules(model)
    if kernels == "packed":
        packed = backend_module("specdec.kernels.packed")
        support.require(packed.packed_problem(device, dtype), "model.kernels=packed")
        packed.pack(model)
    if kernels == "triton":
        support.require(support.triton_problem(device, dtype), "model.kernels=triton")
        backend_module("specdec.kernels.swiglu").use_swiglu(model)


def make_backend(layers: ModelSlice, attention: str, execution: Execution) -> Backend:
    eager = Eager(layers, attention)
    captures = _captures(execution.graphs, layers.spec.device)
    if execution.backend == "onnx":
        onnx = backend_module("specdec.models.onnx.passes")
        backend: Backend = onnx.Onnx(eager, execution.bits)
    elif execution.exact:
        backend = backend_module("specdec.models.backends.exact").Exact(eager)
    elif captures is not None:
        backend = backend_module("specdec.models.backends.graphs").Graphs(eager, captures=captures)
    else:
        backend = eager
    return backend


def backend_module(name: str) -> Any:
    return import_module(name)


def _captures(graphs: str, device: torch.device) -> bool | None:
    """Returns True for CUDA graphs, False for static buffers without graphs, None for neither."""
    if graphs not in GRAPHS:
        raise UserError(f"model.graphs={graphs} is unknown; choose {', '.join(GRAPHS)}")
    is_cuda = device.type == "cuda"
    if graphs == "cuda" and not is_cuda:
        raise UserError(
            f"model.graphs=cuda needs a CUDA device, but model.device is {device.type}; use"
            " model.graphs=off, or replay for the same buffers without graphs"
        )
    return None if graphs == "off" or (graphs == "auto" and not is_cuda) else graphs != "replay"


NO_ROWS: IntArray = np.zeros(0, np.int64)
"""Value of ``logits_rows`` for a pass that computes no logits, such as prefill."""

_IGNORED = frozenset(
    {"is_causal", "layer_idx", "output_attentions", "position_ids", "use_cache", "cache_position"}
)
_NUM_CHECKED = 8  # tokens


class _NoEmbedding(nn.Module):
    def __init__(self, layers: nn.Module, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding_dim = embedding.embedding_dim
        like = next(layers.parameters())
        self.zero = torch.zeros(1, 1, 1, dtype=like.dtype, device=like.device)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.zero


def slice_model(
    model: PreTrainedModel, first_layer: int, last_layer: int, capture: Iterable[HiddenName]
) -> PreTrainedModel:
    """Returns a copy of the module tree that runs layers first .. last - 1 with tree attention.

    Hooks store the outputs of captured layers, before any norm, in the pass's ``PassPlan``; in a
    slice that is not the first, a hook also takes the input from that plan.
    """
    name = layers_name(model)
    whole: Any = model.get_submodule(name)
    own = shared_copy(model, shared=[*whole[:first_layer], *whole[last_layer:]])
    own.set_attn_implementation(registered())
    layers = keep_layers(own, first_layer, last_layer)
    own.eval()
    if first_layer:
        for path, module in list(own.base_model.named_modules()):
            if isinstance(module, nn.Embedding) and not path.startswith(name):
                own.base_model.set_submodule(path, _NoEmbedding(layers, module))
        layers[0].register_forward_pre_hook(_put_hidden, with_kwargs=True)
    for state in capture:
        layer = layers[state.layer - first_layer]
        layer.register_forward_hook(partial(_capture, state), with_kwargs=True)
    return own


def _capture(name: HiddenName, _: nn.Module, __: Any, kwargs: dict[str, Any], output: Any) -> None:
    kwargs[PLAN].captured[name] = first_of(output)


def _put_hidden(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return with_hidden(kwargs[PLAN].hidden, args, kwargs)


def check_slice(first: int, last: int, total: int, capture: Sequence[HiddenName]) -> None:
    if not 0 <= first < last <= total:
        raise ValueError(f"layers {first} .. {last} are not in a model of {total} layers")
    for layer, normed in capture:
        if not first <= layer < last:
            raise ValueError(f"layer {layer} is not in the slice of layers {first} .. {last - 1}")
        if normed and layer != total - 1:
            raise ValueError(f"layer {layer} has no final norm: layer {total - 1} has it")


class ModelRunner:
    """Runs a slice of a model's layers; ``name`` labels its times in the ``Meter``."""

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
        """Prepares the slice and runs one token through it as a check. For model types outside
        ``CERTIFIED``, call ``check_family`` first.

        Args:
            model: a model, or one of which only these layers are loaded; it is not changed.
            first_layer, last_layer: the slice has layers first .. last - 1; None: to the last one.
            capture: names of hidden states of the slice's layers, which every pass returns.
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

    def with_meter(self, meter: Meter) -> Self:
        """Returns a runner that shares this one's passes and measures them with ``meter``."""
        runner = copy(self)
        runner._meter = meter
        return runner

    def new_cache(self, capacity: int, pool: BlockPool | None = None) -> TreeCache:
        """Returns an empty cache for one request: in contiguous memory, with ``capacity`` slots at
        first, or in blocks of ``pool`` that are taken as needed.
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
            rows: results of ``TreeCache.rows``, packed in this order; at least one row in total.
            hidden: [sum R, E], the previous stage's output; None for the first slice.
            logits_rows: int64[A], packed row indices; None: every row; empty: no logits.
        """
        assert (hidden is None) == self.is_first, "hidden states enter every slice but the first"
        # Times include making masks and cache views, as do those of the baselines, which run
        # transformers' own forward.
        with torch.inference_mode(), self._meter.model(self.name, self.device):
            return self.backend.run(rows, hidden, logits_rows)


def _device(model: PreTrainedModel) -> torch.device:
    layers = model.get_submodule(layers_name(model))
    return next(layers.parameters()).device


class Probe(PassPlan):
    """The plan of a trial pass: records the shapes of keys and the options of attention in each
    layer; UserError for arguments of attention that are not supported.
    """

    def __init__(self, *, model_type: str, first_layer: int, hidden: Tensor | None) -> None:
        super().__init__(first_layer=first_layer, hidden=hidden)
        self.shapes: dict[int, tuple[int, int]] = {}
        self.options: dict[int, ScoreOptions] = {}
        self.num_heads = 0
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
        return rearrange(torch.zeros_like(query), "b h r d -> b r h d")


def probed(model: PreTrainedModel, first_layer: int) -> tuple[CacheSpec, Probe]:
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
    stated = {i for i, name in enumerate(kinds) if name == "sliding_attention"}
    windowed = {i for i, options in probe.options.items() if options.window is not None}
    if {*kinds} - {"full_attention", "sliding_attention"} or not stated <= windowed:
        raise UserError(
            f"model type {kind!r} cannot be used: its layers are {sorted({*kinds})}, and "
            f"{len(windowed)} of {num_layers} use a sliding window; use a family "
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
    """Raises UserError if a model's logits under tree attention differ from those of transformers'
    own forward. Model types in ``CERTIFIED`` and partly loaded models are not compared.
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
