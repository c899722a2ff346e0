"""``TranslatedSource``: a draft with another tokenizer, its proposals and what keeps them exact."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specdec.certify.laws import FALSE_ALARM, OPPOSED_TABLE, TARGET_TABLE
from specdec.certify.subject import decode_cases
from specdec.clocks.meter import Meter
from specdec.compose.workbench import Parts, Workbench
from specdec.errors import UserError
from specdec.interfaces import TreePolicy
from specdec.models.bundled import family_path
from specdec.models.loading import load_tokenizer
from specdec.models.vocabulary import (
    Tail,
    TranslatedDraft,
    Translation,
    Vocabulary,
    fast_tokenizer,
    other_tokenizer,
)
from specdec.pairs import PretrainedPair
from specdec.policies import BestFirst, FixedWidth, Static
from specdec.sources import MixtureSource, RandomSource, TranslatedSource
from specdec.sources.translated import DraftText
from specdec.state import RequestState
from specdec.testing import TablePair
from specdec.verifiers import MatchVerifier, RejectionVerifier
from tests import toys
from tests.laws import least_p_value
from tests.proposals import check_proposals

pytestmark = pytest.mark.slow

K = 4  # candidates that are compared
CASES = toys.cases(12)[::2]  # one of each sampling
CODE = Path(__file__).read_text(encoding="ascii")


@cache
def model() -> TranslatedDraft:
    return toys.pair().artefact(TranslatedDraft, meter=Meter())


def source_of(bench: Workbench, *, sample: bool = False) -> TranslatedSource:
    return TranslatedSource(pair=bench.pair, meter=bench.meter, sample=sample, prefill_chunk=5)


def built(policy: TreePolicy, stages: int | None = None) -> Parts:
    bench = Workbench(toys.pair(), seed=toys.SEED)
    return bench.parts(
        source=source_of(bench), policy=policy, verifier=MatchVerifier(), stages=stages
    )


POLICIES: dict[str, tuple[Callable[[], TreePolicy], int | None]] = {
    "static": (lambda: Static(branching=[3, 2, 1]), None),
    "levels over stages": (lambda: FixedWidth(width=4, children=3, levels_per_step=1), 4),
}

# Proposals.


def draft_tokens(tokens: np.ndarray, num_prompt: int) -> tuple[int, ...]:
    """A target sequence in draft tokens, from its beginning and without a trie."""
    translation = model().translation
    whole = translation.translated(tokens[:num_prompt].tolist())
    final: tuple[int, ...] = ()
    for token in [*tokens[num_prompt:].tolist(), None]:
        num = translation.num_final(whole.tokens)
        final += whole.tokens[:num]
        whole = replace(whole, tokens=whole.tokens[num:])
        if token is not None:
            whole = translation.extended(whole, token)
    return (*final, *whole.tokens)


def compared(parts: Parts) -> list[int]:
    """Decodes the cases and compares every proposal with the draft's own logits.

    Returns:
        The number compared, by depth.
    """
    translation, draft = model().translation, toys.pair().model("translated")

    def logits_of(request: RequestState, slot: int) -> torch.Tensor:
        tokens = draft_tokens(request.path_tokens(slot), request.num_prompt)
        return draft(torch.tensor([tokens])).logits[0, -1][translation.draft_ids]

    def decode() -> None:
        results = decode_cases(parts, CASES, batch_size=3, prefill_chunk=4)
        toys.assert_plain(results, CASES)
        assert sum(one.accepted for one in results.values()) > 5

    ids = torch.from_numpy(translation.target_ids)
    return check_proposals(parts, decode, logits_of, k=K, token_ids=ids)


@pytest.mark.parametrize("name", POLICIES)
def test_proposals_are_the_drafts_on_the_text_in_its_own_tokens(name: str) -> None:
    """Of every node, in trees and pipelines, in batches; and the output is plain decoding's."""
    policy, stages = POLICIES[name]
    assert min(compared(built(policy(), stages))[:3]) > 3


def test_the_draft_needs_other_numbers_of_tokens_than_the_target() -> None:
    """A control of the pair: token by token replacement would be another text."""
    rng = np.random.default_rng(0)
    lengths = [
        len(draft_tokens(rng.integers(toys.VOCAB, size=20), num_prompt=4)) for _ in range(20)
    ]
    assert len(set(lengths)) > 3
    assert len(model().translation.target_ids) < toys.VOCAB


def test_nodes_of_other_sources_are_translated() -> None:
    """In a mixture, nodes may be tokens that the draft's vocabulary does not have."""
    bench = Workbench(toys.pair(), seed=toys.SEED)
    source = MixtureSource(
        sources=[RandomSource(vocab_size=toys.VOCAB), source_of(bench)], confident=None
    )
    parts = bench.parts(source=source, policy=BestFirst(bs=8, w=3, d=3), verifier=MatchVerifier())
    found = decode_cases(parts, CASES, batch_size=2, prefill_chunk=3)
    toys.assert_plain(found, CASES)
    assert sum(one.accepted for one in found.values()) > 5


# Rejection sampling.


def test_sampled_candidates_keep_the_law_of_the_target() -> None:
    """The target emits tokens that the draft cannot propose, as often as without it."""
    bench = Workbench(TablePair(target=TARGET_TABLE, draft=OPPOSED_TABLE), seed=1)
    parts = bench.parts(
        source=source_of(bench, sample=True),
        policy=Static(branching=[3, 2]),
        verifier=RejectionVerifier(),
    )
    assert least_p_value(parts, 1200) > FALSE_ALARM


