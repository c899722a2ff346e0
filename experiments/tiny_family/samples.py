"""Sampling from a LanguageModel in batches: data for distillation and for n-gram counts.

A batch mixes several sampling rules, and all draws come from one generator; transformers'
``generate`` supports neither.

Shape letters: B sequences, P prompt positions, T generated positions, V vocabulary.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from experiments.tiny_family.model import LanguageModel, weights_hash
from experiments.tiny_family.plan import build
from experiments.tiny_family.recipes import Teacher, read_teacher
from experiments.tiny_family.session import Session
from experiments.tiny_family.streams import compact, load_streams, save_streams
from specdec.errors import UserError
from specdec.files import write_bytes, write_text
from specdec.parts.fields import Index, NotNegative, Positive, PositiveShare
from specdec.train.fit import keep_settings
from specdec.train.progress import Report, silent


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """A rule for choosing the next token.

    ``temperature`` 0 is greedy. ``top_k`` applies before ``top_p``; 0 and 1 allow all tokens.
    ``share`` is the share of the sequences that are sampled by this rule, if there are several.
    """

    temperature: NotNegative = 0.0
    top_p: PositiveShare = 1.0
    top_k: Index = 0
    share: Positive = 1.0


def pick(logits_BV: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """Chooses next tokens, int64 (B,), under one sampling rule."""
    if sampling.temperature == 0.0:
        return logits_BV.argmax(-1)
    width = min(sampling.top_k or logits_BV.shape[-1], logits_BV.shape[-1])
    values, ids = (logits_BV.float() / sampling.temperature).topk(width, dim=-1)
    probs = values.softmax(-1)
    before = probs.cumsum(-1) - probs
    probs = probs.masked_fill(before >= sampling.top_p, 0.0)
    choice = torch.multinomial(probs, 1, generator=generator)
    return ids.gather(-1, choice).squeeze(-1)


class _CacheLayer(DynamicLayer):
    """One layer's keys and values in buffers of full length.

    DynamicLayer copies the whole cache at every token, which doubled the time of a decoding step.
    """

    def __init__(self, max_length: int) -> None:
        super().__init__()
        self.max_length = max_length

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        start, end = self.get_seq_length(), self.get_seq_length() + keys.shape[2]
        if not self.is_initialized:
            self.lazy_initialization(values, values)
            batch, heads, _length, width = values.shape
            self.buffers = values.new_empty(2, batch, heads, self.max_length, width)
        self.buffers[0, :, :, start:end] = keys  # converts: autocast leaves keys in float32
        self.buffers[1, :, :, start:end] = values
        self.keys, self.values = self.buffers[:, :, :, :end]
        return self.keys, self.values


@torch.no_grad()
def generate(
    model: LanguageModel,
    prompts_BP: Tensor,
    max_new_tokens: int,
    samplings: Sequence[Sampling],
    generator: torch.Generator,
    *,
    stop_at_end: bool = False,
) -> Tensor:
    """Continues prompts of equal length by int64[B, T] on the CPU; T is ``max_new_tokens``.

    Rows are assigned to rules by their shares, in order. The generator must be on the CPU. With
    ``stop_at_end`` a row that emits one of ``model.ends`` continues with the first of them.
    """
    batch, length = prompts_BP.shape[0], prompts_BP.shape[1] + max_new_tokens
    if length > model.shape.max_positions:
        raise UserError(
            f"{prompts_BP.shape[1]} prompt tokens and {max_new_tokens} new ones do not fit the"
            f" model's {model.shape.max_positions} positions: lower new_tokens"
        )
    shares = torch.tensor([s.share for s in samplings], dtype=torch.float64)
    bounds = [0, *(shares.cumsum(0) / shares.sum() * batch).round().long().tolist()]
    cache = Cache([_CacheLayer(length) for _ in range(model.shape.num_layers)])
    new_BT = torch.zeros(batch, max_new_tokens, dtype=torch.long)
    ended_B = torch.zeros(batch, dtype=torch.bool)
    inputs = prompts_BP
    for position in range(max_new_tokens):
        logits_BV = model.next_logits(inputs.to(model.device), cache).cpu()
        for rule, low, high in zip(samplings, bounds, bounds[1:], strict=False):
            if high > low:
                new_BT[low:high, position] = pick(logits_BV[low:high], rule, generator)
        if stop_at_end:
            new_BT[ended_B, position] = model.ends[0]
            ended_B |= torch.isin(new_BT[:, position], torch.tensor(model.ends))
            if bool(ended_B.all()):
                break
        inputs = new_BT[:, position : position + 1]
    return new_BT


def sample_documents(
    model: LanguageModel,
    prompts: list[np.ndarray],
    sampling: Mapping[str, Any],
    *,
    seed: int,
    keep_prompt: bool = True,
    mark: Callable[[np.ndarray], np.ndarray] | None = None,
    report: Report = silent,
) -> np.ndarray:
    """Samples a continuation of each prompt and concatenates them, an end token before each.

    Args:
        prompts: int64[T] each, token ids of any lengths.
        sampling: see finish.yaml; the shares of ``rules`` divide each batch among them,
            and no batch begins after ``minutes`` (None: all prompts are used).
        keep_prompt: whether a document begins with its prompt.
        mark: applied to the ids of each continuation.
    """
    if not prompts:
        raise UserError("nothing to sample from: no training function or question gives a prompt")
    rules = [build(Sampling, rule, "sampling.rules") for rule in sampling["rules"]]
    new_tokens, minutes = sampling["new_tokens"], sampling["minutes"]
    generator = torch.Generator().manual_seed(seed)
    groups = same_length_batches(prompts, sampling["batch"])
    order = np.random.default_rng(seed).permutation(len(groups))
    began, pieces, count, end = time.monotonic(), [], 0, [model.ends[0]]
    for done, index in enumerate(order, start=1):
        group = groups[index]
        group = group[torch.randperm(group.shape[0], generator=generator)]
        new = generate(model, group, new_tokens, rules, generator, stop_at_end=True)
        for prompt, row in zip(group.numpy(), new.numpy(), strict=True):
            row = row[: np.append(np.flatnonzero(np.isin(row, model.ends)), len(row))[0]]
            count += len(row)
            row = row if mark is None else mark(row)
            pieces.append(np.concatenate((end, prompt, row) if keep_prompt else (end, row)))
        time_used = 0.0 if minutes is None else (time.monotonic() - began) / 60 / minutes
        report(min(1.0, max(done / len(order), time_used)), f"{count} tokens sampled")
        if time_used >= 1.0:
            break
    return compact(np.concatenate(pieces))


def function_prompts(
    tokens: np.ndarray,
    prompt_length: Callable[[np.ndarray], int],
    limit: int,
    seed: int,
    *,
    end: int = 0,
) -> list[np.ndarray]:
    """Cuts at most `limit` prompts from the starts of a stream's documents, in random order.

    ``prompt_length`` returns the length of the prompt in a document's ids, 0 to skip it; ``end`` is
    the token before each document.
    """
    documents = np.split(tokens, np.flatnonzero(tokens == end))[1:]
    prompts = []
    for index in np.random.default_rng(seed).permutation(len(documents)):
        document = documents[index][1:]
        if length := prompt_length(document):
            prompts.append(document[:length].astype(np.int64))
        if len(prompts) >= limit:
            break
    return prompts


def docstring_end(document: np.ndarray, quote_ids: Sequence[int]) -> int:
    """Returns the length of a prompt up to the second of ``quote_ids``, if 9 to 192, else 0."""
    quotes = np.flatnonzero(np.isin(document[:192], quote_ids))[:2]
    return int(quotes[1]) + 1 if len(quotes) == 2 and quotes[1] >= 8 else 0


def sequence_end(document: np.ndarray, ids: list[int]) -> int:
    """Returns the length of a prompt that ends with these ids, at most 255; 0 without them."""
    tokens, size = document[:-1][:255].tolist(), len(ids)
    ends = range(size, len(tokens) + 1)
    return next((end for end in ends if tokens[end - size : end] == ids), 0)


def same_length_batches(prompts: list[np.ndarray], batch: int) -> list[Tensor]:
    """Groups prompts of nearly equal length; the longer ones of a group lose their first tokens.

    The groups are int64 (batch, P), where P differs by group; the last may have fewer rows.
    """
    ordered = sorted(prompts, key=len)
    groups = [ordered[i : i + batch] for i in range(0, len(ordered), batch)]
    equal = ([prompt[len(prompt) - len(group[0]) :] for prompt in group] for group in groups)
    return [torch.from_numpy(np.stack(rows)) for rows in equal]


def _docstring_prompts(teacher: Teacher, limit: int, seed: int) -> list[np.ndarray]:
    quotes = [i for text, i in teacher.tokenizer.get_vocab().items() if '"""' in text]
    end = partial(docstring_end, quote_ids=quotes)
    documents = teacher.streams["function"]
    return function_prompts(documents, end, limit, seed)


