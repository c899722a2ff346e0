"""Base class of pairs of Hugging Face models; its subclasses define where weights come from."""

from __future__ import annotations

# Attributes of ModelPair are computed on first use, which mypy takes for a narrower override.
# mypy: disable-error-code="override"
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import torch

from specdec.attention.backends import auto_attention
from specdec.clocks.meter import Meter
from specdec.errors import UserError
from specdec.executors.exits import ExitStage, NormHead
from specdec.executors.models import A, ModelPair
from specdec.executors.stage import ModelStage
from specdec.models.config_values import config_value
from specdec.models.execution import Execution
from specdec.models.exits import HeadWeights, head_model
from specdec.models.inspection import ModelInfo
from specdec.models.loading import DTYPES, sharded
from specdec.models.onnx.support import problem as onnx_problem
from specdec.models.packing import num_bytes, round_weights
from specdec.models.runner import ModelRunner, check_family
from specdec.models.slicing import final_norm
from specdec.models.vocabulary import TRANSLATED, Vocabulary
from specdec.pairs.options import ModelOptions
from specdec.types import HiddenName, IntArray

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from specdec.models.eagle import EagleHead
    from specdec.models.eagle_loading import HeadFiles
    from specdec.tensor_parallel.collective import Collective

H = TypeVar("H")


_MISSING = {
    "draft": "this strategy needs a draft model; give model.draft=PATH (same tokenizer as the"
    " target) or a source without one, e.g. source=prompt_lookup",
    "middle": "this strategy needs a middle model: give model.middle=PATH (model=random:"
    " model.middle_layers=LAYERS), or use the draft",
    TRANSLATED: "source=translated needs a draft with another tokenizer: give"
    " model.translated=PATH, or use source=draft_model with a draft that has the target's"
    " tokenizer",
}