# Real tokenizers.


@cache
def bundled() -> Vocabulary:
    folder = Path(family_path("bundled:target"))
    return Vocabulary(load_tokenizer(folder), size=4096, end=0, name="model.target=target")


@cache
def described() -> dict[str, Any]:
    path = Path(family_path("bundled:target")) / "tokenizer.json"
    return dict(json.loads(path.read_text("utf-8")))


def reduced(merges: int) -> Vocabulary:
    other, parts = other_tokenizer(described(), merges=merges, seed=1)
    tokenizer = fast_tokenizer(other, eos_token="<|end|>")
    end = other["model"]["vocab"]["<|end|>"]
    return Vocabulary(tokenizer, size=len(parts), end=end, name="model.translated=other")


def incremental(translation: Translation, tokens: list[int], num_prompt: int) -> tuple[int, ...]:
    text = DraftText(translation, tokens[:num_prompt])
    for token in tokens[num_prompt:]:
        text.root = text._below(text.root, token)
    return (*text.final, *(text._nodes[n].token for n in text._path(text.root.leaf)))


@pytest.mark.parametrize("merges", [3839, 500, 0])
def test_token_by_token_equals_the_whole_text(merges: int) -> None:
    """On code: the last word is all that needs to be tokenised again."""
    draft = reduced(merges)
    translation = Translation(bundled(), draft)
    tokens = bundled().encode(CODE[:6000])
    found = incremental(translation, tokens, 10)
    assert b"".join(draft.tokens[token] or b"" for token in found) == CODE[:6000].encode()
    whole = draft.encode(CODE[:6000])
    assert len(found) == len(whole)
    assert np.mean(np.array(found) == np.array(whole)) > 0.999
    if merges == 3839:
        names = dict(zip(translation.target_ids, translation.draft_ids, strict=True))
        assert [names[token] for token in tokens] == list(found)


def test_the_intersection_has_equal_bytes_and_both_ends() -> None:
    draft = reduced(1000)
    translation = Translation(bundled(), draft)
    pairs = list(zip(translation.target_ids, translation.draft_ids, strict=True))
    assert (0, draft.end) in pairs
    assert all(bundled().tokens[t] == draft.tokens[d] for t, d in pairs if t)
    assert len(pairs) == sum(token is not None for token in draft.tokens) + 1


def test_characters_may_end_in_the_next_token() -> None:
    """Half a character: byte tokens where the draft has them, else no candidates until it ends."""
    text = "na\u00efve \u4f60\u597d \U0001f600."
    tokens = bundled().encode(text)
    assert any(
        b and max(b) >= 0x80 and _partial(b) for b in map(bundled().tokens.__getitem__, tokens)
    )
    byte_level = Translation(bundled(), reduced(300))
    found = incremental(byte_level, tokens, 1)
    assert b"".join(reduced(300).tokens[t] or b"" for t in found).decode() == text
    few = Vocabulary(
        words(["na\u00efve", "\u4f60\u597d", "\U0001f600", ".", " ", "na"]),
        size=8,
        end=None,
        name="model.translated=words",
    )
    tail = Tail(())
    waits = []
    for token in tokens:
        tail = Translation(bundled(), few).extended(tail, token)
        waits.append(bool(tail.rest))
    assert any(waits)
    assert not waits[-1]


def _partial(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return True
    return False


def words(texts: list[str]) -> PreTrainedTokenizerFast:
    """A tokenizer of plain words."""
    vocab = {text: token for token, text in enumerate(["<unk>", *texts])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


def test_sentence_piece_tokens_are_text() -> None:
    vocab = {"<unk>": 0, "<0x0A>": 1, "\u2581": 2, "a": 3, "\u2581a": 4, "b": 5, "ab": 6}
    backend = Tokenizer(
        models.BPE(vocab, [("\u2581", "a"), ("a", "b")], unk_token="<unk>", byte_fallback=True)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    backend.decoder = decoders.Sequence([decoders.Metaspace(), decoders.ByteFallback()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    read = Vocabulary(tokenizer, size=9, end=None, name="model.translated=sp")
    assert read.tokens == [None, b"\n", b" ", b"a", b" a", b"b", b"ab", None, None]
    assert tokenizer("a")["input_ids"] == [4]
    assert read.encode("a") == [3]  # a continuation has no space before it
    translation = Translation(bundled(), read)
    assert set(translation.draft_ids.tolist()) >= {1, 2, 3, 4, 5}


# Errors.


def test_what_is_missing_is_named() -> None:
    pair = PretrainedPair(target="bundled:target", draft="bundled:draft")
    with pytest.raises(UserError, match=r"model\.translated=PATH"):
        TranslatedSource(pair=pair, meter=Meter())
    nothing = Vocabulary(words(["\u4f60"]), size=2, end=None, name="model.translated=words")
    with pytest.raises(UserError, match=r"model.translated=words and model.target=target have no"):
        Translation(bundled(), nothing)


def test_a_tokenizer_that_leaves_out_spaces_is_refused() -> None:
    backend = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(UserError, match="WordPiece"):
        Vocabulary(PreTrainedTokenizerFast(tokenizer_object=backend), size=2, end=None, name="x")
