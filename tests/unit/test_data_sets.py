"""The papers' benchmarks: each loader against its local file, read here by other means."""

from __future__ import annotations

import csv
import gzip
import json
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specdec.data import (
    Prompt,
    Request,
    check_data,
    data_provenance,
    load_prompts,
    prompt_tokens,
)
from specdec.data import sets as sets_module
from specdec.data.sets import BOOKS, MIXED, SETS
from specdec.errors import UserError


def lines_of(path: Path) -> list[str]:
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8-sig")
    return [line for line in text.split("\n") if line.strip()]


def first(path: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(lines_of(path)[0])
    return record


# set -> file, how many prompts, first prompt made from the first record by hand
EXPECTED = {
    "humaneval": ("humaneval/HumanEval.jsonl.gz", 164, lambda r: r["prompt"].rstrip("\n")),
    "gsm8k": ("gsm8k/test.jsonl.gz", 1319, lambda r: f"Question: {r['question']}\nAnswer:"),
    "xsum": (
        "xsum/test.jsonl.gz",
        1000,
        lambda r: f"Article: {r['document']}\n\nSummary of the article in one sentence:",
    ),
    "mt_bench": (
        "eagle/mt_bench/question.jsonl",
        80,
        lambda r: f"USER: {r['turns'][0]}\nASSISTANT:",
    ),
    "humaneval_x": (
        "humaneval_x/humaneval_python.jsonl.gz",
        164,
        lambda r: r["prompt"].rstrip("\n"),
    ),
    "alpaca": (
        "eagle/alpaca/question.jsonl",
        80,
        lambda r: f"USER: {r['turns'][0]}\nASSISTANT:",
    ),
    "cnn_dm": (
        "cnn_dailymail/CNNDM.jsonl.gz",
        1000,
        lambda r: f"USER: {r['turns'][0]}\nASSISTANT:",
    ),
    "natural_questions": (
        "natural_questions/NQ-open.dev.jsonl.gz",
        3610,
        lambda r: f"Question: {r['question']}\nAnswer:",
    ),
    "drop": ("drop/drop_v0_dev.jsonl.gz", 9536, lambda r: r["context"]),
    **{
        name: (f"deepspec_eval/{file}", count, lambda r: f"USER: {r['turns'][0]}\nASSISTANT:")
        for name, file, count in (
            ("math500", "math500.jsonl", 500),
            ("aime25", "aime25.jsonl", 30),
            ("livecodebench", "livecodebench.jsonl.gz", 1055),
            ("swe_bench", "swe-bench.jsonl.gz", 300),
            ("arena_hard", "arena-hard-v2.jsonl.gz", 750),
        )
    },
    "spec_bench": (
        "spec_bench/question.jsonl.gz",
        480,
        lambda r: f"USER: {r['turns'][0]}\nASSISTANT:",
    ),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_first_prompt_and_count_are_the_files(name: str, data_dir: Path) -> None:
    file, count, words = EXPECTED[name]
    prompts = load_prompts(name=name, data_dir=data_dir)
    assert len(prompts) == count == len(lines_of(data_dir / file))
    assert prompts[0].text == words(first(data_dir / file))
    assert [p.id for p in prompts] == list(range(count))
    check_data(Request(name=name, data_dir=data_dir))


def test_every_set_is_checked_here() -> None:
    others = {"mmlu", "wmt14", "triviaqa", "gutenberg"}
    assert EXPECTED.keys() | others == SETS.keys()


@pytest.mark.slow
def test_mmlu_asks_all_subjects_or_one(data_dir: Path) -> None:
    files = sorted((data_dir / "mmlu/test").glob("*.csv*"))
    rows = [list(csv.reader(lines_of(file))) for file in files]
    prompts = load_prompts(name="mmlu", data_dir=data_dir)
    assert len(prompts) == sum(map(len, rows)) == 14042
    question, a, b, c, d, _ = rows[0][0]
    assert prompts[0].text == f"{question}\nA. {a}\nB. {b}\nC. {c}\nD. {d}\nAnswer:"
    subject = files[1].name.partition("_test.csv")[0]
    part = load_prompts(name="mmlu", subset=subject, data_dir=data_dir)
    # The same ids, so the same draws, as in the whole set.
    assert part == prompts[len(rows[0]) : len(rows[0]) + len(rows[1])]
    with pytest.raises(UserError, match=r"'anatomi' is not a subject .*anatomy"):
        load_prompts(name="mmlu", subset="anatomi", data_dir=data_dir)


def test_wmt14_and_triviaqa(data_dir: Path) -> None:
    german = lines_of(data_dir / "wmt14_deen/newstest2014.deu.gz")
    prompts = load_prompts(name="wmt14", data_dir=data_dir)
    assert len(prompts) == 3003
    assert prompts[0].text == f"German: {german[0]}\nEnglish:"
    assert prompts[-1].message == f"Translate German to English: {german[-1]}"
    asked = json.loads((data_dir / "triviaqa_wiki/triviaqa.json").read_text())
    prompts = load_prompts(name="triviaqa", data_dir=data_dir)
    assert len(prompts) == len(asked) == 150
    assert prompts[0].text == f"Question: {asked[0]['question']}\nAnswer:"


def test_gutenberg_gives_the_whole_book_and_three_tasks(data_dir: Path) -> None:
    prompts = load_prompts(name="gutenberg", data_dir=data_dir)
    assert len(prompts) == len(BOOKS) == 10
    alice = prompts[list(BOOKS).index("alice_in_wonderland")]
    raw = gzip.decompress((data_dir / "gutenberg/alice_in_wonderland.txt.gz").read_bytes())
    body = raw.decode("utf-8-sig").replace("\r\n", "\n")
    body = body.split("*** START OF")[1].split("***", 1)[1].split("*** END OF")[0].strip()
    assert alice.text.startswith(body)
    tasks = alice.text[len(body) :]
    assert "Alice's Adventures in Wonderland" in tasks
    assert [f"\n{i}. " in tasks for i in (1, 2, 3)] == [True] * 3
    assert all("GUTENBERG EBOOK" not in p.text for p in prompts)
    (one,) = load_prompts(name="gutenberg", subset="alice_in_wonderland", data_dir=data_dir)
    assert one == alice


def test_a_missing_book_is_named_unless_another_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "gutenberg").mkdir()
    text = "*** START OF THE BOOK ***\nWords.\n*** END OF THE BOOK ***"
    (tmp_path / "gutenberg/great_gatsby.txt").write_text(text)
    with pytest.raises(UserError, match=r"dolls_house\.txt\[\.gz\].*put the book there"):
        load_prompts(name="gutenberg", data_dir=tmp_path)
    (one,) = load_prompts(name="gutenberg", subset="great_gatsby", data_dir=tmp_path)
    assert one.text.startswith("Words.\n")


def test_spec_bench_tasks_are_eighty_each(data_dir: Path) -> None:
    whole = load_prompts(name="spec_bench", data_dir=data_dir)
    parts = [
        load_prompts(name="spec_bench", subset=task, data_dir=data_dir)
        for task in SETS["spec_bench"].subsets or ()
    ]
    assert [len(part) for part in parts] == [80] * 6
    assert sorted((p for part in parts for p in part), key=lambda p: p.id) == whole


@pytest.mark.parametrize("name", SETS)
def test_a_missing_set_says_where_to_put_it(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        check_data(Request(name=name, data_dir=tmp_path))
    message = str(caught.value)
    place = SETS[name].places[0].file.split("{")[0]
    assert place in message
    assert "SPECDEC_DATA" in message
    assert ("data.origin=hub" in message) == (SETS[name].hub is not None)


def test_mixed_takes_the_sets_that_are_named(data_dir: Path) -> None:
    names = ["drop", "gsm8k", "stdlib"]
    prompts = load_prompts(name="mixed", sets=names, limit=7, data_dir=data_dir)
    assert [p.name.split("/")[0] for p in prompts] == [names[i % 3] for i in range(7)]
    again = load_prompts(name="mixed", sets=["gsm8k"], limit=2, data_dir=data_dir)
    assert again == [p for p in prompts if p.name.startswith("gsm8k")][:2]  # ids stay
    sample = load_prompts(name="mixed", sets=names, limit=6, sample_seed=1, data_dir=data_dir)
    # A sample of the mixture is a sample of each set, of the same size.
    assert [p.name.split("/")[0] for p in sample] == [p.name.split("/")[0] for p in prompts[:6]]
    assert sample != prompts[:6]


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"name": "mixed", "sets": ["gsm8k", "droop"]}, ["'droop'", "drop"]),
        ({"name": "mixed", "sets": ["gsm8k", "gsm8k"]}, ["different"]),
        ({"name": "mixed", "sets": ["jsonl"]}, ["jsonl", "stdlib"]),
        ({"name": "gsm8k", "sets": ["drop"]}, ["data.sets", "mixed"]),
        ({"name": "gsm8k", "subset": "x"}, ["'x'", "mmlu"]),
        ({"name": "spec_bench", "subset": "math"}, ["'math'", "math_reasoning"]),
        ({"name": "humaneval_x", "subset": "rust"}, ["'rust'", "python"]),
        ({"name": "gsm8k", "origin": "web"}, ["'web'", "hub"]),
        ({"name": "gutenberg", "origin": "hub"}, ["gutenberg", "gsm8k"]),
        ({"name": "mixed", "origin": "hub"}, ["data.sets"]),
        ({"name": "gsm8k", "template": "{question}"}, ["data.template", "jsonl"]),
    ],
)
def test_keys_that_do_not_fit_are_refused(wanted: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        load_prompts(**wanted)
    assert all(word in str(caught.value) for word in words), caught.value


def test_own_template_names_the_records_fields(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"q": "1 + {a}?", "a": [{"t": "no"}]}\n')
    (prompt,) = load_prompts(name="jsonl", path=path, template="Q: {q} ({a.0.t})\nA:")
    assert prompt.text == "Q: 1 + {a}? (no)\nA:"  # braces in the text stay as they are
    with pytest.raises(UserError, match=r"no field 'b'.*data\.template"):
        load_prompts(name="jsonl", path=path, template="{b}")
    with pytest.raises(UserError, match=r"leave out data\.field"):
        load_prompts(name="jsonl", path=path, template="{q}", field="q")


class TestHub:
    """The hub's rows, with a stand-in for the library: no test needs the network."""

    @pytest.fixture
    def asked(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
        calls: list[tuple[object, ...]] = []
        rows = {
            "cais/mmlu": {"question": "Why?", "choices": ["p", "q", "r", "s"], "answer": 1},
            "wmt/wmt14": {"translation": {"de": "Ja.", "en": "Yes."}},
        }

        def load_dataset(repo: str, config: str | None, *, split: str) -> list[dict[str, Any]]:
            calls.append((repo, config, split))
            if repo not in rows:
                raise ConnectionError("no network\nlong trace")
            return [rows[repo]]

        fake = types.ModuleType("datasets")
        fake.load_dataset = load_dataset  # type: ignore[attr-defined]
        fake.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
        monkeypatch.setitem(sys.modules, "datasets", fake)
        return calls

    def test_rows_get_the_same_words_as_local_records(self, asked: list[Any]) -> None:
        (prompt,) = load_prompts(name="mmlu", origin="hub")
        assert prompt.text == "Why?\nA. p\nB. q\nC. r\nD. s\nAnswer:"
        (prompt,) = load_prompts(name="wmt14", origin="hub")
        assert prompt.text == "German: Ja.\nEnglish:"
        assert asked == [("cais/mmlu", "all", "test"), ("wmt/wmt14", "de-en", "test")]

    def test_failures_are_one_line_with_the_remedy(self, asked: list[Any]) -> None:
        with pytest.raises(UserError, match=r"openai/gsm8k.*no network.*SPECDEC_DATA") as caught:
            load_prompts(name="gsm8k", origin="hub")
        assert "\n" not in str(caught.value)

    def test_without_the_library_the_extra_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(UserError, match=r"specdec-lab\[hub\]"):
            check_data(Request(name="gsm8k", origin="hub"))


def test_provenance_hashes_templates_and_files(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = data_provenance("gsm8k", data_dir=data_dir)
    files: Any = before["files"]
    assert files["gsm8k"]["file"] == "gsm8k/test.jsonl"
    assert len(files["gsm8k"]["sha256"]) == 64
    entry = SETS["gsm8k"]
    place = replace(entry.places[0], message="Solve: {question}")
    changed = replace(entry, places=(place, *entry.places[1:]))
    monkeypatch.setitem(sets_module.SETS, "gsm8k", changed)
    after = data_provenance("gsm8k", data_dir=data_dir)
    assert after["templates_sha256"] != before["templates_sha256"]
    assert "python" in data_provenance("stdlib")
    mixed: Any = data_provenance("mixed", sets=["gsm8k", "drop"], data_dir=data_dir)
    assert mixed["files"].keys() == mixed["templates"].keys() == {"gsm8k", "drop"}


def test_the_order_of_the_sets_is_kept() -> None:
    """Ids in ``mixed`` follow from it, so results of earlier runs would no longer compare."""
    assert list(SETS) == [
        *("humaneval", "gsm8k", "xsum", "mt_bench", "humaneval_x", "alpaca", "cnn_dm"),
        *("natural_questions", "drop", "mmlu", "wmt14", "triviaqa", "spec_bench", "gutenberg"),
        *("math500", "aime25", "livecodebench", "swe_bench", "arena_hard"),
    ]
    assert tuple(list(SETS)[:12]) == MIXED


class TestChatTemplate:
    @pytest.fixture
    def tokenizer(self) -> PreTrainedTokenizerFast:
        words = ["<s>", "<user>", "<model>", "hi", "there", "Q:", "A:", "?"]
        inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="?"))
        inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", unk_token="?")

    PROMPT = Prompt(0, "Q: hi A:", "x/0", "line 1", "hi there")
    TEMPLATE = (
        "{{ bos_token }}{% for m in messages %} <user> {{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %} <model>{% endif %}"
    )

    def test_a_base_model_gets_the_text_and_a_chat_model_the_message(
        self, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        def words(chat: str) -> str:
            return " ".join(
                tokenizer.convert_ids_to_tokens(
                    prompt_tokens(self.PROMPT, tokenizer, chat=chat).tolist()
                )
            )

        assert words("auto") == words("never") == "Q: hi A:"
        with pytest.raises(UserError, match=r"no chat template.*data\.chat=auto"):
            words("always")
        tokenizer.chat_template = self.TEMPLATE
        assert words("auto") == words("always") == "<s> <user> hi there <model>"
        assert words("never") == "Q: hi A:"

    def test_the_date_is_fixed_and_a_broken_template_is_named(
        self, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        tokenizer.chat_template = "{{ date_string }} {{ messages[0]['content'] }}"
        assert len(prompt_tokens(self.PROMPT, tokenizer)) == 5  # 01 Jan 2025 hi there
        tokenizer.chat_template = "{{ raise_exception('system only') }}"
        with pytest.raises(UserError, match=r"x/0 \(system only\).*data\.chat=never"):
            prompt_tokens(self.PROMPT, tokenizer)