def sample_target(
    target: Teacher,
    sampling: dict[str, Any],
    work: Path,
    *,
    seed: int,
    report: Report,
    mark: Callable[[np.ndarray], np.ndarray] | None = None,
) -> np.ndarray:
    """Samples the target's own continuations of training functions' signatures and docstrings.

    They go to a file of the folder ``work``, which a later call with the same target and settings
    reads. ``sampling`` also has the numbers of prompts of the streams "function" (``prompts``) and
    "gsm8k" (``gsm8k_prompts``); for the rest see ``sample_documents``.

    Raises:
        UserError: the folder has samples of another target or of other settings.
    """
    path = work / "samples.npz"
    settings = {"target": weights_hash(target.model), "sampling": sampling, "seed": seed}
    keep_settings(work / "sampling.json", settings, path)
    if not path.exists():
        counts = {name: sampling[name] for name in ("prompts", "gsm8k_prompts")}
        prompts = training_prompts(target, **counts, seed=seed)
        samples = sample_documents(
            target.model, prompts, sampling, seed=seed, mark=mark, report=report
        )
        save_streams({"samples": samples}, path)
    return load_streams(path)["samples"]


def training_prompts(
    teacher: Teacher, *, prompts: int, gsm8k_prompts: int, seed: int
) -> list[np.ndarray]:
    """Returns signatures and docstrings of training functions, then questions of GSM8K train."""
    found = _docstring_prompts(teacher, prompts, seed)
    questions = teacher.streams.get("gsm8k")
    if gsm8k_prompts and questions is not None:
        end = partial(sequence_end, ids=teacher.tokenizer.encode("\nAnswer:").ids)
        found += function_prompts(questions, end, gsm8k_prompts, seed)
    return found


