"""The interface of backends, the slice that they run, and passes by transformers' own forward.

Shape letters: R rows of a request, A rows whose logits are computed, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.attention.backends import Attention, Kernel, attention_kernel
from specdec.attention.kv_cache import CacheSpec, Pair, Rows, TreeCache
from specdec.attention.tree_attention import PLAN, AttentionPlan, PassCache, PassPlan, ScoreOptions
from specdec.device import to_device
from specdec.errors import UserError
from specdec.models.slicing import cache_argument, final_norm
from specdec.types import HiddenName, IntArray

if TYPE_CHECKING:
    from specdec.tensor_parallel.collective import Collective


ROW_COUNTS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of rows that captured and exact passes are padded to."""


def round_up(number: int, choices: Sequence[int]) -> int:
    return next(choice for choice in choices if choice >= number)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSlice:
    """Some layers of a model, and what running one token through them has shown.

    Attributes:
        model: a copy of the module tree with these layers only, which shares the weights.
        first_layer: global index of the first layer.
        is_first, is_last: whether the slice starts with the embeddings, ends with the output head.
        capture: hidden states that every pass returns.
        options: index within the slice -> how the layer computes its scores.
        group: tensor-parallel ranks that share the layers; None without tensor parallelism.
    """

    model: PreTrainedModel
    first_layer: int
    is_first: bool
    is_last: bool
    capture: tuple[HiddenName, ...]
    spec: CacheSpec
    options: Mapping[int, ScoreOptions]
    num_heads: int
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
    """Outputs of one pass.

    Attributes:
        hidden: [sum R, E], after the slice's last layer, before any final norm: the next stage's
            input.
        logits: [A, V]; None if no row was requested, or if the slice is not the last.
        captured: name -> [sum R, E], the states that the runner captures.
    """

    hidden: Tensor
    logits: Tensor | None = None
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


def selected_logits(
    output: RunnerOutput, available: IntArray | None, wanted: IntArray | None
) -> RunnerOutput:
    """Returns the output with only the logits of the rows ``wanted``, int64[A], in this order.

    ``available``, ascending, lists the rows of ``output.logits``; None means all rows. If
    ``wanted`` is None, the output is unchanged.
    """
    if output.logits is None or wanted is None:
        return output
    order = wanted if available is None else np.searchsorted(available, wanted)
    if np.array_equal(order, np.arange(len(output.logits))):
        return output
    return replace(output, logits=output.logits[to_device(order, output.logits.device)])


def refuse_wrong(found: Iterable[Tensor], expected: Iterable[Tensor], what: str) -> None:
    """Raises a UserError if ONNX Runtime's results differ from eager ones by more than rounding."""
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
    """Computes the passes of one slice."""

    layers: ModelSlice

    def run(
        self, rows: Sequence[Rows], hidden: Tensor | None, logits_rows: IntArray | None
    ) -> RunnerOutput:
        """Runs one packed pass and fills the caches; for arguments see ``ModelRunner.forward``."""
        raise NotImplementedError

    def new_cache(self, capacity: int) -> TreeCache:
        return TreeCache(spec=self.layers.spec, capacity=capacity)


class Eager(Backend):
    """Calls the model's forward; the other backends build on it."""

    def __init__(self, layers: ModelSlice, attention: str, forward: Callable[..., Any]) -> None:
        """``forward`` is the slice's model or its compiled form."""
        self.layers = layers
        spec = layers.spec
        self.kernel: Kernel | None = attention_kernel(attention, spec.device, spec.dtype)
        self.attention = Attention(attention)
        self._forward = forward
        is_normed = any(name.normed for name in layers.capture)
        self._norm = final_norm(layers.model) if is_normed else None

    def run(
        self, rows: Sequence[Rows], hidden: Tensor | None, logits_rows: IntArray | None
    ) -> RunnerOutput:
        if len(rows) == 1:
            tokens, positions = rows[0].tokens, rows[0].positions
        else:
            tokens = np.concatenate([part.tokens for part in rows])
            positions = np.concatenate([part.positions for part in rows])
        device, layers = self.layers.spec.device, self.layers
        step = AttentionPlan(
            rows=rows,
            first_layer=layers.first_layer,
            attention=self.attention,
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
        """Calls the model's forward on tokens and positions int64[R].

        ``keep`` lists the rows whose logits are computed, int64[A]; 0 means all, None means none.
        """
        layers, model = self.layers, self.layers.model
        inputs = forward_inputs(model, step, tokens, positions)
        if self._forward is not model:
            name = cache_argument(model)
            inputs[name] = _OpaqueCache(inputs[name])
        if keep is None:
            model.base_model(**inputs)
            logits = None
        else:
            logits = self._forward(**inputs, logits_to_keep=keep).logits[0]
        found = {name: states[0] for name, states in step.captured.items()}
        if self._norm is not None:
            found[layers.output._replace(normed=True)] = self._norm(found[layers.output])
        return RunnerOutput(
            hidden=found[layers.output],
            logits=logits,
            captured={name: found[name] for name in layers.capture},
        )


class _OpaqueCache(PassCache):
    """A ``PassCache`` that is not traced: a trace would be specialised on each layer's index."""

    def __init__(self, cache: PassCache) -> None:
        self._cache = cache

    @torch.compiler.disable
    def update(self, *args: Any, **kwargs: Any) -> Pair:
        return self._cache.update(*args, **kwargs)


def forward_inputs(
    model: PreTrainedModel, step: PassPlan, tokens: Tensor, positions: Tensor
) -> dict[str, Any]:
    """Returns the arguments of a slice's forward for tokens and positions int64[R].

    In a slice that is not the first, placeholders replace the embeddings, because a hook inserts
    the hidden states of ``step``.
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
