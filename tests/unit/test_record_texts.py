"""``specdec record``: a record from texts equals the one that a run with the target writes."""

import json
from pathlib import Path

import numpy as np
import pytest

from specdec.cli.main import main
from specdec.config.job import run_job_of
from specdec.pairs.record import Record, read_record
from specdec.report.results import read_requests
from specdec.runs.jobs import prepare

pytestmark = pytest.mark.slow

WORDS = ["strategy=ar", "data=stdlib", "data.limit=2", "max_new_tokens=20", "sampling=t06"]


@pytest.fixture(scope="module")
def of_the_target(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Record, list[dict[str, object]]]:
    """The record of a run with both models, and its prompts and outputs as token ids."""
    folder = tmp_path_factory.mktemp("run")
    assert main(["run", *WORDS, "record=true", f"output_dir={folder}"]) == 0
    _, prompts, _ = prepare(run_job_of(WORDS).config)
    outputs = {r.result.id: r.result.output for r in read_requests(folder / "requests.jsonl")}
    lines: list[dict[str, object]] = [
        {
            "id": prompt.id,
            "prompt_token_ids": prompt.tokens.tolist(),
            "output_token_ids": list(outputs[prompt.id]),
        }
        for prompt in prompts
    ]
    return read_record(folder / "record.npz"), lines


def recorded(lines: list[dict[str, object]], folder: Path, sampling: str = "t06") -> Record:
    path = folder / "texts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    assert main(["record", str(path), f"sampling={sampling}", f"output_dir={folder}"]) == 0
    return read_record(folder / "record.npz")


def equal(one: Record, two: Record) -> bool:
    pairs = zip(one.requests, two.requests, strict=True)
    return all(
        a.id == b.id
        and a.num_prompt == b.num_prompt
        and np.array_equal(a.ranks, b.ranks)
        and np.array_equal(a.logprobs, b.logprobs)
        for a, b in pairs
    )


def test_texts_give_the_record_of_the_run(
    of_the_target: tuple[Record, list[dict[str, object]]], tmp_path: Path
) -> None:
    """Every rank and log probability; another sampling, or one other token, breaks it."""
    whole, lines = of_the_target
    again = recorded(lines, tmp_path)
    assert equal(again, whole)
    assert again.vocab_size == whole.vocab_size
    assert again.weight_bytes[1] == whole.weight_bytes[1]
    assert again.about["loop_share"] == whole.about["loop_share"]
    assert not equal(recorded(lines, tmp_path, "greedy"), whole)
    output = list(lines[0]["output_token_ids"])  # type: ignore[call-overload]
    changed = {**lines[0], "output_token_ids": [output[0] + 1, *output[1:]]}
    assert not equal(recorded([changed, *lines[1:]], tmp_path), whole)


def test_plain_text_is_tokenised(tmp_path: Path) -> None:
    line: dict[str, object] = {"prompt": "def add(a, b):", "completion": "\n    return a + b\n"}
    record = recorded([line], tmp_path, "greedy")
    assert record.requests[0].num_output > 3
    replay = ["strategy=speculative", "model=replay", f"model.record={tmp_path / 'record.npz'}"]
    assert main(["run", *replay, "clock=simulated", f"output_dir={tmp_path / 'run'}"]) == 0
