"""The base class of model pairs: a target, and the models and tables that accompany it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar

from specdec.clocks.meter import Meter
from specdec.errors import UserError
from specdec.executors.exits import ExitStage
from specdec.executors.stage import Answerer, ModelAnswerer, Stage
from specdec.sampling.keyed_draws import KeyedDraws
from specdec.types import HiddenName, IntArray, Needs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from specdec.models.runner import ModelRunner

A = TypeVar("A")

Blocks: TypeAlias = tuple[int | None, int]
"""(Number of blocks in each stage's paged cache, or None without paging; tokens per block)."""

REAL = "use model=tiny, model=hf or model=random"
"""Advice in error messages of pairs without weights."""

_NOTHING: Mapping[str, Any] = MappingProxyType({})

OverRanks: TypeAlias = Callable[..., Any]
"""A function (``PipelinePlan``, ``Needs``, ``bounds`` of layers, ``exits``) -> ``Executor`` that
runs the stages in separate processes; executors get it as runtime object ``over_ranks``.
"""


class ModelPair:
    """A target and what accompanies it: draft models, exit heads, EAGLE heads, n-gram counts.

    A subclass sets ``vocab_size``, ``num_layers`` and ``weight_bytes``, implements ``stage``, and
    overrides the methods for what else it has. The defaults raise ``UserError`` for what a pair
    lacks. Sizes are known before any weights are loaded, because executors are planned with them.

    Attributes:
        vocab_size, num_layers: vocabulary size and number of layers of the target.
        weight_bytes: name of each model ("target", "draft", "middle") -> bytes of its weights.
        needed_bytes: memory for the weights of all models, in bytes; 0 where none are loaded.
        shared_bytes: name of a model -> bytes among its ``weight_bytes`` that a device with the
            whole target has already (the matrices of the target that an EAGLE head uses).
        head_cost: cost of the output head in layers: its number of weights over that of a layer.
        max_positions: number of positions of the target; None for no limit.
        tokenizer: shared by all models; None: prompts are random tokens, and ``data=`` is not read.
        dtype: dtype of the weights: float64, float32, bfloat16 or float16; None without weights.
        device: torch's name of the models' device.
        backend: what runs the passes, eager or onnx; None without weights.
        is_synthetic: whether the target's tokens are given instead of computed by a model.
        option: the value of ``model=``, for messages.
        about: for pairs of recorded values: the models, data and sampling they come from.
    """

    vocab_size: int
    num_layers: int
    weight_bytes: Mapping[str, int]
    needed_bytes: int = 0
    shared_bytes: Mapping[str, int] = _NOTHING
    head_cost: float = 0.0
    max_positions: int | None = None
    eos_ids: frozenset[int] = frozenset()
    tokenizer: PreTrainedTokenizerBase | None = None
    dtype: str | None = None
    device: str = "cpu"
    backend: str | None = None
    is_synthetic: bool = False
    option: str = ""
    about: Mapping[str, Any] = _NOTHING

    def section(self) -> dict[str, Any]:
        """Returns the section ``model`` of a configuration that describes this pair: its class, and
        the names of ``target`` and ``draft`` for labels.
        """
        models = self.about.get("model")
        models = models if isinstance(models, Mapping) else {}
        target = models.get("target") or self.about.get("law") or self.option or type(self).__name__
        draft = models.get("draft") or self.about.get("draft")
        return {"kind": type(self).__name__, "target": target, "draft": draft}

    def stage(
        self, first: int, last: int, meter: Meter, *, capture: Sequence[HiddenName] = ()
    ) -> Stage:
        """Loads the target's layers ``first`` .. ``last`` (exclusive), whose passes return the
        hidden states ``capture``.
        """
        raise NotImplementedError

    def answerer(self, *, draws: KeyedDraws, needs_probs: bool) -> Answerer:
        """Returns the object that samples the target's tokens from its logits with ``draws``. With
        ``needs_probs``, it returns the target's distributions too.
        """
        return ModelAnswerer(draws=draws, needs_probs=needs_probs)

    def without_target(self) -> Self:
        """Returns the pair for a process that does not run the target, because others do: at most
        single layers of the target are loaded there.
        """
        return self

    @property
    def exit_layer(self) -> int:
        """Number of layers before the early exit; ``UserError`` if the pair has none."""
        raise UserError(
            "source=early_exit reads the target's hidden states, which"
            f" {self._label} does not have; {REAL}"
        )

    def exit_stage(self, first: int, last: int, meter: Meter, exits: Sequence[int]) -> ExitStage:
        """Loads the target's layers ``first`` .. ``last`` (exclusive) with exit heads. ``exits``
        has the number of target layers before each.
        """
        raise AssertionError(self.exit_layer)

    def runner(self, name: str, meter: Meter) -> ModelRunner:
        raise UserError(f"{self._label} has no {name} model; choose a source without one")

    def artefact(self, kind: type[A], **options: Any) -> A:
        """Loads weights or tables that accompany the models, as an object of class ``kind``, such
        as ``MedusaHeads``; UserError if the pair has none.

        A ``HuggingFacePair`` calls ``kind.from_pair(pair, **options)``, which may use its ``part``
        (layers, norm and output matrix of the target), ``heads_folder`` (folder of trained heads)
        and ``token_samples()`` (text for n-gram counts).
        """
        raise UserError(
            f"{kind.__name__} needs a model or text, which {self._label} does not have; {REAL},"
            " or source=draft_model"
        )

    def sequences(self, model: str) -> Any:
        """Returns the target's given tokens and how ``model``, "draft" or "middle", ranks
        them, as a ``specdec.sources.synthetic.HiddenPair``; UserError if the pair has real models,
        or no ranks of this model.
        """
        raise UserError(
            "source=synthetic proposes for model=synthetic only; choose source=draft_model"
        )

    def prompts(self) -> list[tuple[int, IntArray]] | None:
        return None

    def conditions(self) -> dict[str, Any]:
        return {}

    def fitted_source(self, source: Any, policy: Mapping[str, Any]) -> Any:
        """Returns the configuration node ``source``. A pair without models may return a copy in
        which its own draft replaces draft models, or raise ``UserError``.
        """
        return source

    @property
    def _label(self) -> str:
        return f"model={self.option}" if self.option else type(self).__name__


def deliverable(needs: Needs, num_layers: int, *, exits: bool = False) -> Needs:
    """Returns ``needs`` without the hidden states that the target's stages cannot deliver. Stages
    deliver the residual stream after each layer and, for the last layer, also the normed state;
    stages with exit heads deliver none.
    """

    def given(names: Sequence[HiddenName]) -> tuple[HiddenName, ...]:
        last = num_layers - 1
        inside = (n for n in names if n.layer == last or (0 <= n.layer < last and not n.normed))
        return () if exits else tuple(inside)

    return replace(needs, hidden=given(needs.hidden), early_hidden=given(needs.early_hidden))
