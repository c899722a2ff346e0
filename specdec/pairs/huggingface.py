"""Pairs of Hugging Face models: how any of them is run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdec.clocks.meter import Meter
from specdec.errors import UserError
from specdec.executors.answering import Answerer, ModelAnswerer
from specdec.executors.exits import ExitHead, ExitStage, NormHead, TransformerHead
from specdec.executors.stage import ModelStage
from specdec.kernels.graphs import Graphs
from specdec.models import ModelRunner
from specdec.models.execution import PLAIN, Execution
from specdec.models.exits import HeadWeights, final_norm, head_model, untrained_head
from specdec.models.medusa import MedusaHeads, Weights, untrained_medusa
from specdec.models.quantize import Quantization, num_bytes
from specdec.sampling.captured import StaticDraws
from specdec.sampling.keyed_draws import KeyedDraws
from specdec.sampling.transform import TargetSampler
from specdec.sources.katz import KatzModel
from specdec.sources.synthetic import SyntheticPair
from specdec.tensor_parallel import Collective, sharded


class HuggingFacePair:
    """Two Hugging Face models, loaded when first asked for.

    Subclasses say where models, tokenizer and n-gram counts come from.
    """

    is_synthetic = False

    def __init__(
        self,
        *,
        dtype: str,
        device: str,
        attention: str,
        execution: Execution = PLAIN,
        quantization: str = Quantization.NONE,
        exit_layer: int | None = None,
        exit_head: str = "norm",
    ) -> None:
        """Remembers how to load.

        Args:
            dtype: float64, float32, bfloat16 or float16.
            device: a torch device, or auto (a GPU where there is one).
            attention: a value of ``specdec.attention.backends.Attention``, or auto (dense).
            execution: how passes are executed.
            quantization: a value of ``Quantization``, for both models.
            exit_layer: layers before the early exit, PPSD's E; None for no exit.
            exit_head: norm or transformer.
        """
        self._exit = (exit_layer, exit_head)
        self.dtype = dtype
        self._execution = execution
        self._quantization = quantization
        has_gpu = torch.cuda.is_available()
        self.device = ("cuda" if has_gpu else "cpu") if device == "auto" else device
        self._attention = "dense" if attention == "auto" else attention

    @property
    def target(self) -> PreTrainedModel:
        """The target model."""
        raise NotImplementedError

    @property
    def draft(self) -> PreTrainedModel:
        """The draft model."""
        raise NotImplementedError

    @property
    def vocab_size(self) -> int:
        """Tokens of the target's vocabulary."""
        return int(self.target.config.get_text_config().vocab_size)

    @property
    def num_layers(self) -> int:
        """Layers of the target."""
        return int(self.target.config.get_text_config().num_hidden_layers)

    @property
    def head_cost(self) -> float:
        """Weights of the head over those of a layer: decoding reads each once per pass."""
        config = self.target.config.get_text_config()
        matrix = int(config.vocab_size) * int(config.hidden_size)
        total = sum(p.numel() for p in self.target.parameters())
        return head_cost(matrix, total, tied=config.tie_word_embeddings, layers=self.num_layers)

    @property
    def max_positions(self) -> int | None:
        """Positions of the target; a draft with fewer proposes nothing beyond its own."""
        value = getattr(self.target.config.get_text_config(), "max_position_embeddings", None)
        return None if value is None else int(value)

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end a request, as the generation config (or the model config) names them."""
        config = self.target.generation_config
        eos = config.eos_token_id if config is not None else self.target.config.eos_token_id
        if eos is None:
            return frozenset()
        return frozenset(eos if isinstance(eos, list) else [eos])

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The target's tokenizer, if there is one."""
        return None

    @cached_property
    def weight_bytes(self) -> tuple[int, int]:
        """Bytes of the target's and of the draft's weights in memory."""
        return num_bytes(self.target), num_bytes(self.draft)

    def stage(
        self,
        first: int,
        last: int,
        meter: Meter,
        group: Collective | None = None,
        capture_layers: Sequence[int] = (),
    ) -> ModelStage:
        """Layers ``first`` .. ``last`` of the target; with a ``group``, this rank's share of them.

        All ranks of a group must run it on the same batches, one after the other.

        Raises:
            UserError: shares of quantised weights.
        """
        self._check_shares(group)
        with nullcontext() if group is None else group.paused():
            runner = ModelRunner(
                model=self.part(first, last) if group is None else self.share(first, last, group),
                name="target",
                meter=meter,
                first_layer=first,
                last_layer=last,
                capture_layers=capture_layers,
                attention=self._attention,
                execution=self._execution if group is None else PLAIN,
            )
        return ModelStage(runner=runner)

    @property
    def exit_layer(self) -> int:
        """Layers before the early exit.

        Raises:
            UserError: there is none, or it is not inside the target.
        """
        layer = self._exit[0]
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
        """Layers ``first`` .. ``last`` with the heads of the exits among them (or after the last).

        Of a ``group`` that shares the layers, one rank has the whole heads.

        Args:
            first, last: layers of the slice.
            meter: of the run.
            exits: layers before each exit.
            group: ranks that share the layers.
        """
        outside = [layer for layer in exits if not first < layer <= last]
        assert not outside, f"exits {outside} are not in {first} .. {last}"
        body = self.stage(first, last, meter, group, [layer - 1 for layer in exits])
        heads = {}
        for layer in exits:
            like = self.part(layer - 1, layer)  # a rank loads little of it: what modules look like
            heads[layer] = self.exit_head(meter, like, layer)
        return ExitStage(body=body, heads=heads)

    def exit_head(self, meter: Meter, target: PreTrainedModel, layer: int) -> ExitHead:
        """The head of the exit after ``layer`` layers, in modules of ``target``'s kind."""
        weights = self.head_weights(layer)
        if "output.weight" not in weights.tensors:  # the target's own, which a rank may lack
            last = self.part(self.num_layers - 1, self.num_layers)
            output = last.get_output_embeddings().weight
            weights = replace(weights, tensors={**weights.tensors, "output.weight": output})
        model = head_model(target, weights)
        if weights.kind == "norm":
            output = model.get_output_embeddings()
            return NormHead(norm=final_norm(model), output=output, meter=meter)
        runner = ModelRunner(
            model=model,
            name="exit",
            meter=meter,
            first_layer=weights.layer,
            last_layer=weights.layer + 1,
            attention=self._attention,
            execution=self._execution,
        )
        return TransformerHead(stage=ModelStage(runner=runner))

    def head_weights(self, layer: int) -> HeadWeights:
        """Weights of the exit after ``layer`` layers: untrained ones, the target's own."""
        return untrained_head(self.part(layer, self.num_layers), self._exit[1], layer)

    def exit_bytes(self, *, with_layers: bool) -> int:
        """Bytes of weights that a pass of the exit head reads, with or without those before it."""
        size = torch.finfo(getattr(torch, self.dtype)).bits // 8
        head = self.head_weights(self.exit_layer).num_parameters * size
        if not with_layers:
            return head
        layers = self.weight_bytes[0] * self.num_layers / (self.num_layers + self.head_cost)
        return head + round(layers * self.exit_layer / self.num_layers)

    def medusa_heads(self, num_heads: int, meter: Meter, *, alone: bool = False) -> MedusaHeads:
        """Heads on the target's last hidden state; see ``ModelPair``."""
        weights, last = self.medusa_weights(num_heads), self.num_layers - 1
        target = self.lone_part(last, last + 1) if alone else self.target
        return MedusaHeads(target=target, heads=weights, meter=meter)

    def medusa_weights(self, num_heads: int) -> list[Weights]:
        """Their weights: untrained ones."""
        return untrained_medusa(num_heads)

    def part(self, first: int, last: int) -> PreTrainedModel:
        """A model with the weights of (at least) layers ``first`` .. ``last`` of the target."""
        return self.target

    def lone_part(self, first: int, last: int) -> PreTrainedModel:
        """As ``part``, where this process uses nothing else of the target."""
        return self.part(first, last)

    def share(self, first: int, last: int, group: Collective) -> PreTrainedModel:
        """One rank's share (tensor parallelism) of those layers."""
        return sharded(self.target, group)

    def draft_share(self, group: Collective) -> PreTrainedModel:
        """One rank's share of the draft."""
        return sharded(self.draft, group)

    def answerer(self, *, draws: KeyedDraws, needs_probs: bool) -> Answerer:
        """Samples from the target's logits."""
        graphs = self._execution.graphs
        static = None if graphs == Graphs.OFF else StaticDraws(graphs=graphs)
        sampler = TargetSampler(draws=draws, needs_probs=needs_probs, static=static)
        return ModelAnswerer(sampler=sampler)

    def draft_runner(self, meter: Meter, group: Collective | None = None) -> ModelRunner:
        """The whole draft model; with a ``group``, this rank's share of it.

        Raises:
            UserError: shares of quantised weights.
        """
        self._check_shares(group)
        with nullcontext() if group is None else group.paused():
            return ModelRunner(
                model=self.draft if group is None else self.draft_share(group),
                name="draft",
                meter=meter,
                attention=self._attention,
                execution=self._execution if group is None else PLAIN,
            )

    def _check_shares(self, group: Collective | None) -> None:
        if group is not None and self._quantization != Quantization.NONE:
            raise UserError(
                f"model.quantization={self._quantization} cannot be cut into shares: use"
                " executor.target_degree and draft_degree of 1 (null), or plain weights"
            )

    def katz(self) -> KatzModel:
        """The n-gram model that goes with the pair."""
        raise NotImplementedError

    def synthetic(self) -> SyntheticPair:
        """Refused: this pair has real models."""
        raise UserError(
            "source=synthetic proposes for model=synthetic only; choose source=draft_model"
        )


def head_cost(matrix: int, total: int, *, tied: bool, layers: int) -> float:
    """The output head's weights over those of one layer.

    Args:
        matrix: weights of the head, as many as of the embeddings.
        total: weights of the model.
        tied: whether head and embeddings are one matrix (both end stages hold it then).
        layers: number of layers.
    """
    return matrix * layers / max(1, total - (1 if tied else 2) * matrix)
