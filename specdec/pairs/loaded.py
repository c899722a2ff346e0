from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdec.errors import UserError
from specdec.models.bundled import family_path
from specdec.models.eagle_loading import HeadFiles
from specdec.pairs.huggingface import HuggingFacePair
from specdec.pairs.options import ModelOptions
from specdec.types import IntArray


class LoadedPair(HuggingFacePair):
    """Models that the caller has loaded, in their own dtype and on their own device.

        pair = LoadedPair(target=model, draft=small, tokenizer=tokenizer)
        specdec.generate("def fib(n):", pair=pair)

    The models are not changed; their weights are not copied.
    """

    def __init__(
        self,
        *,
        target: PreTrainedModel,
        draft: PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        eagle_head: str | Path | None = None,
        eos_ids: Sequence[int] = (),
        exact: bool = False,
    ) -> None:
        """Checks that the models fit each other.

        Args:
            target: a decoder-only language model.
            draft: a smaller one with the same tokenizer; None for sources without a draft model.
            tokenizer: tokenizer of both; without one, prompts are token ids.
            eagle_head: folder of an EAGLE head trained for the target.
            eos_ids: tokens that end a request. Default: none.
            exact: whether a row's result must have the same bits in every pass (docs/exact.md).

        Raises:
            UserError: models in training mode, on several devices, of different types, or with
                different vocabularies.
        """
        models = {"target": target} | ({} if draft is None else {"draft": draft})
        for name, model in models.items():
            _check_model(name, model)
        if draft is not None:
            _check_draft(target, draft)
        super().__init__(ModelOptions(exact=exact))
        self.dtype = str(target.dtype).removeprefix("torch.")
        self.device = str(target.device)
        self._models, self._eagle, self.names = models, eagle_head, tuple(models)
        self.tokenizer, self.eos_ids = tokenizer, frozenset(eos_ids)

    def new_model(self, name: str) -> PreTrainedModel:
        if name != "draft":
            return super().new_model(name)
        raise UserError(
            "this strategy drafts with a draft model: pass one (draft_model=), or choose one"
            " without, such as strategy=prompt_lookup or strategy=suffix"
        )

    @property
    def heads_folder(self) -> Path | None:  # type: ignore[override]
        raise UserError(
            "this strategy drafts with exit or Medusa heads, which models in memory do not have:"
            " choose another one, or use model.exit_heads=FOLDER on the command line"
        )

    @cached_property
    def eagle_files(self) -> HeadFiles:
        if self._eagle is None:
            raise UserError(
                "this strategy drafts with an EAGLE head: pass its folder (eagle_head=), or choose"
                " another strategy"
            )
        return HeadFiles(Path(family_path(str(self._eagle))))

    def token_samples(self) -> IntArray:
        raise UserError(
            "this strategy needs n-gram counts, which models in memory do not have: choose"
            " strategy=prompt_lookup, or use model.ngram=FILE on the command line"
        )


def _check_model(name: str, model: PreTrainedModel) -> None:
    if model.training:
        raise UserError(f"the {name} model is in training mode: call its eval() first")
    devices = sorted({str(p.device) for p in model.parameters()})
    if len(devices) != 1 or devices == ["meta"]:
        raise UserError(
            f"the {name} model is on {', '.join(devices)}: load it on one device (device_map=None)"
        )


def _check_draft(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    configs = [model.config.get_text_config() for model in (target, draft)]
    for what, values in {
        "vocabulary": [config.vocab_size for config in configs],
        "dtype": [target.dtype, draft.dtype],
        "device": [target.device, draft.device],
    }.items():
        if values[0] != values[1]:
            raise UserError(
                f"target and draft differ in their {what} ({values[0]} and {values[1]}): pass a"
                " draft with the target's"
            )
