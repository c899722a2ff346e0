"""The part of a model pair's interface that token sources use."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from specdec.executors.models import PlannedModels

A = TypeVar("A")


class SourcePair(PlannedModels, Protocol):
    """A target and its draft, as sources see them; ``specdec.pairs.ModelPair`` has the rest."""

    is_synthetic: bool
    """Whether tokens are made up: there are no models and no text."""
    dtype: str
    """Of the weights: float64, float32, bfloat16 or float16."""

    @property
    def vocab_size(self) -> int: ...

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
