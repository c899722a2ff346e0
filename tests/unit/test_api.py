"""``specdec.generate`` and ``specdec.stream``."""

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
    assert ours.finish_reason == "length"
    assert ours.metrics["new_tokens"] == 9
    steps = list(specdec.stream([1, 2, 3], overrides=OVERRIDES, pair=PAIR))
    assert tuple(token for step in steps for token in step.tokens) == plain.tokens
    assert tuple(o for step in steps for o in step.origins) == ours.origins
    assert [step.finish_reason for step in steps] == [None] * (len(steps) - 1) + ["length"]
    assert len(steps) == ours.metrics["target_passes"] <= 9
    steps_seen: list[specdec.Step] = []
    specdec.generate([1, 2, 3], overrides=OVERRIDES, pair=PAIR, on_step=steps_seen.append)
    assert steps_seen == steps


PIPELINE = ["strategy=specpipe", "executor.stages=3", "clock=simulated"]


@pytest.mark.parametrize("more", [[], PIPELINE], ids=["local", "pipeline"])
def test_cancelling_leaves_nothing_behind(more: list[str]) -> None:
    """A request that was left in the caches would change, or block, the one after it."""
    overrides = [*OVERRIDES, *more, "max_new_tokens=12"]
    with specdec.Decoder(overrides, pair=PAIR) as decoder:
        whole = decoder.generate([1, 2, 3])
        for step in decoder.stream([1, 2, 3]):
            first = step
            break
        assert first.finish_reason is None
        seen: list[specdec.Step] = []

        def until_four(step: specdec.Step) -> bool:
            seen.append(step)
            return sum(len(s.tokens) for s in seen) < 4

        part = decoder.generate([1, 2, 3], on_step=until_four)
        assert part.finish_reason == "cancelled"
        assert 4 <= len(part.tokens) < 12
        assert part.tokens == whole.tokens[: len(part.tokens)]
        again = decoder.generate([1, 2, 3])
        assert (again.tokens, again.finish_reason) == (whole.tokens, "length")
        for name in ("target_passes", "draft_passes", "draft_rows", "steps"):
            assert again.metrics[name] == whole.metrics[name], name


@pytest.mark.parametrize("more", [[], PIPELINE], ids=["local", "pipeline"])
def test_an_error_of_the_callback_ends_its_request_only(more: list[str]) -> None:
    """Rows left in flight once answered the next prompt, since both had the same id."""
    with specdec.Decoder([*OVERRIDES, *more], pair=PAIR) as decoder:
        whole = decoder.generate([4, 5, 6])

        def fail(_step: specdec.Step) -> None:
            raise ArithmeticError("its own error")

        with pytest.raises(ArithmeticError, match="its own error"):
            decoder.generate([1, 2, 3], on_step=fail)
        assert decoder.generate([4, 5, 6]).tokens == whole.tokens


def test_a_step_that_broke_down_and_a_stream_under_way_are_in_the_way() -> None:
    with specdec.Decoder(OVERRIDES, pair=PAIR) as decoder:
        stream = decoder.stream([1, 2, 3])
        next(stream)
        with pytest.raises(specdec.UserError, match="decoding another prompt"):
            decoder.generate([1, 2, 3])
        stream.close()  # type: ignore[attr-defined]
        whole = decoder.generate([1, 2, 3])
        with pytest.MonkeyPatch.context() as patch:
            executor = decoder._runner.parts.executor
            patch.setattr(executor, "collect", lambda **_: {}["interrupted"])
            with pytest.raises(KeyError):
                list(decoder.stream([1, 2, 3]))
        with pytest.raises(specdec.UserError, match="create a new one"):
            decoder.generate([1, 2, 3])
    with specdec.Decoder(OVERRIDES, pair=decoder.pair) as another:
        assert another.generate([1, 2, 3]).tokens == whole.tokens


def test_streams_and_calls_may_alternate_on_a_cache_that_has_grown() -> None:
    """A pool that grew within ``generate`` once could not be written to by ``stream``."""
    paged = ["serving.kv_tokens=512", "serving.block_tokens=1", "model.num_layers=1"]
    with specdec.Decoder([*OVERRIDES, *paged, "policy.bs=8"]) as decoder:
        whole = decoder.generate([1, 2, 3] * 30)
        steps = list(decoder.stream([1, 2, 3] * 30))
    assert tuple(token for step in steps for token in step.tokens) == whole.tokens


def test_streamed_text_is_whole_and_never_half_a_character() -> None:
    class Bytes:
        """Three tokens to a euro sign."""

        chat_template = None

        def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
            return {"input_ids": list(text.encode())}

        def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
            assert skip_special_tokens, "streams ended with <|im_end|>"
            return bytes("\u20ac".encode()[i % 3] for i in range(len(ids))).decode(errors="replace")

    class Pair(RandomPair):
        tokenizer = Bytes()

    overrides = ["strategy=ar", "model=random", "max_new_tokens=8"]
    steps = list(specdec.stream("12", overrides=overrides, pair=Pair()))
    assert [step.text for step in steps] == ["", "", "\u20ac"] * 2 + ["", "\ufffd"]
    assert [len(step.tokens) for step in steps] == [1] * 8


@pytest.mark.parametrize(
    ("prompt", "overrides", "message"),
    [
        ([], [], "prompt is empty"),
        ([1, 4096], [], "token 4096"),
        ([1] * 600, [], "512 positions"),
        ([1], ["strategy=hf_generate"], "transformers' own"),
        ([1], ["policy.gama=3"], "gama"),
        ("text", [], "token ids"),
        (b"text", [], "text or a list of token ids"),
    ],
)
def test_bad_input_names_value_and_remedy(prompt, overrides, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(specdec.UserError, match=message):
        specdec.generate(prompt, overrides=[*OVERRIDES, *overrides], pair=PAIR)


@pytest.mark.parametrize("prompt", ["", [], 5, b"text", ["text", ""]])
def test_prompts_are_refused_before_models_are_looked_for(prompt: object) -> None:
    with pytest.raises(specdec.UserError, match=r"prompt is (empty|text)"):
        specdec.generate(prompt, overrides=["model=hf", "model.target=nowhere"])  # type: ignore[arg-type]


def test_what_is_no_pair_is_refused_and_a_data_set_not_silently_ignored() -> None:
    with pytest.raises(specdec.UserError, match="pair=3 is no pair"):
        specdec.compare(["ar"], pair=3)  # type: ignore[arg-type]
    with pytest.raises(specdec.UserError, match=r"write Workbench\(pair\)"):
        specdec.build("speculative", PAIR)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="data=stdlib is not used here"):
        specdec.Decoder([*OVERRIDES, "data=stdlib"], pair=PAIR).close()
