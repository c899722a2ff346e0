"""EAGLE-3 heads of a frozen target: recipe and evaluation.

Shape letters: B sequences, T positions, V vocabulary, U draft vocabulary, E hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.errors import UserError
from specdec.files import write_json
from specdec.models.config_values import config_value
from specdec.models.eagle import EagleConfig, EagleHead, default_layers
from specdec.models.eagle_loading import HeadFiles, load_head, save_head
from specdec.models.eagle_unroll import unroll
from specdec.parts.fields import Count
from specdec.train.agreement import agreement_by_data, check_evaluation
from specdec.train.draft import sample_target
from specdec.train.eagle_loss import TrainingTimeTest, read_target
from specdec.train.lm import Pretraining
from specdec.train.model import (
    INIT_STD,
    ModelShape,
    load_weights,
    weights_hash,
    weights_of,
)
from specdec.train.plan import RunPlan
from specdec.train.recipes import Teacher, need, read_frozen, train_and_save
from specdec.train.sections import build
from specdec.train.session import Session, rank_and_size
from specdec.train.streams import Mixture
from specdec.train.target import Target

NAME = "eagle3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Spec:
    """Configuration of a head; conf/train/eagle3_head.yaml describes the keys.

    ``layers`` has the number of the target's layers before each stream that the head reads; None:
    2, L // 2 and L - 3 for a target of L layers. Other None values are the target's.
    """

    layers: tuple[Count, ...] | None = None
    feed_forward: Count | None = None
    num_heads: Count | None = None
    num_kv_heads: Count | None = None
    draft_vocabulary: Count | None = None
    norm_before_residual: bool = False
    fc_norm: bool = False
    norm_output: bool = False


class TrainedHead(EagleHead):
    """An EAGLE head with what ``lm.Pretraining`` reads; ``shape`` is the target's."""

    shape: ModelShape

    @property
    def device(self) -> torch.device:
        return self.fc.weight.device


def head_config(target: Target, spec: Eagle3Spec) -> EagleConfig:
    config, shape = target.config, target.shape
    layers = spec.layers or tuple(layer + 1 for layer in default_layers(shape.num_layers))
    if max(layers) > shape.num_layers:
        raise UserError(
            f"head.layers={list(layers)}: the target has {shape.num_layers} layers only"
        )
    vocabulary = spec.draft_vocabulary or shape.vocab_size
    if vocabulary > shape.vocab_size:
        raise UserError(
            f"head.draft_vocabulary={vocabulary}: the target has {shape.vocab_size} tokens only"
        )
    width = target.get_input_embeddings().weight.shape[1]
    if width != shape.hidden:
        raise UserError(
            f"the target's embeddings have width {width}, its hidden states {shape.hidden}: an"
            " EAGLE-3 head needs equal widths"
        )
    rope = config_value(config, "rope_parameters", {})
    if "rope_theta" not in rope:  # learned positions, or frequencies by kind of layer
        rope = {"rope_type": "default", "rope_theta": 10000.0}
    return EagleConfig(
        version=3,
        layers=tuple(layer - 1 for layer in layers),
        hidden_size=shape.hidden,
        intermediate_size=spec.feed_forward or shape.feed_forward,
        num_heads=spec.num_heads or shape.num_heads,
        num_kv_heads=spec.num_kv_heads or shape.num_kv_heads,
        head_dim=shape.head_dim,
        target_hidden_size=shape.hidden,
        vocab_size=shape.vocab_size,
        draft_vocab_size=vocabulary,
        eps=config_value(config, "rms_norm_eps", 1e-6),
        rope=rope,
        max_positions=shape.max_positions,
        norm_before_residual=spec.norm_before_residual,
        fc_norm=spec.fc_norm,
        norm_output=spec.norm_output,
    )


def frequent_tokens(mixture: Mixture, limit: int, vocab_size: int) -> Tensor:
    """Returns int64[limit]: the most frequent tokens of a mixture of streams, ids rising."""
    share_V = np.zeros(vocab_size)
    for share, ids in zip(mixture.share, mixture.streams.values(), strict=True):
        share_V += share * np.bincount(ids, minlength=vocab_size) / len(ids)
    return torch.from_numpy(np.sort(np.argsort(-share_V, kind="stable")[:limit]))


def new_head(target: Target, config: EagleConfig, ids_U: Tensor | None, seed: int) -> TrainedHead:
    """Creates a head with the target's norm and output matrix, or its rows ``ids_U``.

    The other matrices are random: normal, of deviation INIT_STD.
    """
    head = TrainedHead(config, embedding=target.get_input_embeddings().weight)
    head.shape, head.target_ids = target.shape, ids_U
    generator = torch.Generator().manual_seed(seed)
    for weight in head.parameters():
        if weight.dim() == 2:
            nn.init.normal_(weight, std=INIT_STD, generator=generator)
    matrix = target.get_output_embeddings().weight
    with torch.no_grad():
        signs_E = torch.ones(config.hidden_size, device=target.device)
        signs_E[::2] = -1.0  # mean 0, square 1: RMS and layer norms only scale it
        head.norm.weight.copy_(target.norm(signs_E) * signs_E)
        head.lm_head.weight.copy_(matrix if ids_U is None else matrix[ids_U])
    return head.to(target.device)


