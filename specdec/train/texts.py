"""Training texts, prompts with the target's answers: reads, generates and batches them.

Shape letters: T tokens of a text, B windows of a batch, S positions of a window.
"""

import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import StoppingCriteriaList

from specdec.data.files import read_records
from specdec.data.prompt import CHAT_DATE
from specdec.data.texts import tokenized, turn_of
from specdec.errors import UserError
from specdec.sampling.transform import SamplingParams
from specdec.train.progress import Report

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class AnsweredText:
    """Token ids of a prompt and its answer, int32[T]; the first ``num_prompt`` are the prompt's."""

    tokens: IntArray
    num_prompt: int


def read_answers(
    path: Path,
    tokenizer: PreTrainedTokenizerBase | None,
    prompts: Mapping[int, npt.NDArray[np.int64]],
) -> Iterator[AnsweredText]:
    """Yields the texts of a JSON lines file. Each line has one of these sets of keys:

    - ``prompt`` and ``completion`` as text, or ``prompt_token_ids`` and ``output_token_ids``;
    - ``messages``, a chat whose last message is the answer, for the tokenizer's chat template;
    - ``id`` and ``output``, as in a run's requests.jsonl; the prompt is then ``prompts[id]``.
    """
    check_answers(path)
    for number, entry in read_records(path):
        where = f"{path} line {number}"
        if "output" in entry and "id" in entry:
            if entry["id"] not in prompts:
                raise UserError(
                    f"{where} answers prompt {entry['id']}, which data= does not have: give the"
                    " data= (and data.limit=null) of the run that wrote it"
                )
            prompt, output = prompts[entry["id"]], np.asarray(entry["output"], np.int64)
        elif "messages" in entry:
            prompt, output = _of_chat(entry["messages"], _need(tokenizer, where), where)
        else:
            turn = turn_of(entry, where)
            prompt, output = tokenized(turn, lambda: _need(tokenizer, where), where)  # noqa: B023
        yield AnsweredText(np.concatenate([prompt, output]).astype(np.int32), len(prompt))


def check_answers(path: Path) -> None:
    if not path.is_file():
        raise UserError(f"answers={path} is not a file: name JSON lines of the target's answers")
    for number, entry in islice(read_records(path), 1):
        if "messages" not in entry and not {"id", "output"} <= entry.keys():
            turn_of(entry, f"{path} line {number}")


def _need(tokenizer: PreTrainedTokenizerBase | None, where: str) -> PreTrainedTokenizerBase:
    if tokenizer is None:
        raise UserError(f"{where} is text, and this model has no tokenizer: give token ids")
    return tokenizer


def _of_chat(
    messages: Any, tokenizer: PreTrainedTokenizerBase, where: str
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    is_chat = isinstance(messages, list) and len(messages) > 1
    if not is_chat or not all(isinstance(m, dict) and "content" in m for m in messages):
        raise UserError(f"{where}: messages must be a list of messages, the last one the answer")
    if not tokenizer.chat_template:
        raise UserError(f"{where} is a chat, but this model has no chat template")
    prompt = tokenizer.apply_chat_template(
        messages[:-1], tokenize=False, add_generation_prompt=True, date_string=CHAT_DATE
    )
    ids = [
        np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], np.int64)
        for text in (prompt, messages[-1]["content"])
    ]
    return ids[0], ids[1]


