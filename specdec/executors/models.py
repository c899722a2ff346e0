"""The base class of model pairs: a target, the models beside it, and what both are worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeAlias, TypeVar

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
"""Blocks of each stage's paged cache (None: caches are not paged), and tokens per block."""

REAL = "use model=tiny, model=hf or model=random"
"""Remedy for pairs without weights."""

_NOTHING: Mapping[str, Any] = MappingProxyType({})


class OverRanks(Protocol):
    """Runs the stages of a pipeline on processes; the runtime object ``over_ranks``."""

    def __call__(
        self, plan: Any, needs: Needs, *, bounds: Sequence[tuple[int, int]], exits: Sequence[int]
    ) -> Any:
        """Starts or joins the ranks.

        Args:
            plan: a ``PipelinePlan``.
            needs: of the parts.
            bounds: half-open layer ranges of the devices.
            exits: number of layers before each early exit.

        Returns:
            An ``Executor``.
        """
        ...


class ModelPair:
    """A target and what accompanies it: draft models, exit heads, EAGLE heads, n-gram counts.

    A subclass sets ``vocab_size``, ``num_layers`` and ``weight_bytes``, implements ``stage``, and
    overrides what else it has. The defaults refuse what a pair does not have with a ``UserError``.
    Sizes are known before any weights are loaded: executors are planned with them.

    Attributes:
        vocab_size, num_layers: of the target.
        weight_bytes: name of each model ("target", "draft", "middle") -> bytes of its weights.
        shared_bytes: name of a model -> bytes among its ``weight_bytes`` that a device with the
            whole target has already (the matrices of the target that an EAGLE head uses).
        head_cost: cost of the output head in layers: its number of weights over that of a layer.
        max_positions: number of positions of the target; None for no limit.
        eos_ids: end-of-sequence tokens.
        tokenizer: of all models; None: prompts are random tokens, and ``data=`` is not read.
        dtype: of the weights: float64, float32, bfloat16 or float16; None without weights.
        device: torch's name of the models' device.
        backend: what runs the passes, eager or onnx; None without weights.
        is_synthetic: whether no model computes the target's tokens.
        option: the value of ``model=`` in messages.
        about: origin of recorded values: models, data, sampling.
    """

    vocab_size: int
    num_layers: int
    weight_bytes: Mapping[str, int]
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

    def stage(
        self, first: int, last: int, meter: Meter, *, capture: Sequence[HiddenName] = ()
    ) -> Stage:
        """Target layers ``first`` .. ``last`` (exclusive).

        Args:
            first, last: layers of the slice.
            meter: counts the passes.
            capture: hidden states, of layers of the slice, that every pass returns.
        """
        raise NotImplementedError

    def answerer(self, *, draws: KeyedDraws, needs_probs: bool) -> Answerer:
        """Turns the target's logits into answers.

        Args:
            draws: of the run.
            needs_probs: whether answers carry the whole target distribution.
        """
        return ModelAnswerer(draws=draws, needs_probs=needs_probs)

    def without_target(self) -> Self:
        """The pair for a process in which other processes run the target.

        It loads single layers of the target for heads that use them, not the whole target.
        """
        return self

    @property
    def exit_layer(self) -> int:
        """Number of layers before the early exit.

        Raises:
            UserError: the pair has no early exit.
        """
        raise UserError(
            "source=early_exit reads the target's hidden states, which"
            f" {self._label} does not have; {REAL}"
        )

    def exit_stage(self, first: int, last: int, meter: Meter, exits: Sequence[int]) -> ExitStage:
        """Target layers ``first`` .. ``last`` with exit heads.

        Args:
            first, last, meter: as for ``stage``.
            exits: number of layers before each exit.
        """
        raise AssertionError(self.exit_layer)

    def runner(self, name: str, meter: Meter) -> ModelRunner:
        """Runner of a whole model besides the target.

        Args:
            name: "draft", "middle".
            meter: counts its passes.

        Raises:
            UserError: there is no such model.
        """
        raise UserError(f"{self._label} has no {name} model; choose a source without one")

    def artefact(self, kind: type[A], **options: Any) -> A:
        """Weights or tables that accompany the models, such as ``MedusaHeads`` or ``KatzModel``.

        The class loads itself: ``kind.from_pair(pair, **options)`` with a ``HuggingFacePair``, of
        which ``part`` gives layers, norm and output matrix of the target, ``heads_folder`` the
        folder of trained heads and ``token_samples()`` text for n-gram counts.

        Args:
            kind: the class.
            options: keyword arguments of ``kind.from_pair``, such as a number of heads.

        Raises:
            UserError: the pair cannot provide it.
        """
        raise UserError(
            f"{kind.__name__} needs a model or text, which {self._label} does not have; {REAL},"
            " or source=draft_model"
        )

    def sequences(self, model: str) -> Any:
        """The target's given tokens and a model's ranks of them, for ``SyntheticSource``.

        Args:
            model: "draft" or "middle".

        Returns:
            A ``specdec.sources.hit_law.HiddenPair``.

        Raises:
            UserError: the pair has real models, or no ranks of that model.
        """
        raise UserError(
            "source=synthetic proposes for model=synthetic only; choose source=draft_model"
        )

    def prompts(self) -> list[tuple[int, IntArray]] | None:
        """(id, int64[T]) of every recorded prompt, in place of ``data=``; None: there is none."""
        return None

    def conditions(self) -> dict[str, Any]:
        """Conditions of a recorded run, which replace those of the configuration."""
        return {}

    def fitted_source(self, source: Any, policy: Mapping[str, Any]) -> Any:
        """The configuration node of the source with the pair's own draft in place of draft models.

        Args:
            source, policy: configuration nodes.

        Raises:
            UserError: the pair's draft cannot serve them.
        """
        return source

    @property
    def _label(self) -> str:
        return f"model={self.option}" if self.option else type(self).__name__


def deliverable(needs: Needs, num_layers: int, *, exits: bool = False) -> Needs:
    """``needs`` without hidden states that the target's stages do not give.

    They give the residual stream of their layers and the last one's state after the final norm;
    stages with exit heads give none.
    """

    def given(names: Sequence[HiddenName]) -> tuple[HiddenName, ...]:
        last = num_layers - 1
        inside = (n for n in names if n.layer == last or (0 <= n.layer < last and not n.normed))
        return () if exits else tuple(inside)

    return replace(needs, hidden=given(needs.hidden), early_hidden=given(needs.early_hidden))