class HuggingFacePair(ModelPair):
    """Models of transformers, loaded on first use.

    Subclasses override ``new_model`` and, if they have them, the tokenizer, token samples, EAGLE
    heads, and the vocabulary of a draft with another tokenizer.

    Attributes:
        names: names of the models that a strategy may use: "target", "draft", "middle".
        dtype, device: values of the options, with "auto" replaced by the value for this machine.
        heads_folder: folder of trained exit and Medusa heads; None: heads are untrained.
    """

    dtype: str
    names: tuple[str, ...] = ("target", "draft")
    heads_folder: Path | None = None

    def __init__(self, options: ModelOptions) -> None:
        self.options = options
        self.dtype = "float32" if options.dtype == "auto" else options.dtype
        here = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = here if options.device == "auto" else options.device
        self._models: dict[str, PreTrainedModel] = {}
        self._checked: set[int] = set()  # ids of models that have passed ``check_family``

    @property
    def attention(self) -> str:
        if self.options.attention == "auto":
            return auto_attention(torch.device(self.device), DTYPES[self.dtype])
        return self.options.attention

    @property
    def target(self) -> PreTrainedModel:
        return self.model("target")

    @property
    def draft(self) -> PreTrainedModel:
        return self.model("draft")

    def model(self, name: str) -> PreTrainedModel:
        if name not in self._models:
            self._models[name] = self.new_model(name)
        return self._models[name]

    def new_model(self, name: str) -> PreTrainedModel:
        """Loads or creates the model ``name``, ready to run; UserError if the pair lacks it."""
        raise UserError(_MISSING[name])

    def section(self) -> dict[str, Any]:
        names = {name: self.model_name(name) for name in self.names}
        chosen = {"dtype": self.dtype, "device": self.device, "backend": self.backend}
        return {"kind": type(self).__name__, **names, **asdict(self.options), **chosen}

    def model_name(self, name: str) -> str:
        config = self.model(name).config
        return str(
            config.name_or_path or f"{config.model_type} of {config.num_hidden_layers} layers"
        )

    def quantised(self, model: PreTrainedModel, name: str) -> PreTrainedModel:
        bits = self.options.bits_of(name)
        return round_weights(model, bits) if bits else model

    @cached_property
    def backend(self) -> str:
        return self.backend_of()

    def backend_of(self, *heads: PreTrainedConfig) -> str:
        if self.options.backend == "eager":
            return "eager"
        where = DTYPES[self.dtype], torch.device(self.device)
        return self.options.onnx_or_eager(
            [onnx_problem(config, *where) for config in (*self.configs, *heads)]
        )

    @cached_property
    def configs(self) -> Sequence[PreTrainedConfig]:
        return [self.model(name).config.get_text_config() for name in self.names]

    @cached_property
    def info(self) -> ModelInfo:
        config = self.target.config.get_text_config()
        return ModelInfo(
            path=Path(),
            model_type=config.model_type,
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            max_positions=config_value(config, "max_position_embeddings", 0),
            tied=config.tie_word_embeddings,
            has_mtp=bool(getattr(config, "num_mtp_layers", 0)),
            tensors={},
        )

    @cached_property
    def vocab_size(self) -> int:
        return self.info.vocab_size

    @cached_property
    def num_layers(self) -> int:
        return self.info.num_layers

    @cached_property
    def max_positions(self) -> int | None:
        return self.info.max_positions or None

    @cached_property
    def weight_bytes(self) -> Mapping[str, int]:
        return {n: num_bytes(self.model(n), self.options.bits_of(n)) for n in self.names}

    @cached_property
    def head_cost(self) -> float:
        """Cost of the output head in layers: its number of weights over that of one layer."""
        info = self.info
        matrix = info.vocab_size * info.hidden_size
        total = self.weight_bytes["target"] // DTYPES[self.dtype].itemsize
        layers = total - (1 if info.tied else 2) * matrix  # without head and embeddings
        return matrix * info.num_layers / max(1, layers)

    def part(self, first: int, last: int) -> PreTrainedModel:
        return self.target

    def share(
        self, name: str, group: Collective, layers: tuple[int, int] | None = None
    ) -> PreTrainedModel:
        return sharded(self.model(name), group)

    def stage(
        self,
        first: int,
        last: int,
        meter: Meter,
        group: Collective | None = None,
        capture: Sequence[HiddenName] = (),
    ) -> ModelStage:
        """Builds a stage of the target's layers ``first`` .. ``last`` (exclusive).
        All ranks of a tensor-parallel ``group`` must run the same batches in the same order.
        """

        def load() -> PreTrainedModel:
            layers = first, last
            return self.part(*layers) if group is None else self.share("target", group, layers)

        bounds = {"first_layer": first, "last_layer": last, "capture": capture}
        exact = self.options.exact
        return ModelStage(runner=self._runner("target", meter, load, group, exact=exact, **bounds))

    def runner(self, name: str, meter: Meter, group: Collective | None = None) -> ModelRunner:
        if group is None:
            return self._runner(name, meter, lambda: self.model(name))
        return self._runner(name, meter, lambda: self.share(name, group), group)

    def _runner(
        self,
        name: str,
        meter: Meter,
        load: Callable[[], PreTrainedModel],
        group: Collective | None = None,
        *,
        exact: bool = False,
        **layers: Any,
    ) -> ModelRunner:
        options, execution = self.options, Execution(exact=exact)
        if group is None:
            execution = Execution(
                graphs=options.graphs,
                kernels=options.kernels,
                backend=self.backend,
                bits=options.bits_of(name),
                exact=exact,
            )
        elif options.backend == "onnx":
            raise UserError(
                "model.backend=onnx cannot run shares of a tensor-parallel group: use"
                " model.backend=eager, or executor.target_degree and draft_degree of 1 (null)"
            )
        with nullcontext() if group is None else group.paused():
            model = load()
            if group is None and id(model) not in self._checked:
                check_family(model)
                self._checked.add(id(model))
            return ModelRunner(
                model=model,
                name=name,
                meter=meter,
                attention=self.attention,
                execution=execution,
                group=group,
                **layers,
            )

    @property
    def exit_layer(self) -> int:
        layer = self.options.exit_layer
        if layer is None:
            raise UserError("source=early_exit needs an exit: give model.exit_layer=LAYERS")
        if not 1 <= layer < self.num_layers:
            raise UserError(
                f"model.exit_layer={layer} must be at least 1 and below the target's"
                f" {self.num_layers} layers"
            )
        return layer

    def exit_stage(
        self,
        first: int,
        last: int,
        meter: Meter,
        exits: Sequence[int],
        group: Collective | None = None,
    ) -> ExitStage:
        """Builds a stage with exit heads after each number of target layers in ``exits``.
        The ranks of a tensor-parallel ``group`` split the layers, but each has the complete heads.
        """
        outside = [layer for layer in exits if not first < layer <= last]
        assert not outside, f"exits {outside} are not in {first} .. {last}"
        body = self.stage(first, last, meter, group, [HiddenName(layer - 1) for layer in exits])
        return ExitStage(body=body, heads={layer: self._exit_head(meter, layer) for layer in exits})

    def _exit_head(self, meter: Meter, layer: int) -> NormHead | ModelStage:
        template = self.part(layer - 1, layer)  # one layer: a rank loads no more than this
        weights = HeadWeights.from_pair(self, layer=layer)
        if "output.weight" not in weights.tensors:  # the target's, which a rank may not have
            output = self.part(self.num_layers - 1, self.num_layers).get_output_embeddings().weight
            if (ids := weights.tensors.get("output.ids")) is not None:
                output = output[ids.to(output.device, torch.long)]
            weights = replace(weights, tensors={**weights.tensors, "output.weight": output})
        model = head_model(template, weights)
        if weights.kind == "norm":
            output = model.get_output_embeddings()
            return NormHead(norm=final_norm(model), output=output, meter=meter)
        first = weights.layer
        runner = self._runner("exit", meter, lambda: model, first_layer=first, last_layer=first + 1)
        return ModelStage(runner=runner)

    def artefact(self, kind: type[A], **options: Any) -> A:
        return cast(Any, kind).from_pair(self, **options)  # type: ignore[no-any-return]

    @cached_property
    def eagle_files(self) -> HeadFiles | None:
        return None

    def eagle_head(self, version: Literal[1, 3]) -> EagleHead:
        """Loads the EAGLE head, or creates an untrained one of EAGLE version ``version``."""
        from specdec.models.eagle_loading import load_head, untrained_head  # see ``loading``

        files, last = self.eagle_files, self.part(self.num_layers - 1, self.num_layers)
        embedding, output = self.input_embedding(), last.get_output_embeddings()
        if files is None:
            return untrained_head(version, last.config, embedding=embedding, output=output)
        config = files.head_config(last.config)
        return load_head(files, config, embedding=embedding, output=output)

    def fitted(
        self, name: str, make: Callable[[], H], fit: Callable[[H, Any], H]
    ) -> tuple[H, bool]:
        """Returns a drafter that is not loaded from files, and whether it has been trained.

        Default: ``make()``, untrained. Pairs of random models train it on their target by ``fit``.
        """
        return make(), False

    def input_embedding(self) -> torch.Tensor:
        return self.part(0, 1).get_input_embeddings().weight.detach()  # type: ignore[no-any-return]

    def token_samples(self) -> IntArray:
        raise NotImplementedError

    def vocabulary(self, name: str) -> Vocabulary:
        raise UserError(_MISSING[TRANSLATED])
