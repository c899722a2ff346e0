"""The family's tokenizer: byte-level BPE over Python text, shared by target, draft and n-gram."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from specdec.files import write_json, write_text
from specdec.train.corpus import Corpus

END = "<|end|>"
"""The token that begins, ends and pads every text; id 0."""

# A word includes one space or underscore before it; each digit is separate; a run of white space is
# one piece except for the last space, so that a line break with its indentation is one token.
PIECES = r"[ _]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def train_tokenizer(texts: Iterable[str], vocab_size: int = 4096) -> Tokenizer:
    """Trains byte-level BPE; every byte string round-trips.

    Args:
        texts: training text only.
        vocab_size: number of entries, at least 257: END and the 256 bytes.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
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
    """Writes tokenizer.json and tokenizer_config.json for transformers' AutoTokenizer."""
    write_text(folder / "tokenizer.json", tokenizer.to_str(pretty=True))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "pad_token": END,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    write_json(folder / "tokenizer_config.json", config)


def tokenizer_texts(corpus: Corpus, max_mb: float) -> list[str]:
    """Texts to train a tokenizer on: functions, standard library, questions, then packages' files.

    About `max_mb` megabytes (10**6 characters) of packages' files are used, evenly spaced.
    """
    first = [d.text for d in corpus.train if d.kind != "file" or d.source == "stdlib"]
    rest = [d.text for d in corpus.train if d.kind == "file" and d.source != "stdlib"]
    total = sum(map(len, rest))
    stride = max(1, round(total / max(1.0, max_mb * 1e6)))
    return first + rest[::stride]
