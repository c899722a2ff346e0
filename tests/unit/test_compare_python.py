"""``specdec.compare`` and ``specdec.verify``, and batches of a ``Decoder``."""

from pathlib import Path

import pytest

import specdec
from specdec.pairs import RandomPair

pytestmark = pytest.mark.slow

PAIR = RandomPair()
WORDS = ["model=random", "data.limit=2", "max_new_tokens=8", "repeats=1", "clock=simulated"]
PROMPTS = [[1, 2, 3], [7, 8], [4, 5, 6, 9]]


@pytest.fixture(scope="module")
def compared() -> specdec.Compared:
    return specdec.compare(["ar", "speculative"], [*WORDS, "policy.gamma=2"], pair=PAIR)


def test_a_comparison_has_rows_frames_and_the_table(compared: specdec.Compared) -> None:
    assert [row["strategy"] for row in compared.rows] == ["ar", "speculative"]
    assert compared.rows[1]["lossless"] is True
    assert "policy.gamma=2 does not apply to ar" in compared.notes
    assert "speculative" in str(compared)
    frame = compared.frame().set_index("strategy")
    assert frame.loc["speculative", "speedup_wall"] == compared.rows[1]["speedup_wall"]
    assert frame.loc["speculative", "config.policy.gamma"] == 2
    prompts = compared.prompt_frame()
    assert len(prompts) == 2 * 2
    tokens = compared.token_frame()
    assert len(tokens) == 2 * 2 * 8
    by_strategy = tokens.groupby("strategy")["token"].apply(list)
    assert by_strategy["ar"] == by_strategy["speculative"]


def test_files_are_kept_where_a_folder_is_named(tmp_path: Path, capsys: object) -> None:
    from specdec.report import results

    folder = tmp_path / "kept"
    found = specdec.compare(["ar"], WORDS, pair=PAIR, output_dir=folder)
    assert (folder / "comparison.md").is_file()
    (result,) = results.read(folder)
    assert [r.result.output for r in result.records] == [
        r.result.output for r in found.results[0].records
    ]
    again = specdec.compare(["ar"], WORDS, pair=PAIR, output_dir=folder)
    assert (again.rows, str(again)) == (found.rows, (folder / "comparison.md").read_text())
    (folder / "comparison.json").unlink()
    written = (folder / "requests.jsonl").read_text()
    part = specdec.compare(["ar"], WORDS, pair=PAIR, output_dir=folder)
    assert part.rows[0]["strategy"] == "ar"
    assert (folder / "requests.jsonl").read_text() == written, "nothing is decoded twice"
    with pytest.raises(specdec.UserError, match="another configuration"):
        specdec.compare(["ar"], [*WORDS, "seed=1"], pair=PAIR, output_dir=folder)
    with pytest.raises(specdec.UserError, match="must be a list of texts"):
        specdec.compare("ar")


@pytest.mark.parametrize("size", [1, 2])
def test_a_batch_gives_the_tokens_of_its_prompts_alone(size: int) -> None:
    words = ["strategy=best_first", "model=random", "max_new_tokens=9", "sampling=t06"]
    with specdec.Decoder(words, pair=PAIR) as decoder:
        alone = [decoder.generate(p, prompt_id=5 + i) for i, p in enumerate(PROMPTS)]
    told: dict[int, list[int]] = {}

    def tell(step: specdec.Step) -> None:
        told.setdefault(step.prompt_id, []).extend(step.tokens)

    with specdec.Decoder([*words, f"batch_size={size}"], pair=PAIR) as decoder:
        batch = decoder.generate(PROMPTS, prompt_id=5, on_step=tell)
        assert [g.tokens for g in batch] == [g.tokens for g in alone]
        assert [told[5 + i] for i in range(3)] == [list(g.tokens) for g in alone]
        passes = sum(g.metrics["target_passes"] for g in alone)
        shared = batch[0].metrics["target_passes"]
        assert shared == passes if size == 1 else shared < passes
        assert decoder.generate([1, 2, 3], prompt_id=5).tokens == alone[0].tokens


def test_a_request_of_a_batch_is_cancelled_alone_and_an_error_ends_all() -> None:
    words = ["strategy=ar", "model=random", "max_new_tokens=9", "batch_size=2"]
    with specdec.Decoder(words, pair=PAIR) as decoder:
        whole = decoder.generate(PROMPTS)
        part = decoder.generate(PROMPTS, on_step=lambda step: step.prompt_id != 1)
        assert [g.finish_reason for g in part] == ["length", "cancelled", "length"]
        assert [part[0].tokens, part[2].tokens] == [whole[0].tokens, whole[2].tokens]

        def fail(_: specdec.Step) -> None:
            raise ArithmeticError("told so")

        with pytest.raises(ArithmeticError, match="told so"):
            decoder.generate(PROMPTS, on_step=fail)
        assert [g.tokens for g in decoder.generate(PROMPTS)] == [g.tokens for g in whole]
        with pytest.raises(specdec.UserError, match="is empty"):
            decoder.generate([[1, 2], []])
        with pytest.raises(specdec.UserError, match="the prompt is empty"):
            decoder.generate([])


def test_the_report_of_verify_is_a_frame() -> None:
    report = specdec.verify(["strategy=ar", "model=random"], checks=["greedy_parity"])
    frame = report.frame()
    assert frame.columns.tolist() == ["check", "result", "detail"]
    assert frame.loc[0, ["check", "result"]].tolist() == ["greedy_parity", "passed"]