def stored_head(target: Target, folder: Path, config: EagleConfig) -> TrainedHead:
    files = HeadFiles(folder)
    stored = files.head_config(target.config)
    if stored != config:
        different = [
            f"{key} is {value}, not {asdict(config)[key]}"
            for key, value in asdict(stored).items()
            if asdict(config)[key] != value
        ]
        raise UserError(f"initial={folder} has another head ({'; '.join(different)}): change head")
    embedding = target.get_input_embeddings().weight
    loaded = load_head(files, stored, embedding=embedding, output=None)
    head = TrainedHead(config, embedding=embedding)
    load_weights(head, weights_of(loaded))
    head.shape, head.target_ids = target.shape, loaded.target_ids
    return head.to(target.device)


def train_eagle3(
    session: Session,
    *,
    head: dict[str, Any],
    initial: str | None,
    loss: dict[str, Any],
    plan: dict[str, Any],
    weights: dict[str, float],
    sampling: dict[str, Any],
    evaluation: dict[str, Any],
) -> None:
    """Trains an EAGLE-3 head of output_dir/target; the target is not changed.

    Writes output_dir/eagle3: the head (bfloat16), training.json (record of the run) and
    measured.json (agreement by data set and step). Arguments: conf/train/eagle3_head.yaml.
    """
    seed, report, folder = session.seed, session.report, session.out / NAME
    spec, schedule = build(Eagle3Spec, head, "head"), RunPlan.of(plan)
    teacher = read_frozen(session)
    target, streams = teacher.model, dict(teacher.streams)
    config = head_config(target, spec)
    objective = build(TrainingTimeTest, loss, "loss", target=target)
    _check_before_sampling(target, schedule, evaluation)
    start = None if initial is None else need(Path(initial), "eagle3_head")
    work = session.work / "heads" / NAME
    streams["samples"] = sample_target(teacher, sampling, work, seed=seed, report=report)
    mixture = Mixture(streams, weights, seed, end=target.ends[0])
    ids_U = None
    if spec.draft_vocabulary not in (None, config.vocab_size):
        ids_U = frequent_tokens(mixture, config.draft_vocab_size, config.vocab_size)
    if start is None:
        trained = new_head(target, config, ids_U, seed)
    else:
        trained = stored_head(target, start, config)
    about = {"head": asdict(spec), "initial": weights_hash(trained), "loss": loss}
    settings = {"target": weights_hash(target), **about}
    model: Any = trained
    run = Pretraining(
        model, mixture, schedule, work, loss=objective, settings=settings, report=report
    )
    extra = {**about, "weights": weights, "sampled_tokens": len(streams["samples"])}
    save: Any = partial(_save, folder=folder)
    train_and_save(run, folder / "training.json", save, extra)
    if rank_and_size()[0] == 0:
        rows = evaluate(teacher, trained, evaluation, objective.steps, session)
        write_json(folder / "measured.json", rows)


def _save(head: TrainedHead, folder: Path) -> None:
    stored = EagleHead(head.config, embedding=torch.empty(0)).bfloat16()
    load_weights(stored, weights_of(head))
    stored.target_ids = head.target_ids
    save_head(stored, folder)


def _check_before_sampling(
    target: Target, schedule: RunPlan, evaluation: Mapping[str, Any]
) -> None:
    """Refuses what would otherwise fail after minutes of sampling or training."""
    if any(phase.layers is not None for phase in schedule.phases):
        raise UserError("plan.phases: an EAGLE-3 head does not grow; leave `layers` out")
    schedule.check(target.shape)
    check_evaluation(target, evaluation)


def predictions(
    target: Target, head: EagleHead, tokens: Tensor, steps: int
) -> list[tuple[int, Tensor]]:
    """Returns logits of each step for the next token at each position; see ``agreement.Predict``.

    Row t of step s predicts token t + 1 from the target's features up to position t - 1 - s, and
    from the head's own outputs after it. The first s + 1 rows have no prediction and repeat the
    next row.
    """
    length = tokens.shape[1]
    padded = F.pad(tokens, (0, steps - 1))  # every step then has rows up to the last token
    features, _ = read_target(target, head, padded)
    result = []
    with target.autocast():
        for step, outputs in enumerate(unroll(head, padded, features, steps)):
            logits = head.target_logits(head.logits(outputs[0, : length - 1 - step]).float())
            missing = logits[:1].expand(step + 1, -1)
            result.append((0, torch.cat([missing, logits])))
    return result


def evaluate(
    teacher: Teacher,
    head: EagleHead,
    evaluation: Mapping[str, Any],
    steps: int,
    session: Session,
) -> list[dict[str, Any]]:
    """Measures top-k agreement by step: step s is a draft's token s + 1 after s right ones."""
    target = teacher.model

    def predict(tokens: Tensor) -> list[tuple[int, Tensor]]:
        return predictions(target, head, tokens, steps)

    rows = []
    sizes = evaluation["prompts"], evaluation["new_tokens"]
    for records in agreement_by_data(target, predict, teacher.tokenizer, *sizes, session.seed):
        rows += [{"head": NAME, "step": step, **row} for step, row in enumerate(records)]
        shares = " ".join(f"{row['outside'][0]:.3f}" for row in records)
        about = records[0]
        session.report(1.0, f"{about['data']}, {about['sampling']}: {shares} outside loops")
    return rows
