"""The family's tokenizer: byte-level BPE over Python text, shared by target, draft and n-gram."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from experiments.tiny_family.corpus import Corpus
from specdec.files import write_json, write_text

END = "<|end|>"
"""The token that begins, ends and pads every text; id 0."""

# A word includes one space or underscore before it; each digit is separate; a run of white space is
# one piece except for the last space, so that a line break with its indentation is one token.
PIECES = r"[ _]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def train_tokenizer(texts: Iterable[str], vocab_size: int = 4096) -> Tokenizer:
    """Trains byte-level BPE of at least 257 entries: END and the bytes, so all text round-trips."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int = 2048) -> None:
    write_text(folder / "tokenizer.json", tokenizer.to_str(pretty=True))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **dict.fromkeys(("bos_token", "eos_token", "pad_token"), END),
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    write_json(folder / "tokenizer_config.json", config)


def tokenizer_texts(corpus: Corpus, max_mb: float) -> list[str]:
    """Selects texts to train a tokenizer on: all but packages' files, and a sample of these.

    About `max_mb` megabytes (10**6 characters) of packages' files are used, evenly spaced.
    """
    rest = [d.text for d in corpus.train if d.kind == "file" and d.source != "stdlib"]
    first = [d.text for d in corpus.train if d.kind != "file" or d.source == "stdlib"]
    stride = max(1, round(sum(map(len, rest)) / max(1.0, max_mb * 1e6)))
    return first + rest[::stride]
