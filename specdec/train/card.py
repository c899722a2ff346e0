"""The model card: measures the shipped family and writes specdec/assets/tiny/README.md."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from torch import Tensor

from specdec.data import DATASETS, load_prompts
from specdec.errors import UserError
from specdec.files import write_json
from specdec.metrics.loops import repeated_ngrams
from specdec.train.cardtext import RANKS, Heads, write_card
from specdec.train.corpus import held_out_files
from specdec.train.lm import Report, held_out_loss
from specdec.train.model import LanguageModel, load_hf
from specdec.train.samples import Sampling, generate, same_length_batches
from specdec.train.streams import encode

BATCH = 12
SETTINGS = {
    "greedy": Sampling(temperature=0.0),
    "0.6/0.9/80": Sampling(temperature=0.6, top_p=0.9, top_k=80),
}


@dataclass(slots=True)
class Agreement:
    """Counts of target tokens by their rank in the draft's distribution.

    Attributes:
        hits_inside, hits_outside: per entry of RANKS, tokens among the draft's first k.
        inside, outside: tokens inside and outside loops.
    """

    hits_inside: list[int] = field(default_factory=lambda: [0] * len(RANKS))
    hits_outside: list[int] = field(default_factory=lambda: [0] * len(RANKS))
    inside: int = 0
    outside: int = 0

    @property
    def loop_share(self) -> float:
        """Share of generated tokens that end an 8-gram already generated."""
        return self.inside / max(1, self.inside + self.outside)

    def rates(self, *, inside: bool) -> list[float]:
        """Top-k agreement, in [0, 1], for each k of RANKS."""
        hits, count = (
            (self.hits_inside, self.inside) if inside else (self.hits_outside, self.outside)
        )
        return [hit / max(1, count) for hit in hits]

    def add(self, ranks: Sequence[int], loops: Sequence[bool]) -> None:
        """Counts one continuation: each token's rank (0 is first) and whether it is in a loop."""
        for rank, loop in zip(ranks, loops, strict=True):
            hits = self.hits_inside if loop else self.hits_outside
            for place, limit in enumerate(RANKS):
                hits[place] += rank < limit
            self.inside += loop
            self.outside += not loop


def draft_ranks(draft: LanguageModel, prompt: Tensor, new: Tensor) -> list[int]:
    """Rank, 0 first, of each new token in the draft's distribution at its position."""
    row = torch.cat((prompt, new))[None]
    with torch.no_grad():
        logits = draft(row[:, :-1])[0, len(prompt) - 1 :]
    chosen = logits.gather(-1, new[:, None])
    return (logits > chosen).sum(-1).tolist()


def measure_agreement(
    target: LanguageModel,
    draft: LanguageModel,
    prompts: list[Tensor],
    sampling: Sampling,
    new_tokens: int,
    seed: int,
) -> Agreement:
    """Draft's top-k agreement on the target's own ``continuations``."""
    total = Agreement()
    for prompt, new in continuations(target, prompts, sampling, new_tokens, seed):
        total.add(draft_ranks(draft, prompt, new), repeated_ngrams(new.tolist()).tolist())
    return total


