"""``data=edits`` and targets that write given texts (``model=transcript``)."""

import ast
import json
import re

import pytest

from specdec.config.job import run_job_of
from specdec.data.edits import KINDS, MAX_CHARS, TURNS, EditPrompts, edit_turns
from specdec.errors import UserError
from specdec.metrics import summarise
from specdec.pairs import build_pair
from specdec.runs.jobs import prepare
from specdec.runs.runners import PartsRunner
from specdec.state import StopRules

pytestmark = pytest.mark.slow


def test_every_turn_edits_the_version_before_it():
    """A session is one file; the shown version is the last answer; all versions parse."""
    turns = edit_turns()
    assert len(turns) >= 20 * TURNS
    assert len(turns) % TURNS == 0
    for first in range(0, len(turns), TURNS):
        session = turns[first : first + TURNS]
        assert len({turn.place.partition(" ")[0] for turn in session}) == 1
        before = None
        for number, turn in enumerate(session, 1):
            assert turn.index == first + number - 1
            ast.parse(turn.completion)
            if turn.kind == "rewrite":
                shown = re.search(r"version \d+:\n(.*?\n)\n?# Task: ", turn.prompt, re.DOTALL)
                assert shown is not None
                assert before is None or shown[1].strip() == before.strip()
                assert shown[1].strip() != turn.completion.strip(), "an edit changes the file"
            else:
                assert before is not None, "the file occurs in an earlier turn"
                assert "def " not in turn.prompt
                assert "class " not in turn.prompt
            before = turn.completion
        assert {turn.kind for turn in session} == set(KINDS)
        assert len(session[0].completion) < 2 * MAX_CHARS


def test_the_turns_are_the_same_every_time():
    before = edit_turns()
    edit_turns.cache_clear()
    assert edit_turns() == before
    prompts = list(EditPrompts(subset="resume").prompts())
    assert [p.id for p in prompts] == [t.index for t in before if t.kind == "resume"]
    with pytest.raises(UserError, match="choose one of rewrite, resume"):
        EditPrompts(subset="other")


def run(words, limit=None):
    cfg = run_job_of(["model=transcript", "max_new_tokens=600", *words]).config
    pair, prompts, _ = prepare(cfg)
    prompts = prompts[:limit]
    stop = StopRules(max_new_tokens=600, eos_ids=pair.eos_ids)
    runner = PartsRunner(cfg=cfg, pair=pair, stop=stop)
    results = []
    totals = runner.run(prompts, results.append)
    runner.close()
    return pair, results, summarise(results, totals)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Two requests whose completions repeat each other, and their file."""
    rows = [
        {"prompt": "first:", "completion": "one two three four five six seven"},
        {"prompt": "second one:", "completion": "zero one two three four five six seven eight"},
    ]
    file = tmp_path_factory.mktemp("texts") / "log.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file, rows


@pytest.mark.parametrize("strategy", ["ar", "suffix"])
def test_the_target_writes_the_given_text(texts, strategy):
    file, rows = texts
    pair, results, summary = run([f"strategy={strategy}", f"model.texts={file}"])
    tokenizer = build_pair({"kind": "pretrained", **_TINY}).tokenizer
    for result, row in zip(results, rows, strict=True):
        *text, end = result.output
        assert tokenizer.decode(text) == row["completion"]
        assert end in pair.eos_ids
        assert result.finish_reason == "eos"
    if strategy == "suffix":  # the second text copies from the first, which has ended
        assert results[1].counters.accepted >= 5
        assert summary["acceptance_length"] > 1.3


_TINY = {
    "target": "bundled:target",
    "draft": None,
    "ngram": None,
    "exit_heads": None,
    "exit_layer": 3,
}


def test_suffix_decoding_copies_what_prompt_lookup_cannot():
    """Of six turns two resume work whose text is in earlier requests only."""
    outputs, lengths = {}, {}
    for strategy in ("prompt_lookup", "suffix"):
        _, results, summary = run([f"strategy={strategy}", "clock=simulated"], limit=2 * TURNS)
        outputs[strategy] = [result.output for result in results]
        lengths[strategy] = summary["acceptance_length"]
        assert summary["loop_share"] < 0.1
    assert outputs["suffix"] == outputs["prompt_lookup"]
    assert lengths["suffix"] > 1.3 * lengths["prompt_lookup"]
