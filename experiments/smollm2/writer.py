"""Writes the target's own texts quickly: many prompts at once.

    python -m experiments.smollm2.writer turns TURNS.jsonl [--number 2400]
    python -m experiments.smollm2.writer answers ANSWERS.jsonl --prompts PROMPTS.jsonl

``turns`` are user messages, which the target writes after its template's empty user turn;
``answers`` are those to the prompts of ``experiments.smollm2.prompts`` of up to 320 tokens, in
their order, alternately greedy and at temperature 0.6 (``answers.sampling_of``). A text that has
ended leaves its slot of the batch to the next prompt. The same command resumes
after the texts that the file has.

On a CPU with bfloat16 instructions the passes are in bfloat16, three times as fast, and the 40 most
probable logits are computed again in float32 from the last hidden state. Texts then differ from
those of the float32 target where two tokens are nearly as probable.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.llama.modeling_llama import rotate_half

from experiments.smollm2.answers import prompts_of, sampling_of
from experiments.smollm2.prompts import USER_TURN
from specdec.models.bundled import installed_path

DTYPE = torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32
TOP = 40
SLOTS, LENGTH = 96, 640
MAX_PROMPT, MAX_NEW = 320, 256


@dataclass(slots=True)
class Slot:
    number: int = -1  # of the prompt; -1 for a free slot
    greedy: bool = False
    tokens: list[int] = field(default_factory=list)
    length: int = 0  # of the cached prefix


class Writer:
    """Shape letters: B rows, S new tokens, T cached tokens, G query heads per key head, D head."""

    def __init__(self, file: Path, seed: int) -> None:
        folder, name = str(file.parent), file.name
        self.tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
        self.table = model.lm_head.weight.detach()
        self.model = model.to(DTYPE).eval().requires_grad_(False)
        config = model.config
        self.heads, self.size = config.num_key_value_heads, config.head_dim
        shape = (config.num_hidden_layers, SLOTS * self.heads, LENGTH, self.size)
        self.keys = torch.zeros(shape, dtype=DTYPE)
        self.values = torch.zeros(shape, dtype=DTYPE)
        self.generator = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def last_hidden(self, tokens_BS: Tensor, rows_B: Tensor, starts_B: Tensor) -> Tensor:
        """Appends S tokens to each of the rows' caches; returns the last hidden states [B, E]."""
        base = self.model.model
        B, S = tokens_BS.shape
        at_BS = starts_B[:, None] + torch.arange(S)
        hidden = base.embed_tokens(tokens_BS)
        cos, sin = base.rotary_emb(hidden, at_BS)
        cos, sin = cos[:, None], sin[:, None]
        T = int(at_BS.max()) + 1
        visible = torch.arange(T) <= at_BS[:, :, None]
        bias = torch.zeros(B, 1, S, T, dtype=DTYPE).masked_fill(~visible[:, None], -1e9)
        bias = bias.repeat(1, 1, self.model.config.num_attention_heads // self.heads, 1)
        caches = (rows_B[:, None] * self.heads + torch.arange(self.heads)).flatten()
        whole = B == SLOTS
        for layer, block in enumerate(base.layers):
            x = block.input_layernorm(hidden)
            attention = block.self_attn
            q, k, v = (
                project(x).view(B, S, -1, self.size).transpose(1, 2)
                for project in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            q = q * cos + rotate_half(q) * sin
            k = k * cos + rotate_half(k) * sin
            at = at_BS.repeat_interleave(self.heads, 0)
            self.keys[layer, caches[:, None], at] = k.reshape(-1, S, self.size)
            self.values[layer, caches[:, None], at] = v.reshape(-1, S, self.size)
            keys, values = self.keys[layer], self.values[layer]
            keys, values = (
                (each if whole else each[caches]).view(B, self.heads, LENGTH, self.size)[:, :, :T]
                for each in (keys, values)
            )
            # The G query heads of a key head are rows of one product with it.
            mixed = F.scaled_dot_product_attention(
                q.reshape(B, self.heads, -1, self.size),
                keys,
                values,
                attn_mask=bias,
            )
            mixed = mixed.view(B, -1, S, self.size).transpose(1, 2).reshape(B, S, -1)
            hidden = hidden + attention.o_proj(mixed)
            hidden = hidden + block.mlp(block.post_attention_layernorm(hidden))
        return base.norm(hidden[:, -1])

    @torch.no_grad()
    def draw(
        self, hidden_BE: Tensor, greedy: list[bool], temperature: float, top_p: float
    ) -> list[int]:
        near = F.linear(hidden_BE, self.model.lm_head.weight).topk(TOP).indices
        logits = (F.embedding(near, self.table) @ hidden_BE.float()[:, :, None]).squeeze(-1)
        logits, order = logits.sort(descending=True)
        near = near.gather(1, order)
        probs = torch.softmax(logits / temperature, -1)
        probs[probs.cumsum(-1) - probs >= top_p] = 0.0
        drawn = torch.multinomial(probs, 1, generator=self.generator).squeeze(-1)
        drawn[torch.tensor(greedy)] = 0
        return near.gather(1, drawn[:, None]).squeeze(1).tolist()

    def texts(
        self, prompts: Iterator[tuple[int, list[int], bool]], temperature: float, top_p: float
    ) -> Iterator[tuple[int, list[int], bool]]:
        """Continues (number, prompt, greedy); yields (number, tokens, whether it ended)."""
        slots, end = (
            [Slot() for _ in range(SLOTS)],
            self.tokenizer.convert_tokens_to_ids("<|im_end|>"),
        )
        every = torch.arange(SLOTS)
        while True:
            for row, slot in enumerate(slots):
                if slot.number >= 0:
                    continue
                taken = next(prompts, None)
                if taken is None:
                    break
                number, prompt, greedy = taken
                hidden = self.last_hidden(
                    torch.tensor([prompt]), torch.tensor([row]), torch.tensor([0])
                )
                first = self.draw(hidden, [greedy], temperature, top_p)
                slots[row] = Slot(number, greedy, first, len(prompt))
            if all(slot.number < 0 for slot in slots):
                return
            tokens = torch.tensor([[slot.tokens[-1] if slot.tokens else 0] for slot in slots])
            starts = torch.tensor([slot.length for slot in slots])
            hidden = self.last_hidden(tokens, every, starts)
            drawn = self.draw(hidden, [slot.greedy for slot in slots], temperature, top_p)
            for row, slot in enumerate(slots):
                if slot.number < 0:
                    continue
                if slot.tokens[-1] == end or len(slot.tokens) >= MAX_NEW:
                    yield slot.number, slot.tokens, slot.tokens[-1] == end
                    slots[row] = Slot()
                    continue
                slot.tokens.append(drawn[row])
                slot.length += 1


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("turns", "answers"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--number", type=int, default=2400)
    options = parser.parse_args()
    done = {row["id"] for row in prompts_of(options.file)} if options.file.exists() else set()
    writer = Writer(installed_path("installed:smollm2"), seed=len(done))
    rows: list[dict[str, Any]] = []
    if options.command == "turns":
        rows = [{"text": USER_TURN}] * options.number
    else:
        rows = prompts_of(options.prompts)

    def prompts() -> Iterator[tuple[int, list[int], bool]]:
        for number, row in enumerate(rows):
            if options.command == "turns":
                ids = writer.tokenizer(row["text"])["input_ids"]
            else:
                ids = writer.tokenizer.apply_chat_template(
                    [{"role": "user", "content": row["text"]}],
                    add_generation_prompt=True,
                    return_dict=True,
                )["input_ids"]
            greedy = options.command == "answers" and sampling_of(number) == "greedy"
            if number not in done and len(ids) <= MAX_PROMPT:
                yield number, ids, greedy

    turns = options.command == "turns"
    began, tokens = time.monotonic(), 0
    with options.file.open("a", encoding="utf-8") as file:
        for number, ids, ended in writer.texts(
            prompts(), temperature=0.9 if turns else 0.6, top_p=0.95 if turns else 0.9
        ):
            text = writer.tokenizer.decode(ids, skip_special_tokens=True)
            reason = "eos" if ended else "length"
            file.write(json.dumps({"id": number, "text": text, "finish_reason": reason}) + "\n")
            file.flush()
            tokens += len(ids)
            print(f"{tokens} tokens, {tokens / (time.monotonic() - began):.0f}/s", end="\r")


if __name__ == "__main__":
    main()
