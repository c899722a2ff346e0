"""The part of a model pair's interface that token sources use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

A = TypeVar("A")


class SourcePair(Protocol):
    """A target and its draft, as sources see them; ``specdec.pairs.ModelPair`` has the rest."""

    is_synthetic: bool
    """Whether tokens are made up: there are no models and no text."""
    dtype: str
    """Of the weights: float64, float32, bfloat16 or float16."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def num_layers(self) -> int:
        """Layers of the target."""
        ...

    @property
    def head_cost(self) -> float:
        """Cost of the output head in layers: its number of weights over that of a layer."""
        ...

    @property
    def weight_bytes(self) -> Mapping[str, int]:
        """Name of each model ("target", "draft", "middle") -> bytes of its weights."""
        ...

    @property
    def exit_layer(self) -> int:
        """Number of layers before the early exit.

        Raises:
            UserError: the pair has no early exit.
        """
        ...

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
        ...
