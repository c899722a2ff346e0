"""Pairs from folders, from the hub, or from the bundled family."""

from __future__ import annotations

from functools import cache, cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdec.errors import UserError
from specdec.models import ModelInfo, inspect_model, load_model, load_tokenizer
from specdec.models.bundled import family_path
from specdec.models.execution import Execution
from specdec.models.exits import HeadWeights, read_head
from specdec.models.loading import end_tokens, load_stage, weight_bytes
from specdec.models.medusa import Weights, read_medusa
from specdec.models.quantize import Quantization, num_bytes, quantize
from specdec.pairs.huggingface import HuggingFacePair, head_cost
from specdec.sources.katz import KatzModel
from specdec.tensor_parallel import Collective


class PretrainedPair(HuggingFacePair):
    """Models from folders, from the hub, or from the bundled family.

    Attributes:
        parts_only: true in ranks of a pipeline: stages load their own layers and nothing else.
    """

    parts_only = False

    def __init__(
        self,
        *,
        target: str,
        draft: str | None,
        ngram: str | None,
        dtype: str,
        device: str,
        attention: str,
        graphs: str = "off",
        kernels: str = "torch",
        compile: bool = False,
        quantization: str = "none",
        exit_layer: int | None = None,
        exit_head: str = "transformer",
        exit_heads: str | None = None,
    ) -> None:
        """Checks the paths; nothing is loaded yet.

        Args:
            target: path, hub id or ``bundled:NAME``.
            draft: likewise; None where no strategy needs one.
            ngram: safetensors file of token samples that n-gram models are counted from.
            dtype, device, attention, exit_layer, exit_head: see ``HuggingFacePair``.
            graphs, kernels, compile: see ``specdec.models.execution.Execution``.
            quantization: see ``specdec.models.quantize``.
            exit_heads: folder of trained heads (KIND-LAYER.safetensors); None for an untrained one.

        Raises:
            UserError: for a path without a usable model, or vocabularies that differ.
        """
        super().__init__(
            dtype=dtype,
            device=device,
            attention=attention,
            execution=Execution(graphs=graphs, kernels=kernels, compile=compile),
            quantization=quantization,
            exit_layer=exit_layer,
            exit_head=exit_head,
        )
        self._heads = None if exit_heads is None else Path(family_path(exit_heads))
        if self._heads is not None and not self._heads.is_dir():
            raise UserError(
                f"model.exit_heads={exit_heads} is not a folder: name the one that holds the heads,"
                " or take an untrained head with model.exit_heads=null"
            )
        self._target_info = inspect_model(family_path(target))
        self._draft_info = None if draft is None else inspect_model(family_path(draft))
        self._ngram = None if ngram is None else Path(family_path(ngram))
        if self._ngram is not None and not self._ngram.is_file():
            raise UserError(
                f"model.ngram={ngram}: no such file; give a safetensors file of samples"
            )
        check_vocabularies(self._target_info, self._draft_info)

    @cached_property
    def target(self) -> PreTrainedModel:
        """The target model."""
        loaded = load_model(self._target_info, dtype=self.dtype, device=self.device)
        return quantize(loaded, self._quantization)

    @cached_property
    def draft(self) -> PreTrainedModel:
        """The draft model."""
        if self._draft_info is None:
            raise UserError(
                "this strategy needs a draft model; give model.draft=PATH (same tokenizer as the"
                " target) or a source without one, e.g. source=prompt_lookup"
            )
        loaded = load_model(self._draft_info, dtype=self.dtype, device=self.device)
        return quantize(loaded, self._quantization)

    def part(self, first: int, last: int) -> PreTrainedModel:
        """The whole target; only the layers asked for where ``parts_only`` is set."""
        if self.parts_only and last - first < self.num_layers:
            return self.lone_part(first, last)
        return self.target

    def lone_part(self, first: int, last: int) -> PreTrainedModel:
        """The target's layers ``first`` .. ``last`` and nothing else of it."""
        info = self._target_info
        loaded = load_stage(info, first, last, dtype=self.dtype, device=self.device)
        return quantize(loaded, self._quantization)

    def share(self, first: int, last: int, group: Collective) -> PreTrainedModel:
        """One rank's share of the target's layers, which is all that is read."""
        info = self._target_info
        return load_stage(info, first, last, dtype=self.dtype, device=self.device, group=group)

    def draft_share(self, group: Collective) -> PreTrainedModel:
        """One rank's share of the draft, which is all that is read."""
        info = self._draft_info
        if info is None:
            return super().draft_share(group)  # which says what is missing
        return load_stage(
            info, 0, info.num_layers, dtype=self.dtype, device=self.device, group=group
        )

    def head_weights(self, layer: int) -> HeadWeights:
        """The exit head from its file; an untrained one where no folder is given."""
        if self._heads is None:
            return super().head_weights(layer)
        return read_head(self._heads, self._exit[1], layer)

    def medusa_weights(self, num_heads: int) -> list[Weights]:
        """Medusa heads from their files; untrained ones where no folder is given."""
        if self._heads is None:
            return super().medusa_weights(num_heads)
        return read_medusa(self._heads, self.num_layers, num_heads)

    @property
    def num_layers(self) -> int:
        """Layers of the target, from its config."""
        return self._target_info.num_layers

    @property
    def vocab_size(self) -> int:
        """Tokens of the target's vocabulary, from its config."""
        return self._target_info.vocab_size

    @property
    def head_cost(self) -> float:
        """Weights of the head over those of a layer, from the config, without loading them."""
        info = self._target_info
        total = self.weight_bytes[0] // getattr(torch, self.dtype).itemsize
        matrix = info.vocab_size * info.hidden_size
        return head_cost(matrix, total, tied=info.tied, layers=info.num_layers)

    @property
    def max_positions(self) -> int | None:
        """Positions of the target, from its config; None where that is silent."""
        return self._target_info.max_positions or None

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end a request, without loading the model."""
        return end_tokens(self._target_info)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The target's tokenizer."""
        return load_tokenizer(self._target_info.path)

    @cached_property
    def weight_bytes(self) -> tuple[int, int]:
        """Bytes of weights, without loading them unless quantised; 0 for an absent draft."""
        draft = self._draft_info
        if self._quantization != Quantization.NONE:
            return num_bytes(self.target), 0 if draft is None else num_bytes(self.draft)
        return (
            weight_bytes(self._target_info, self.dtype),
            0 if draft is None else weight_bytes(draft, self.dtype),
        )

    def katz(self) -> KatzModel:
        """Counted from the pair's token samples, once per process."""
        if self._ngram is None:
            raise UserError(
                "this strategy needs n-gram counts; give model.ngram=FILE (safetensors with a 1-d"
                " integer tensor `tokens`), or choose source=prompt_lookup"
            )
        return _katz_from_file(self._ngram, self.vocab_size)


