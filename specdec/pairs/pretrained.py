from __future__ import annotations

# Attributes of ModelPair are computed on first use, which mypy takes for a narrower override.
# mypy: disable-error-code="override"
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakValueDictionary

import transformers
from safetensors import SafetensorError
from safetensors.numpy import load_file

from specdec.errors import UserError
from specdec.models.bundled import family_path
from specdec.models.inspection import ModelInfo, inspect_pair
from specdec.models.loading import (
    Weights,
    end_tokens,
    load_model,
    load_tokenizer,
    own_dtype,
    torch_dtype,
    weight_bytes,
)
from specdec.models.vocabulary import Vocabulary
from specdec.pairs.huggingface import HuggingFacePair
from specdec.pairs.options import ModelOptions, with_flat_options
from specdec.parts.fields import Text, validated
from specdec.types import IntArray

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from specdec.clocks.meter import Meter
    from specdec.models.eagle_loading import HeadFiles
    from specdec.models.runner import ModelRunner
    from specdec.tensor_parallel.collective import Collective

_UNTRAINED = Path("untrained")  # value of ``eagle_head``


class PretrainedPair(HuggingFacePair):
    """A pair of models from local folders, from the hub, or from the bundled family. The defaults
    are those of ``model=hf``.

        pair = PretrainedPair(target="path/to/target", draft="path/to/draft")
    """

    @validated
    def __init__(
        self,
        *,
        target: Text,
        draft: Text | None = None,
        middle: Text | None = None,
        translated: Text | None = None,
        ngram: Text | None = None,
        exit_heads: Text | None = None,
        eagle_head: Text | None = None,
        path: Text | None = None,
        options: ModelOptions = ModelOptions(),  # noqa: B008 - it is frozen
    ) -> None:
        """Checks paths and vocabularies; loads nothing yet.

        Args:
            target: folder, GGUF file, hub id, ``bundled:NAME`` or ``installed:NAME``.
            draft, middle: models in the same notation; None if no strategy needs them.
            translated: a draft with a tokenizer of its own, in the same notation.
            ngram: safetensors file of token samples for n-gram counts.
            exit_heads: folder of trained heads (KIND-LAYER.safetensors); None for untrained ones.
            eagle_head: folder of an EAGLE head, or "untrained"; None if no strategy needs one.
            path: the target's file in ``model=gguf``; if given, it replaces ``target``.
        """
        super().__init__(options)
        target = path or target
        self._names = {"target": target, "draft": draft, "middle": middle, "translated": translated}
        self._files = {"ngram": ngram, "exit_heads": exit_heads, "eagle_head": eagle_head}
        self.heads_folder = (
            None if exit_heads is None else Path(family_path(exit_heads, "model.exit_heads"))
        )
        if self.heads_folder is not None and not self.heads_folder.is_dir():
            raise UserError(
                f"model.exit_heads={exit_heads} is not a folder: give the folder of the heads,"
                " or use untrained heads with model.exit_heads=null"
            )
        self._eagle = (
            None if eagle_head is None else Path(family_path(eagle_head, "model.eagle_head"))
        )
        self._infos = inspect_pair(target=target, draft=draft, middle=middle, translated=translated)
        self.names = tuple(self._infos)
        self.info = self._infos["target"]
        if options.dtype == "auto" and self.device.startswith("cuda"):
            self.dtype = own_dtype(self.info)
        self._ngram = None if ngram is None else Path(family_path(ngram, "model.ngram"))
        if self._ngram is not None and not self._ngram.is_file():
            raise UserError(
                f"model.ngram={ngram}: no such file; give a safetensors file of samples"
            )
        self._weights = Weights()  # parameters in use, which stages share
        self._runs_target = True
        self._runners: WeakValueDictionary[tuple[str, str], ModelRunner] = WeakValueDictionary()

    def section(self) -> dict[str, Any]:
        return {**super().section(), **self._names, **self._files, "kind": "pretrained"}

    def model_name(self, name: str) -> str:
        return str(self._names[name])

    def folder(self, name: str) -> Path:
        if name not in self._infos:
            raise UserError(f"this strategy needs model.{name}=PATH")
        return self._infos[name].path

    @cached_property
    def configs(self) -> Sequence[PreTrainedConfig]:
        folders = [info.path for info in self._infos.values()]
        return [
            transformers.AutoConfig.from_pretrained(folder).get_text_config() for folder in folders
        ]

    def _info(self, name: str) -> ModelInfo:
        if name not in self._infos:
            super().new_model(name)  # raises
        return self._infos[name]

    def new_model(self, name: str) -> PreTrainedModel:
        return self._load(name)

    def _load(
        self,
        name: str,
        layers: tuple[int, int] | None = None,
        group: Collective | None = None,
    ) -> PreTrainedModel:
        loaded = load_model(
            self._info(name),
            dtype=self.dtype,
            device=self.device,
            layers=layers,
            group=group,
            loaded_before=self._weights,
        )
        return self.quantised(loaded, name)

    def _runner(
        self,
        name: str,
        meter: Meter,
        load: Callable[[], PreTrainedModel],
        group: Collective | None = None,
        **layers: Any,
    ) -> ModelRunner:
        # Rows of a comparison share passes, since a session of ONNX Runtime copies the weights.
        key = name, repr(layers)
        if group is not None or name not in self.names:  # heads have weights of their own
            return super()._runner(name, meter, load, group, **layers)
        if (shared := self._runners.get(key)) is not None:
            return shared.with_meter(meter)
        self._runners[key] = runner = super()._runner(name, meter, load, **layers)
        return runner

    def vocabulary(self, name: str) -> Vocabulary:
        info = self._info(name)
        ends = end_tokens(info)
        return Vocabulary(
            load_tokenizer(info.path),
            size=info.vocab_size,
            end=min(ends) if ends else None,
            name=f"model.{name}={info.path.name}",
        )

    def without_target(self) -> Self:
        view = copy(self)
        view._runs_target = False
        return view

    def part(self, first: int, last: int) -> PreTrainedModel:
        if self._runs_target or last - first == self.num_layers:
            return self.target
        return self._load("target", (first, last))

    def share(
        self, name: str, group: Collective, layers: tuple[int, int] | None = None
    ) -> PreTrainedModel:
        return self._load(name, layers or (0, self._info(name).num_layers), group)

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        return end_tokens(self.info)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self.info.path)

    @cached_property
    def weight_bytes(self) -> Mapping[str, int]:
        sizes = {
            name: weight_bytes(info, self.dtype, self.options.bits_of(name))
            for name, info in self._infos.items()
        }
        if self._eagle is not None and (head := self.eagle_files) is not None:
            num = head.num_weights + head.num_shared(self.info.vocab_size)
            sizes["eagle"] = num * torch_dtype(self.dtype).itemsize
        return sizes

    @property
    def needed_bytes(self) -> int:
        needed = sum(self.weight_bytes.values())
        if self.backend == "onnx":
            needed += sum(weight_bytes(info, self.dtype) for info in self._infos.values())
        return needed

    @cached_property
    def shared_bytes(self) -> Mapping[str, int]:
        if self._eagle is None or (head := self.eagle_files) is None:
            return {}
        return {"eagle": head.num_shared(self.info.vocab_size) * torch_dtype(self.dtype).itemsize}

    @cached_property
    def eagle_files(self) -> HeadFiles | None:
        if self._eagle is None:
            raise UserError(
                "this strategy drafts with an EAGLE head; give model.eagle_head=FOLDER (config.json"
                " and model.safetensors, trained for model.target), or choose another source"
            )
        from specdec.models.eagle_loading import HeadFiles  # see ``loading``

        return None if self._eagle == _UNTRAINED else HeadFiles(self._eagle)

    def token_samples(self) -> IntArray:
        if self._ngram is None:
            raise UserError(
                "this strategy needs n-gram counts; give model.ngram=FILE (safetensors with a 1-d"
                " integer tensor `tokens`), or choose source=prompt_lookup"
            )
        return _read_samples(self._ngram)


@cache
def _read_samples(path: Path) -> IntArray:
    try:
        return load_file(path)["tokens"].astype("int64").ravel()
    except (SafetensorError, KeyError, ValueError) as error:
        raise UserError(
            f"model.ngram={path.name} cannot be used ({type(error).__name__}: {error}); give a"
            " safetensors file with a 1-d integer tensor `tokens`"
        ) from error


build_pretrained = with_flat_options(PretrainedPair)


class LoadedPair(HuggingFacePair):
    """A pair of models that the caller has loaded. They are used as they are, with their own dtype
    and on their own device.

        pair = LoadedPair(target=model, draft=small, tokenizer=tokenizer)
        specdec.generate("def fib(n):", pair=pair)
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
            exact: whether rows must have the bits of plain decoding in any pass (docs/exact.md).
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
        from specdec.models.eagle_loading import HeadFiles

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
