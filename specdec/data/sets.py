"""Benchmarks of the papers: their files and the templates of their prompts.

``{field}`` in a template is replaced by the record's field; dots descend into nested fields.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from specdec.data.files import data_folder, find_file
from specdec.data.readers import (
    Reader,
    books,
    by_category,
    instructions,
    json_array,
    json_lines,
    multiple_choice,
    standard_library,
    text_lines,
)
from specdec.errors import UserError
from specdec.parts.fields import did_you_mean


class Texts(NamedTuple):
    template: str
    message: str

    def of(self, field: str) -> Texts:
        return Texts(*(text.replace("FIELD", field) for text in self))


@dataclass(frozen=True, slots=True)
class SetFile:
    """A file (perhaps .gz), or a folder if the name ends in "/", that may contain a set's records;
    it is relative to the data folder. ``{subset}`` is replaced by the subset.
    """

    file: str
    texts: Texts
    read: Reader = json_lines


@dataclass(frozen=True, slots=True)
class Hub:
    repo: str
    texts: Texts
    config: str | None = None
    split: str = "test"


@dataclass(frozen=True, slots=True)
class DataSet:
    places: tuple[SetFile, ...]  # possible files in the data folder, in the order of preference
    hub: Hub | None = None  # copy on the hub that loads without remote code, if there is one
    # values of ``data.subset``; None without subsets, () where the files name them
    subsets: tuple[str, ...] | None = None

    @property
    def first_subset(self) -> str:
        by_file = any("{subset}" in place.file for place in self.places)
        return self.subsets[0] if by_file and self.subsets else ""


# Open questions: unchanged for a chat model, in Vicuna's format for a base model.
_OPEN = Texts("USER: {FIELD}\nASSISTANT:", "{FIELD}")
FIRST_TURN = _TURN = _OPEN.of("turns.0")
_QUESTION = Texts("Question: {FIELD}\nAnswer:", "{FIELD}")
_CODE = Texts("{FIELD}", "Complete this Python function. Answer with the code alone.\n\n{FIELD}")
_CODE_X = Texts(*(text.replace("Python", "{subset}") for text in _CODE))
_GERMAN = Texts("German: {FIELD}\nEnglish:", "Translate German to English: {FIELD}")
_CHOICES = "{question}\nA. {A}\nB. {B}\nC. {C}\nD. {D}\nAnswer:"
_HUB_CHOICES = "{question}\nA. {choices.0}\nB. {choices.1}\nC. {choices.2}\nD. {choices.3}\nAnswer:"
_XSUM = Texts(
    "Article: {document}\n\nSummary of the article in one sentence:",
    "Summarize this article in one sentence.\n\n{document}",
)
_NEWS = Texts("USER: Summarize: {article}\nASSISTANT:", "Summarize: {article}")
_DROP = "Passage: {passage}\nQuestion: {question}\nAnswer:"
_BOOK = (
    "{text}\n\nThe text above is {title}.\n1. Give a short synopsis of the whole text.\n2. Choose"
    " one character or one episode and look closely at how it is written and what it means.\n3. Say"
    " what the book has to tell readers of today.\n"
)


def _files(texts: Texts, *files: str, read: Reader = json_lines) -> tuple[SetFile, ...]:
    return tuple(SetFile(file, texts, read) for file in files)


def _reasoning(file: str) -> DataSet:
    return DataSet(_files(_TURN, f"deepspec_eval/{file}.jsonl", f"{file}.jsonl"))


BOOKS = {  # file and title of the ten books of SpecPipe (2504.04104 v2), appendix B, in its order
    "dolls_house": "A Doll's House",
    "room_with_view": "A Room with a View",
    "alice_in_wonderland": "Alice's Adventures in Wonderland",
    "frankenstein": "Frankenstein; Or, The Modern Prometheus",
    "simple_sabotage": "Simple Sabotage Field Manual",
    "great_gatsby": "The Great Gatsby",
    "importance_of_being_earnest": "The Importance of Being Earnest",
    "dorian_gray": "The Picture of Dorian Gray",
    "jekyll_and_hyde": "The Strange Case of Dr. Jekyll and Mr. Hyde",
    "romeo_and_juliet": "The Tragedy of Romeo and Juliet",
}
TASKS = {  # Spec-Bench's six tasks and the categories in its file
    "mt_bench": (
        *("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem"),
        "humanities",
    ),
    "translation": ("translation",),
    "summarization": ("summarization",),
    "qa": ("qa",),
    "math_reasoning": ("math_reasoning",),
    "rag": ("rag",),
}
STDLIB = DataSet(_files(_CODE.of("text"), "", read=standard_library))
"""Function heads to complete, from the standard library; needs no file."""

SETS = {
    # 164 Python functions to complete (Chen et al. 2021)
    "humaneval": DataSet(
        _files(_CODE.of("prompt"), "humaneval/HumanEval.jsonl", "HumanEval.jsonl"),
        Hub("openai/openai_humaneval", _CODE.of("prompt")),
    ),
    # 1,319 grade-school mathematics questions, test split (Cobbe et al. 2021)
    "gsm8k": DataSet(
        _files(_QUESTION.of("question"), "gsm8k/test.jsonl", "gsm8k_test.jsonl"),
        Hub("openai/gsm8k", _QUESTION.of("question"), "main"),
    ),
    # news articles to summarise, test split (Narayan et al. 2018)
    "xsum": DataSet(
        _files(_XSUM, "xsum/test.jsonl", "xsum_test.jsonl"), Hub("EdinburghNLP/xsum", _XSUM)
    ),
    # 80 open questions, first turn (Zheng et al. 2023)
    "mt_bench": DataSet(
        _files(_TURN, "mt_bench/question.jsonl", "eagle/mt_bench/question.jsonl", "mt_bench.jsonl"),
        Hub("HuggingFaceH4/mt_bench_prompts", _OPEN.of("prompt.0"), split="train"),
    ),
    # 164 functions to complete in a language, data.subset (Zheng et al. 2023)
    "humaneval_x": DataSet(
        _files(_CODE_X.of("prompt"), "humaneval_x/humaneval_{subset}.jsonl"),
        subsets=("python", "cpp", "java", "js", "go"),
    ),
    # instructions: EAGLE's 80, else Alpaca's own (Taori et al. 2023)
    "alpaca": DataSet(
        (
            SetFile("eagle/alpaca/question.jsonl", _TURN),
            SetFile("alpaca/alpaca_data.json", _OPEN.of("text"), instructions),
        ),
        Hub("tatsu-lab/alpaca", _OPEN.of("instruction"), split="train"),
    ),
    # news articles to summarise, CNN/DailyMail (Hermann et al. 2015)
    "cnn_dm": DataSet(
        _files(_TURN, "cnn_dailymail/CNNDM.jsonl", "eagle/sum/question.jsonl"),
        Hub("abisee/cnn_dailymail", _NEWS, "3.0.0"),
    ),
    # 3,610 open questions without passages, NQ-open dev (Lee et al. 2019)
    "natural_questions": DataSet(
        (
            SetFile("natural_questions/NQ-open.dev.jsonl", _QUESTION.of("question")),
            SetFile("eagle/qa/question.jsonl", _QUESTION.of("turns.0")),
        ),
        Hub("google-research-datasets/nq_open", _QUESTION.of("question"), split="validation"),
    ),
    # questions about a passage, dev split (Dua et al. 2019)
    "drop": DataSet(
        _files(Texts("{context}", "{context}"), "drop/drop_v0_dev.jsonl"),
        Hub("ucinlp/drop", Texts(_DROP, _DROP), split="validation"),
    ),
    # questions with four choices, 57 subjects, data.subset (Hendrycks et al. 2021)
    "mmlu": DataSet(
        _files(Texts(_CHOICES, _CHOICES), "mmlu/test/", read=multiple_choice),
        Hub("cais/mmlu", Texts(_HUB_CHOICES, _HUB_CHOICES), "all"),
        subsets=(),
    ),
    # 3,003 sentences to translate from German, newstest2014 (Bojar et al. 2014)
    "wmt14": DataSet(
        _files(_GERMAN.of("text"), "wmt14_deen/newstest2014.deu", read=text_lines),
        Hub("wmt/wmt14", _GERMAN.of("translation.de"), "de-en"),
    ),
    # TriviaQA-Wiki questions, without passages (Joshi et al. 2017)
    "triviaqa": DataSet(
        _files(_QUESTION.of("question"), "triviaqa_wiki/triviaqa.json", read=json_array),
        Hub(
            *("mandarjoshi/trivia_qa", _QUESTION.of("question"), "rc.wikipedia.nocontext"),
            split="validation",
        ),
    ),
    # 480 prompts of six tasks, data.subset, first turn (Xia et al. 2024)
    "spec_bench": DataSet(
        _files(_TURN, "spec_bench/question.jsonl", read=by_category(TASKS)), subsets=tuple(TASKS)
    ),
    # ten books with three tasks each, data.subset (SpecPipe, appendix B)
    "gutenberg": DataSet(
        _files(Texts(_BOOK, _BOOK), "gutenberg/", read=books(BOOKS)), subsets=tuple(BOOKS)
    ),
    # 500 competition problems of MATH (Hendrycks et al. 2021; Lightman et al. 2023)
    "math500": _reasoning("math500"),
    # 30 problems of the American Invitational Mathematics Examination 2025
    "aime25": _reasoning("aime25"),
    # 1,055 programming contest problems (Jain et al. 2024)
    "livecodebench": _reasoning("livecodebench"),
    # 300 issues of Python repositories with the files around them (Jimenez et al. 2024)
    "swe_bench": _reasoning("swe-bench"),
    # 750 hard prompts of users, version 2 (Li et al. 2024)
    "arena_hard": _reasoning("arena-hard-v2"),
}
"""Sets whose records come from the data folder or the hub.