def check_vocabularies(target: ModelInfo, draft: ModelInfo | None) -> None:
    """Refuses a draft whose vocabulary is not the target's.

    Raises:
        UserError: naming both sizes, or the differing tokenizers.
    """
    if draft is None:
        return
    if target.vocab_size != draft.vocab_size:
        raise UserError(
            f"model.draft has a vocabulary of {draft.vocab_size} tokens, model.target has"
            f" {target.vocab_size}; give a draft trained with the target's tokenizer"
        )
    files = [info.path / "tokenizer.json" for info in (target, draft)]
    if all(f.is_file() for f in files) and files[0].read_bytes() != files[1].read_bytes():
        tokenizers = [load_tokenizer(info.path) for info in (target, draft)]
        if tokenizers[0].get_vocab() != tokenizers[1].get_vocab():
            raise UserError(
                f"model.draft ({draft.path.name}) and model.target ({target.path.name}) number"
                " their tokens differently; give a draft trained with the target's tokenizer"
            )


@cache
def _katz_from_file(path: Path, vocab_size: int) -> KatzModel:
    try:
        tokens = load_file(path)["tokens"].astype("int64").ravel()
        return KatzModel.from_tokens(tokens, order=3, vocab_size=vocab_size, separator=0)
    except (SafetensorError, KeyError, ValueError) as error:
        raise UserError(
            f"model.ngram={path.name} cannot be used ({type(error).__name__}: {error}); give a"
            " safetensors file with a 1-d integer tensor `tokens`, as `specdec train ngram` writes"
        ) from error
