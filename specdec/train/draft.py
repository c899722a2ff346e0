"""The recipes of the draft and of the n-gram samples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from specdec.train.distill import DistillationLoss, sample_documents
from specdec.train.lm import Pretraining, Report
from specdec.train.model import LanguageModel, keep_layers, load_hf, save_hf
from specdec.train.parallel import rank_and_size, spawned, wait_for_all
from specdec.train.recipes import make_plan, need, pick_device, record_run, set_up
from specdec.train.samples import Sampling, docstring_end, function_prompts
from specdec.train.streams import Mixture, load_streams, save_streams


def triple_quote_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Ids of tokens that hold three double quotes."""
    return frozenset(i for text, i in tokenizer.get_vocab().items() if '"""' in text)


def sample_target(
    *,
    work: Path,
    target: LanguageModel,
    tokenizer: Tokenizer,
    streams: dict[str, np.ndarray],
    sampling: dict[str, Any],
    seed: int,
    report: Report,
    mark: Callable[[np.ndarray], np.ndarray] | None = None,
) -> np.ndarray:
    """The target's own continuations of training functions' headers and docstrings, uint16 ids.

    Each process of a group samples its share of the prompts; all return all samples.

    Args:
        work: folder in which the result is kept, a file per process; a second call reads it back.
        target: sampled on the CPU.
        tokenizer: the family's, to find docstrings' ends.
        streams: training streams; prompts come from "function" and "gsm8k".
        sampling: keys prompts, gsm8k_prompts, new_tokens, batch, minutes, rules (see Sampling).
        seed: of prompts and draws.
        report: progress.
        mark: applied to the ids of each continuation.
    """
    rank, size = rank_and_size()
    paths = [work / f"samples-{part}.npz" for part in range(size)]
    if all(path.exists() for path in paths):
        return np.concatenate([load_streams(path)["samples"] for path in paths])
    rule = docstring_end(triple_quote_ids(tokenizer))
    prompts = function_prompts(streams["function"], rule, sampling["prompts"], seed)
    answer = tokenizer.encode("\nAnswer:").ids
    if sampling["gsm8k_prompts"] and "gsm8k" in streams:
        prompts += function_prompts(
            streams["gsm8k"], _ends_with(answer), sampling["gsm8k_prompts"], seed
        )
    samples = sample_documents(
        target,
        prompts[rank::size],
        [Sampling(**one) for one in sampling["rules"]],
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
    streams = load_streams(need(work / "tokens.npz", "tokenizer"))
    folder = need(out / "target" / "model.safetensors", "target").parent
    target = load_hf(folder, dtype=dtype, compiled=compiled).to(place)
    streams["samples"] = sample_target(
        work=work,
        target=target,
        tokenizer=Tokenizer.from_file(str(folder / "tokenizer.json")),
        streams=streams,
        sampling=sampling,
        seed=seed,
        report=report,
    )
    run = Pretraining(
        keep_layers(target, target_layers, compiled=compiled).to(place),
        Mixture(streams, distill_weights, seed + 1),
        make_plan(distill_plan),
        work / "draft",
        loss=DistillationLoss(
            target, text_weight=text_weight, temperature=temperature, compiled=compiled
        ),
        held_out=streams["held_out"],
        report=report,
    )
    trained = run.run()
    if rank_and_size()[0] == 0:
        save_hf(trained, out / "draft")
        extra = {"sampled_tokens": len(streams["samples"]), "target_layers": target_layers}
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
    Arguments: conf/train/ngram.yaml. Ids above 32767 would not fit and raise ValueError.
    """
    work, out = Path(work_dir), Path(output_dir)
    dtype = set_up(num_threads, precision)
    streams = load_streams(need(work / "tokens.npz", "tokenizer"))
    draft = load_hf(need(out / "draft" / "model.safetensors", "draft").parent, dtype=dtype)
    if draft.shape.vocab_size > 32767:
        raise ValueError(f"vocabulary of {draft.shape.vocab_size} does not fit 16 bits")
    tokenizer = Tokenizer.from_file(str(out / "draft" / "tokenizer.json"))
    rule = docstring_end(triple_quote_ids(tokenizer))
    prompts = function_prompts(streams["function"], rule, sampling["prompts"], seed)
    tokens = sample_documents(
        draft,
        prompts,
        [Sampling(**one) for one in sampling["rules"]],
        new_tokens=sampling["new_tokens"],
        batch=sampling["batch"],
        seed=seed,
        minutes=sampling["minutes"],
        keep_prompt=False,
        report=report,
    )[:max_tokens]
    (out / "ngram").mkdir(parents=True, exist_ok=True)
    save_file({"tokens": tokens.astype(np.int16)}, out / "ngram" / "samples.safetensors")
