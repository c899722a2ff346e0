"""The recipes of the draft and of the n-gram samples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save

from specdec.errors import UserError
from specdec.files import write_bytes
from specdec.train.distill import DistillationLoss, sample_documents
from specdec.train.keys import made_of
from specdec.train.lm import Pretraining, Report
from specdec.train.model import save_hf, with_layers
from specdec.train.parallel import rank_and_size, spawned, wait_for_all
from specdec.train.plan import RunPlan
from specdec.train.recipes import (
    Teacher,
    copy_tokenizer,
    pick_device,
    read_teacher,
    record_run,
    set_up,
)
from specdec.train.resuming import keep_settings, weights_hash
from specdec.train.samples import Sampling, docstring_end, function_prompts
from specdec.train.streams import Mixture, load_streams, save_streams


def sampling_rules(sampling: dict[str, Any]) -> list[Sampling]:
    """The rules of a `sampling` section."""
    return [made_of(Sampling, rule, "sampling.rules") for rule in sampling["rules"]]


def docstring_prompts(teacher: Teacher, limit: int, seed: int) -> list[np.ndarray]:
    """Heads of training functions, each cut where its docstring ends."""
    quotes = frozenset(i for text, i in teacher.tokenizer.get_vocab().items() if '"""' in text)
    return function_prompts(teacher.streams["function"], docstring_end(quotes), limit, seed)


def sample_target(
    target: Teacher,
    *,
    work: Path,
    sampling: dict[str, Any],
    seed: int,
    report: Report,
    mark: Callable[[np.ndarray], np.ndarray] | None = None,
) -> np.ndarray:
    """The target's own continuations of training functions' headers and docstrings, as ids.

    Each process of a group samples its share of the prompts; all return all samples.

    Args:
        target: sampled where its model lies; prompts come from its streams "function" and "gsm8k".
        work: folder in which the result is kept, a file per process; a second call with the same
            target and settings reads it back.
        sampling: keys prompts, gsm8k_prompts, new_tokens, batch, minutes, rules (see Sampling).
        seed: of prompts and draws.
        report: progress.
        mark: applied to the ids of each continuation.

    Raises:
        UserError: samples of another target or of other settings lie in the folder.
    """
    rank, size = rank_and_size()
    paths = [work / f"samples-{part}.npz" for part in range(size)]
    begun_with = {"target": weights_hash(target.model), "sampling": sampling, "seed": seed}
    keep_settings(work / "sampling.json", begun_with | {"processes": size}, paths)
    if all(path.exists() for path in paths):
        return np.concatenate([load_streams(path)["samples"] for path in paths])
    prompts = docstring_prompts(target, sampling["prompts"], seed)
    gsm8k = target.streams.get("gsm8k")
    if sampling["gsm8k_prompts"] and gsm8k is not None:
        answer = target.tokenizer.encode("\nAnswer:").ids
        prompts += function_prompts(gsm8k, _ends_with(answer), sampling["gsm8k_prompts"], seed)
    samples = sample_documents(
        target.model,
        prompts[rank::size],
        sampling_rules(sampling),
        new_tokens=sampling["new_tokens"],
        batch=sampling["batch"],
        seed=seed + rank,
        minutes=sampling["minutes"],
        mark=mark,
        report=report,
    )
    save_streams({"samples": samples}, paths[rank])
    wait_for_all()
    return np.concatenate([load_streams(path)["samples"] for path in paths])


def _ends_with(ids: list[int]) -> Callable[[np.ndarray], int]:
    def end(document: np.ndarray) -> int:
        tokens = document[:256].tolist()
        for start in range(len(tokens) - len(ids)):
            if tokens[start : start + len(ids)] == ids:
                return start + len(ids)
        return 0

    return end


def train_draft(
    *,
    work_dir: str,
    output_dir: str,
    target_layers: list[int],
    sampling: dict[str, Any],
    distill_weights: dict[str, float],
    distill_plan: dict[str, Any],
    text_weight: float,
    temperature: float,
    seed: int,
    precision: str,
    compiled: bool,
    num_threads: int,
    num_processes: int,
    device: str,
    report: Report,
) -> None:
    """Distils the draft, which begins as a few of the target's own layers, from the target.

    With the target's embedding and some of its layers a draft starts where one drawn at random
    arrives after hundreds of steps. Arguments: conf/train/draft.yaml. Needs output_dir/target;
    writes output_dir/draft.
    """
    if spawned(train_draft, locals(), num_processes):
        return
    work, out = Path(work_dir), Path(output_dir)
    dtype, place = set_up(num_threads, precision), pick_device(device)
    schedule = RunPlan.of(distill_plan, "distill_plan")
    target = read_teacher(work, out / "target", dtype=dtype, device=place, compiled=compiled)
    draft = with_layers(target.model, target_layers, compiled=compiled).to(place)
    schedule.check(draft.shape)
    distillation = DistillationLoss(
        target.model, text_weight=text_weight, temperature=temperature, compiled=compiled
    )
    samples = sample_target(
        target, work=work / "draft", sampling=sampling, seed=seed, report=report
    )
    streams = {**target.streams, "samples": samples}
    run = Pretraining(
        draft,
        Mixture(streams, distill_weights, seed + 1),
        schedule,
        work / "draft",
        loss=distillation,
        held_out=streams["held_out"],
        settings={
            **{"target": weights_hash(target.model), "target_layers": target_layers},
            **{"text_weight": text_weight, "temperature": temperature},
        },
        report=report,
        compiled=compiled,
    )
    trained = run.run()
    if rank_and_size()[0] == 0:
        save_hf(trained, out / "draft")
        copy_tokenizer(out / "target", out / "draft")
        extra = {"sampled_tokens": len(samples), "target_layers": target_layers}
        record_run(run, out / "draft" / "training.json", extra)


def sample_ngram(
    *,
    work_dir: str,
    output_dir: str,
    sampling: dict[str, Any],
    max_tokens: int,
    seed: int,
    precision: str,
    num_threads: int,
    report: Report,
) -> None:
    """Samples token sequences from the draft for n-gram counts.

    Writes output_dir/ngram/samples.safetensors: int16 "tokens", documents separated by token 0.
    Arguments: conf/train/ngram.yaml.

    Raises:
        UserError: ids above 32767, which do not fit.
    """
    work, out = Path(work_dir), Path(output_dir)
    dtype = set_up(num_threads, precision)
    draft = read_teacher(work, out / "draft", dtype=dtype, device=torch.device("cpu"))
    if draft.model.shape.vocab_size > 32768:
        raise UserError(f"vocabulary of {draft.model.shape.vocab_size} does not fit 16 bits")
    tokens = sample_documents(
        draft.model,
        docstring_prompts(draft, sampling["prompts"], seed),
        sampling_rules(sampling),
        new_tokens=sampling["new_tokens"],
        batch=sampling["batch"],
        seed=seed,
        minutes=sampling["minutes"],
        keep_prompt=False,
        report=report,
    )[:max_tokens]
    data = save({"tokens": tokens.astype(np.int16)})
    write_bytes(out / "ngram" / "samples.safetensors", data)
