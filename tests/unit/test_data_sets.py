"""The papers' benchmarks: each loader against its local file, read here by other means."""

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

from specdec.data import Prompt, Request, check_data, data_provenance, load_prompts, prompt_tokens
from specdec.data import sets as sets_module
from specdec.data.sets import MIXED, SETS
from specdec.errors import UserError


def lines_of(path: Path) -> list[str]:
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8-sig")
    return [line for line in text.split("\n") if line.strip()]


FIRST = {  # first prompt made from the first record by hand
    "prompt": lambda r: r["prompt"].rstrip("\n"),
    "turn": lambda r: f"USER: {r['turns'][0]}\nASSISTANT:",
    "question": lambda r: f"Question: {r['question']}\nAnswer:",
    "context": lambda r: r["context"],
    "document": lambda r: f"Article: {r['document']}\n\nSummary of the article in one sentence:",
}
# set, number of prompts, key of FIRST, file
EXPECTED = """\
humaneval 164 prompt humaneval/HumanEval.jsonl.gz
humaneval_x 164 prompt humaneval_x/humaneval_python.jsonl.gz
gsm8k 1319 question gsm8k/test.jsonl.gz
natural_questions 3610 question natural_questions/NQ-open.dev.jsonl.gz
xsum 1000 document xsum/test.jsonl.gz
drop 9536 context drop/drop_v0_dev.jsonl.gz
mt_bench 80 turn eagle/mt_bench/question.jsonl
alpaca 80 turn eagle/alpaca/question.jsonl
cnn_dm 1000 turn cnn_dailymail/CNNDM.jsonl.gz
math500 500 turn deepspec_eval/math500.jsonl
aime25 30 turn deepspec_eval/aime25.jsonl
livecodebench 1055 turn deepspec_eval/livecodebench.jsonl.gz
swe_bench 300 turn deepspec_eval/swe-bench.jsonl.gz
arena_hard 750 turn deepspec_eval/arena-hard-v2.jsonl.gz
spec_bench 480 turn spec_bench/question.jsonl.gz
"""


@pytest.mark.parametrize("row", EXPECTED.splitlines())
def test_first_prompt_and_count_are_the_files(row: str, data_dir: Path) -> None:
    name, count, form, file = row.split()
    prompts = load_prompts(name=name)
    lines = lines_of(data_dir / file)
    assert len(prompts) == int(count) == len(lines)
    assert prompts[0].text == FIRST[form](json.loads(lines[0]))
    assert [p.id for p in prompts] == list(range(len(prompts)))
    check_data(Request(name=name))


@pytest.mark.slow
def test_mmlu_asks_all_subjects_or_one(data_dir: Path) -> None:
    files = sorted((data_dir / "mmlu/test").glob("*.csv*"))
    rows = [list(csv.reader(lines_of(file))) for file in files]
    prompts = load_prompts(name="mmlu")
    assert len(prompts) == sum(map(len, rows)) == 14042
    question, a, b, c, d, _ = rows[0][0]
    assert prompts[0].text == f"{question}\nA. {a}\nB. {b}\nC. {c}\nD. {d}\nAnswer:"
    subject = files[1].name.partition("_test.csv")[0]
    part = load_prompts(name="mmlu", subset=subject)
    # The same ids, so the same draws, as in the whole set.
    assert part == prompts[len(rows[0]) : len(rows[0]) + len(rows[1])]
    with pytest.raises(UserError, match=r"'anatomi' is not a subject .*anatomy"):
        load_prompts(name="mmlu", subset="anatomi")


def test_wmt14_and_triviaqa(data_dir: Path) -> None:
    german = lines_of(data_dir / "wmt14_deen/newstest2014.deu.gz")
    prompts = load_prompts(name="wmt14")
    assert len(prompts) == 3003
    assert prompts[0].text == f"German: {german[0]}\nEnglish:"
    assert prompts[-1].message == f"Translate German to English: {german[-1]}"
    asked = json.loads((data_dir / "triviaqa_wiki/triviaqa.json").read_text())
    prompts = load_prompts(name="triviaqa")
    assert len(prompts) == len(asked) == 150
    assert prompts[0].text == f"Question: {asked[0]['question']}\nAnswer:"


def test_mixed_takes_the_sets_that_are_named(data_dir: Path) -> None:
    names = ["drop", "gsm8k", "stdlib"]
    prompts = load_prompts(name="mixed", sets=names, limit=7)
    assert [p.name.split("/")[0] for p in prompts] == [names[i % 3] for i in range(7)]
    again = load_prompts(name="mixed", sets=["gsm8k"], limit=2)
    assert again == [p for p in prompts if p.name.startswith("gsm8k")][:2]  # ids stay
    sample = load_prompts(name="mixed", sets=names, limit=6, sample_seed=1)
    # A sample of the mixture is a sample of each set, of the same size.
    assert [p.name.split("/")[0] for p in sample] == [p.name.split("/")[0] for p in prompts[:6]]
    assert sample != prompts[:6]


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


def test_provenance_hashes_templates_and_files(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = data_provenance({"name": "gsm8k"})
    files: Any = before["files"]
    assert files["gsm8k"]["file"] == "gsm8k/test.jsonl"
    assert len(files["gsm8k"]["sha256"]) == 64
    entry = SETS["gsm8k"]
    place = entry.places[0]
    place = replace(place, texts=place.texts._replace(message="Solve: {question}"))
    changed = replace(entry, places=(place, *entry.places[1:]))
    monkeypatch.setitem(sets_module.SETS, "gsm8k", changed)
    after = data_provenance({"name": "gsm8k"})
    assert after["templates_sha256"] != before["templates_sha256"]
    assert "python" in data_provenance({"name": "stdlib"})
    mixed: Any = data_provenance({"name": "mixed", "sets": ["gsm8k", "drop"]})
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