def write_prompts(session: Session, *, prompts: int, gsm8k_prompts: int) -> None:
    """Writes work_dir/prompts.jsonl, for `specdec train` of a draft and heads of the target."""
    teacher = read_teacher(session)
    found = training_prompts(
        teacher, prompts=prompts, gsm8k_prompts=gsm8k_prompts, seed=session.seed
    )
    texts = teacher.tokenizer.decode_batch([row.tolist() for row in found])
    lines = [json.dumps({"prompt": text}) + "\n" for text in texts]
    write_text(session.work / "prompts.jsonl", "".join(lines))
    session.report(1.0, f"{len(lines)} prompts")


def sample_ngram(session: Session, *, sampling: dict[str, Any], max_tokens: int) -> None:
    """Samples token sequences from the draft for n-gram counts.

    Writes output_dir/ngram/samples.safetensors: "tokens", int16 where the ids fit and else int32,
    each document after a token 0. Arguments: ngram.yaml.
    """
    draft, seed = read_teacher(session, "draft"), session.seed
    prompts, report = _docstring_prompts(draft, sampling["prompts"], seed), session.report
    tokens = sample_documents(
        draft.model, prompts, sampling, seed=seed, keep_prompt=False, report=report
    )
    kind = np.int16 if draft.model.shape.vocab_size <= 1 << 15 else np.int32
    data = save({"tokens": tokens[:max_tokens].astype(kind)})
    write_bytes(session.out / "ngram" / "samples.safetensors", data)
