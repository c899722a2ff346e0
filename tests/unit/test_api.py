"""``specdec.generate`` and ``specdec.stream``."""

from __future__ import annotations

import pytest

import specdec
from specdec.pairs import RandomPair

PAIR = RandomPair()
OVERRIDES = ["strategy=best_first", "model=random", "max_new_tokens=9", "sampling=t06"]


def test_generate_equals_plain_decoding_and_streams_the_same() -> None:
    plain = specdec.generate([1, 2, 3], overrides=[*OVERRIDES, "strategy=ar"], pair=PAIR)
    ours = specdec.generate([1, 2, 3], overrides=OVERRIDES, pair=PAIR)
    assert ours.tokens == plain.tokens
    assert len(ours.tokens) == 9
    assert ours.metrics["new_tokens"] == 9
    steps = list(specdec.stream([1, 2, 3], overrides=OVERRIDES, pair=PAIR))
    assert [token for step in steps for token in step] == list(plain.tokens)
    assert len(steps) == ours.metrics["target_passes"] <= 9


def test_another_prompt_id_draws_other_tokens() -> None:
    outputs = {
        specdec.generate([1, 2, 3], overrides=OVERRIDES, pair=PAIR, prompt_id=i).tokens
        for i in range(4)
    }
    assert len(outputs) > 1


@pytest.mark.parametrize(
    ("prompt", "overrides", "message"),
    [
        ([], [], "prompt is empty"),
        ([1] * 600, [], "512 positions"),
        ([1], ["strategy=hf_generate"], "transformers' own"),
        ([1], ["policy.gama=3"], "gama"),
        ("text", [], "token ids"),
    ],
)
def test_bad_input_names_value_and_remedy(prompt, overrides, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(specdec.UserError, match=message):
        specdec.generate(prompt, overrides=[*OVERRIDES, *overrides], pair=PAIR)