The order determines ids in ``data=mixed``: add new sets at the end.
"""

MIXED = tuple(SETS)[:12]
"""Sets of ``data=mixed`` by default: short prompts of the papers, without overlap."""

# Data sets with questions of several turns, and those that read the user's file ``data.path``.
DIALOGUES = ("mt_bench", "spec_bench", "jsonl", "speed_bench")
OWN = ("jsonl", "text", "speed_bench")
DATASETS: tuple[str, ...] = ("stdlib", *SETS, "mixed", *OWN)  # values of ``data=``


def require_known(name: str) -> None:
    if name not in DATASETS:
        raise UserError(f"data={name!r} is unknown: {did_you_mean(name, DATASETS)}")


def place_of(name: str, subset: str | None = None) -> tuple[SetFile, Path]:
    """Finds the first existing file of a data set (default: its first subset); UserError that names
    all possible files, if there is none.
    """
    entry = SETS[name]
    files = [p.file.replace("{subset}", subset or entry.first_subset) for p in entry.places]
    shown = " or ".join(file if file.endswith("/") else f"{file}[.gz]" for file in files)
    folder = data_folder(name=name, places=shown)
    for place, file in zip(entry.places, files, strict=True):
        path = find_file(folder, file)
        if path is not None:
            return place, path
    hub = ", or fetch it with data.origin=hub" if entry.hub is not None else ""
    raise UserError(
        f"data={name}: {str(folder)!r} holds no {shown}; put the file there, or set"
        f" SPECDEC_DATA to the folder that has it{hub} (data=stdlib needs no files)"
    )


def holds(name: str) -> bool:
    try:
        return bool(place_of(name))
    except UserError:
        return False