def continuations(
    target: LanguageModel,
    prompts: Sequence[Tensor],
    sampling: Sampling,
    new_tokens: int,
    seed: int,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Prompts and what the target says behind them, ended at the end token, int64 each.

    Prompts go in batches of BATCH of nearly equal length; the longer ones of a batch lose their
    first tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    for group in same_length_batches([prompt.numpy() for prompt in prompts], BATCH):
        out = generate(target, group, new_tokens, [sampling], generator, stop_at_end=True)
        for prompt, new in zip(group, out, strict=True):
            ends = (new == 0).nonzero()
            yield prompt, new[: int(ends[0]) + 1] if len(ends) else new


def measure_loss(model: LanguageModel, tokenizer: Tokenizer, length: int) -> dict[str, float]:
    """Held-out loss in nats per token and per byte, and the counts behind them."""
    texts = [text for _, text in held_out_files()]
    ids = encode(tokenizer, texts)
    size = sum(len(text.encode("utf-8")) for text in texts)
    loss = held_out_loss(model, ids, length)
    return {
        "per_token": loss,
        "per_byte": loss * len(ids) / size,
        "tokens": len(ids),
        "bytes": size,
    }


def pass_ms(folder: Path, prefix: int = 128, repeats: int = 60) -> float:
    """Median milliseconds of one transformers forward of one token after a cached prefix.

    Float32 on the CPU, as the library runs the family by default.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, model.config.vocab_size, (1, prefix), generator=generator)
    times = []
    with torch.inference_mode():
        cache = model(tokens, use_cache=True).past_key_values
        for _ in range(repeats):
            began = time.perf_counter()
            cache = model(tokens[:, :1], past_key_values=cache, use_cache=True).past_key_values
            times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


def check_data_name(name: str) -> None:
    """Refuses a name that is none of the library's data sets; one that is absent is left out."""
    if name not in DATASETS:
        raise UserError(f"prompts of {name}: choose from {', '.join(DATASETS)}")


def prompts_of(name: str, tokenizer: Tokenizer, limit: int) -> list[Tensor]:
    """Token ids of a data set's first prompts, as `data=` gives them; empty where it is absent.

    Args:
        name: one of the library's data sets.
        tokenizer: the family's.
        limit: prompts at most.

    Raises:
        UserError: an unknown name.
    """
    check_data_name(name)
    try:
        prompts = load_prompts(name=name, limit=limit)
    except UserError:  # no such files on this machine
        return []
    return [torch.tensor(tokenizer.encode(prompt.text).ids) for prompt in prompts]


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def make_card(
    *,
    output_dir: str,
    measure: bool,
    new_tokens: int,
    prompts: dict[str, int],
    length: int,
    reference: str | None,
    seed: int,
    num_threads: int,
    report: Report,
) -> None:
    """Measures target and draft in output_dir and writes its README.md and measured.json.

    Arguments: conf/train/card.yaml. Without ``measure`` the page is written anew from measured.json
    and the records of the runs. Agreement on data sets that need SPECDEC_DATA is left out where
    they are absent, and the card names those that were measured.

    Raises:
        UserError: a model is missing, or measured.json where nothing is measured.
    """
    out = Path(output_dir)
    if num_threads:
        torch.set_num_threads(num_threads)
    if measure:
        sizes = {"new_tokens": new_tokens, "length": length, "seed": seed}
        measured = _measure(out, prompts, reference, report, **sizes)
        write_json(out / "measured.json", measured)
    elif not (measured := _read(out / "measured.json")):
        raise UserError(f"{out / 'measured.json'} is missing: measure with measure=true")
    records = {part: _read(out / part / "training.json") for part in ("target", "draft")}
    write_card(out, measured, records, _read(out / "corpus.json"), heads_of(out / "heads"))
    report(1.0, "card written")


def heads_of(folder: Path) -> Heads:
    """What the files beside heads say of them; nothing where there are none."""
    parameters = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
        parameters[path.stem] = sum(prod(shape) for shape in shapes)
    measured = [row for path in sorted(folder.glob("measured-*.json")) for row in _rows(path)]
    return Heads(parameters, measured, [_read(p) for p in sorted(folder.glob("training-*.json"))])


def _rows(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())
    return found


def _measure(
    out: Path,
    prompts: dict[str, int],
    reference: str | None,
    report: Report,
    *,
    new_tokens: int,
    length: int,
    seed: int,
) -> dict[str, Any]:
    """What measured.json holds."""
    for part in ("target", "draft"):
        if not (out / part / "model.safetensors").exists():
            raise UserError(f"{out / part} holds no model: train it first")
    tokenizer = Tokenizer.from_file(str(out / "target" / "tokenizer.json"))
    models = {part: load_hf(out / part) for part in ("target", "draft")}
    measured: dict[str, Any] = {"loss_window": length, "agreement": []}
    for part, model in models.items():
        report(0.1, f"held-out loss of the {part}")
        measured[part] = measure_loss(model, tokenizer, length)
        measured[part]["pass_ms"] = pass_ms(out / part)
    if reference is not None:
        report(0.2, f"held-out loss of {reference}")
        measured["reference"] = _measure_reference(Path(reference), length)
    jobs = [(name, rule) for name in prompts for rule in SETTINGS]
    for place, (name, rule) in enumerate(jobs):
        report(0.3 + 0.7 * place / len(jobs), f"agreement on {name}, {rule}")
        heads = prompts_of(name, tokenizer, prompts[name])
        if heads:
            found = measure_agreement(
                models["target"], models["draft"], heads, SETTINGS[rule], new_tokens, seed
            )
            measured["agreement"].append(
                {
                    "data": name,
                    "prompts": len(heads),
                    "sampling": rule,
                    "loop_share": found.loop_share,
                    "tokens": found.inside + found.outside,
                    "inside": found.rates(inside=True),
                    "outside": found.rates(inside=False),
                }
            )
    measured["new_tokens"], measured["batch"] = new_tokens, BATCH
    return measured


def _measure_reference(folder: Path, length: int) -> dict[str, float]:
    """Held-out loss of another Llama of the same kind, under its own tokenizer."""
    model = load_hf(folder)
    found = measure_loss(model, Tokenizer.from_file(str(folder / "tokenizer.json")), length)
    found["parameters"] = sum(weight.numel() for weight in model.parameters())
    found["layers"] = model.shape.num_layers
    return found