def write_answers(
    path: Path,
    target: PreTrainedModel,
    prompts: Mapping[int, npt.NDArray[np.int64]],
    *,
    sampling: SamplingParams,
    max_new_tokens: int,
    batch: int,
    ends: Sequence[int],
    tokenizer: PreTrainedTokenizerBase | None,
    seed: int,
    report: Report,
) -> None:
    """Appends the target's answers to ``prompts`` (id -> tokens) to a file; skips ids in the file.

    An answer ends at a token of ``ends``; if sampled, it depends on the other prompts of its batch.
    """
    done = {entry["id"] for _, entry in read_records(path)} if path.exists() else set()
    order = sorted(prompts, key=lambda number: len(prompts[number]))
    groups = [order[i : i + batch] for i in range(0, len(order), batch)]
    rules = GenerationConfig(
        do_sample=sampling.temperature > 0,
        temperature=sampling.temperature or 1.0,
        top_k=sampling.top_k or 0,
        top_p=sampling.top_p,
        no_repeat_ngram_size=sampling.no_repeat_ngram,
        repetition_penalty=1.0,
        max_new_tokens=max_new_tokens,
        eos_token_id=list(ends) or None,
        pad_token_id=next(iter(ends), 0),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    written, missing = 0, len(prompts.keys() - done)
    report(0.0, f"the target answers {missing} prompts, with up to {max_new_tokens} tokens each")
    with path.open("a", encoding="utf-8") as file, torch.random.fork_rng():
        for number, group in enumerate(groups):
            if done.issuperset(group):
                continue
            torch.manual_seed(seed + number)

            def on_token(count: int, before: int = number) -> None:
                report((before + count / max_new_tokens) / len(groups), "")

            rows = _generated(target, [prompts[each] for each in group], rules, on_token)
            for each, row in zip(group, rows, strict=True):
                stops = np.flatnonzero(np.isin(row, list(ends)))
                row = row[: stops[0] + 1] if len(stops) else row
                written += len(row)
                line = {"id": each, "prompt_token_ids": prompts[each].tolist()}
                line |= {"output_token_ids": row.tolist()}
                if tokenizer is not None:
                    line["completion"] = tokenizer.decode(row, skip_special_tokens=True)
                if each not in done:
                    file.write(json.dumps(line) + "\n")
            file.flush()
            report((number + 1) / len(groups), f"{written} tokens of answers")


@torch.no_grad()
def _generated(
    target: PreTrainedModel,
    prompts: Sequence[npt.NDArray[np.int64]],
    rules: GenerationConfig,
    on_token: Callable[[int], None],
) -> npt.NDArray[np.int64]:
    """Left-pads and continues prompts; returns int64[B, L], the L new tokens of each."""
    width = max(map(len, prompts))

    def never_stops(found: Any, *_: Any, **__: Any) -> Any:
        on_token(found.shape[1] - width)
        return torch.zeros(len(found), dtype=torch.bool, device=found.device)

    tokens = torch.zeros(len(prompts), width, dtype=torch.long)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[width - len(prompt) :] = torch.from_numpy(prompt)
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    mask = (torch.arange(width) >= width - lengths[:, None]).long()
    device = target.get_input_embeddings().weight.device  # type: ignore[union-attr]
    texts = target.generate(
        tokens.to(device),
        attention_mask=mask.to(device),
        generation_config=rules,
        stopping_criteria=StoppingCriteriaList([never_stops]),
    )
    return texts[:, width:].cpu().numpy()


class Batch(NamedTuple):
    tokens_BS: Tensor  # int64, padded on the right
    counts_BS: Tensor  # bool, whether the loss counts a token: those of answers
    step: int  # of the run, from 0


class Windows:
    """Texts cut into windows of at most ``length`` tokens, in random batches of similar lengths."""

    def __init__(self, texts: Sequence[AnsweredText], length: int, batch: int, seed: int) -> None:
        """Drops windows without an answer token; ``num_tokens`` counts all tokens of the others."""
        self.batch_size, self.seed = batch, seed
        self._known: tuple[int, list[list[int]]] | None = None  # the last epoch's batches
        self._windows = [
            (text.tokens[start : start + length], max(0, text.num_prompt - start))
            for text in texts
            for start in range(0, max(1, len(text.tokens) - 1), length)
        ]
        self._windows = [(row, first) for row, first in self._windows if max(1, first) < len(row)]
        self.num_tokens = sum(len(row) for row, _ in self._windows)

    def __len__(self) -> int:
        return len(self._windows)

    @cached_property
    def crc(self) -> int:
        return zlib.crc32(b"".join(row.tobytes() for row, _ in self._windows))

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self._windows) // self.batch_size)

    def counts(self) -> npt.NDArray[np.int64]:
        """Returns int[V']: how often each token occurs in answers, up to the largest token."""
        return np.bincount(np.concatenate([row[first:] for row, first in self._windows]))

    def chosen(self, step: int) -> list[int]:
        """Returns the indices of a step's windows, the same for the same seed.

        An epoch visits every window once, in random order. Blocks of 32 batches are sorted by
        length, and then their batches are taken in random order.
        """
        epoch, place = divmod(step, self.steps_per_epoch)
        return self._order(epoch)[place]

    def _order(self, epoch: int) -> list[list[int]]:
        if self._known is None or self._known[0] != epoch:
            rng, size = np.random.default_rng((self.seed, epoch)), self.batch_size
            order, batches = rng.permutation(len(self._windows)), []
            for start in range(0, len(order), 32 * size):
                block = sorted(
                    order[start : start + 32 * size], key=lambda i: len(self._windows[i][0])
                )
                parts = [block[i : i + size] for i in range(0, len(block), size)]
                batches += [parts[i] for i in rng.permutation(len(parts))]
            self._known = (epoch, batches)
        return self._known[1]

    def size(self, step: int) -> int:
        """Returns the number of positions of a step's batch, padding included."""
        rows = [len(self._windows[i][0]) for i in self.chosen(step)]
        return len(rows) * max(rows)

    def num_tokens_of(self, step: int) -> int:
        return sum(len(self._windows[i][0]) for i in self.chosen(step))

    def batch(self, step: int) -> Batch:
        """Returns a step's windows. The loss excludes their first tokens, which have no context."""
        rows = [self._windows[i] for i in self.chosen(step)]
        width = max(len(row) for row, _ in rows)
        tokens = torch.zeros(len(rows), width, dtype=torch.long)
        counts = torch.zeros(len(rows), width, dtype=torch.bool)
        for i, (row, first) in enumerate(rows):
            tokens[i, : len(row)] = torch.from_numpy(row.astype(np.int64))
            counts[i, max(1, first) : len(row)] = True
        return Batch(tokens, counts, step)
