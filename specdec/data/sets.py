"""Benchmarks of the papers: their files and the templates of their prompts.

``{field}`` in a template is replaced by the record's field; dots descend into nested fields.
``template`` makes the prompt of a base model, ``message`` the user message of a chat model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TypedDict

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


@dataclass(frozen=True, slots=True, kw_only=True)
class SetFile:
    """One file or folder that may contain a set's records.

    Attributes:
        file: path relative to the data folder, with or without .gz; ends in "/" for a folder.
            ``{subset}`` is replaced by the subset.
    """

    file: str
    template: str
    message: str
    read: Reader = json_lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Hub:
    """A set's copy on the Hugging Face hub: arguments of ``datasets.load_dataset``, templates."""

    repo: str
    config: str | None = None
    split: str = "test"
    template: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    """A benchmark: where its records are, and its parts.

    Attributes:
        places: possible files in the data folder, in the order of preference.
        hub: copy on the hub that loads without remote code, if there is one.
        subsets: values of ``data.subset``; None without subsets, () where the files name them.
    """

    places: tuple[SetFile, ...]
    hub: Hub | None = None
    subsets: tuple[str, ...] | None = None

    @property
    def first_subset(self) -> str:
        """The default subset of a set with one file per subset; "" for other sets."""
        by_file = any("{subset}" in place.file for place in self.places)
        return self.subsets[0] if by_file and self.subsets else ""


class Texts(TypedDict):
    template: str
    message: str


def _places(
    *files: str, read: Reader = json_lines, template: str, message: str
) -> tuple[SetFile, ...]:
    return tuple(SetFile(file=f, template=template, message=message, read=read) for f in files)


def _texts(template: str, message: str) -> Callable[[str], Texts]:
    """Returns a function that replaces FIELD in two templates by the name of a field."""
    return lambda field: {
        "template": template.replace("FIELD", field),
        "message": message.replace("FIELD", field),
    }


# Open questions: unchanged for a chat model, in Vicuna's format for a base model.
_open_question = _texts("USER: {FIELD}\nASSISTANT:", "{FIELD}")
_question = _texts("Question: {FIELD}\nAnswer:", "{FIELD}")
_translation = _texts("German: {FIELD}\nEnglish:", "Translate German to English: {FIELD}")


def _code(field: str, language: str) -> Texts:
    message = f"Complete this {language} function. Answer with the code alone.\n\n{{FIELD}}"
    return _texts("{FIELD}", message)(field)


def _choices(a: str, b: str, c: str, d: str) -> Texts:
    text = f"{{question}}\nA. {{{a}}}\nB. {{{b}}}\nC. {{{c}}}\nD. {{{d}}}\nAnswer:"
    return {"template": text, "message": text}


def _reasoning(file: str) -> DataSet:
    files = f"deepspec_eval/{file}.jsonl", f"{file}.jsonl"
    return DataSet(places=_places(*files, **_open_question("turns.0")))


_XSUM = _texts(
    "Article: {FIELD}\n\nSummary of the article in one sentence:",
    "Summarize this article in one sentence.\n\n{FIELD}",
)("document")
_NEWS = _texts("USER: Summarize: {FIELD}\nASSISTANT:", "Summarize: {FIELD}")("article")
_DROP = "Passage: {passage}\nQuestion: {question}\nAnswer:"
_BOOK = (
    "{text}\n\nThe text above is {title}.\n1. Give a short synopsis of the whole text.\n2. Choose"
    " one character or one episode and look closely at how it is written and what it means.\n3. Say"
    " what the book has to tell readers of today.\n"
)

BOOKS = {
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
"""File and title of the ten books of SpecPipe (2504.04104 v2), appendix B, in its order."""

TASKS = {
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
"""Spec-Bench's six tasks and the categories in its file."""

STDLIB = DataSet(places=_places("", read=standard_library, **_code("text", "Python")))
"""Function heads to complete, from the standard library; needs no file."""

SETS = {
    # 164 Python functions to complete (Chen et al. 2021)
    "humaneval": DataSet(
        places=_places(
            *("humaneval/HumanEval.jsonl", "HumanEval.jsonl"), **_code("prompt", "Python")
        ),
        hub=Hub(repo="openai/openai_humaneval", **_code("prompt", "Python")),
    ),
    # 1,319 grade-school mathematics questions, test split (Cobbe et al. 2021)
    "gsm8k": DataSet(
        places=_places("gsm8k/test.jsonl", "gsm8k_test.jsonl", **_question("question")),
        hub=Hub(repo="openai/gsm8k", config="main", **_question("question")),
    ),
    # news articles to summarise, test split (Narayan et al. 2018)
    "xsum": DataSet(
        places=_places("xsum/test.jsonl", "xsum_test.jsonl", **_XSUM),
        hub=Hub(repo="EdinburghNLP/xsum", **_XSUM),
    ),
    # 80 open questions, first turn (Zheng et al. 2023)
    "mt_bench": DataSet(
        places=_places(
            *("mt_bench/question.jsonl", "eagle/mt_bench/question.jsonl", "mt_bench.jsonl"),
            **_open_question("turns.0"),
        ),
        hub=Hub(repo="HuggingFaceH4/mt_bench_prompts", split="train", **_open_question("prompt.0")),
    ),
    # 164 functions to complete in a language, data.subset (Zheng et al. 2023)
    "humaneval_x": DataSet(
        places=_places("humaneval_x/humaneval_{subset}.jsonl", **_code("prompt", "{subset}")),
        subsets=("python", "cpp", "java", "js", "go"),
    ),
    # instructions: EAGLE's 80, else Alpaca's own (Taori et al. 2023)
    "alpaca": DataSet(
        places=(
            SetFile(file="eagle/alpaca/question.jsonl", **_open_question("turns.0")),
            SetFile(file="alpaca/alpaca_data.json", read=instructions, **_open_question("text")),
        ),
        hub=Hub(repo="tatsu-lab/alpaca", split="train", **_open_question("instruction")),
    ),
    # news articles to summarise, CNN/DailyMail (Hermann et al. 2015)
    "cnn_dm": DataSet(
        places=_places(
            *("cnn_dailymail/CNNDM.jsonl", "eagle/sum/question.jsonl"),
            **_open_question("turns.0"),
        ),
        hub=Hub(repo="abisee/cnn_dailymail", config="3.0.0", **_NEWS),
    ),
    # 3,610 open questions without passages, NQ-open dev (Lee et al. 2019)
    "natural_questions": DataSet(
        places=(
            SetFile(file="natural_questions/NQ-open.dev.jsonl", **_question("question")),
            SetFile(file="eagle/qa/question.jsonl", **_question("turns.0")),
        ),
        hub=Hub(
            repo="google-research-datasets/nq_open", split="validation", **_question("question")
        ),
    ),
    # questions about a passage, dev split (Dua et al. 2019)
    "drop": DataSet(
        places=_places("drop/drop_v0_dev.jsonl", template="{context}", message="{context}"),
        hub=Hub(repo="ucinlp/drop", split="validation", template=_DROP, message=_DROP),
    ),
    # questions with four choices, 57 subjects, data.subset (Hendrycks et al. 2021)
    "mmlu": DataSet(
        places=_places("mmlu/test/", read=multiple_choice, **_choices("A", "B", "C", "D")),
        hub=Hub(
            repo="cais/mmlu",
            config="all",
            **_choices("choices.0", "choices.1", "choices.2", "choices.3"),
        ),
        subsets=(),
    ),
    # 3,003 sentences to translate from German, newstest2014 (Bojar et al. 2014)
    "wmt14": DataSet(
        places=_places("wmt14_deen/newstest2014.deu", read=text_lines, **_translation("text")),
        hub=Hub(repo="wmt/wmt14", config="de-en", **_translation("translation.de")),
    ),
    # TriviaQA-Wiki questions, without passages (Joshi et al. 2017)
    "triviaqa": DataSet(
        places=_places("triviaqa_wiki/triviaqa.json", read=json_array, **_question("question")),
        hub=Hub(
            repo="mandarjoshi/trivia_qa",
            config="rc.wikipedia.nocontext",
            split="validation",
            **_question("question"),
        ),
    ),
    # 480 prompts of six tasks, data.subset, first turn (Xia et al. 2024)
    "spec_bench": DataSet(
        places=_places(
            "spec_bench/question.jsonl", read=by_category(TASKS), **_open_question("turns.0")
        ),
        subsets=tuple(TASKS),
    ),
    # ten books with three tasks each, data.subset (SpecPipe, appendix B)
    "gutenberg": DataSet(
        places=_places("gutenberg/", read=books(BOOKS), template=_BOOK, message=_BOOK),
        subsets=tuple(BOOKS),
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

_ALONE = (
    *("spec_bench", "gutenberg", "math500", "aime25"),
    *("livecodebench", "swe_bench", "arena_hard"),
)
MIXED = tuple(name for name in SETS if name not in _ALONE)
"""Sets of ``data=mixed`` by default: short prompts of the papers, without overlap."""

DIALOGUES = ("mt_bench", "spec_bench", "jsonl")
"""Data sets with questions of several turns."""

OWN = ("jsonl", "text")
"""Data sets that read the user's file ``data.path``."""

DATASETS: tuple[str, ...] = ("stdlib", *SETS, "mixed", *OWN)
"""Values of ``data=``."""


def require_known(name: str) -> None:
    if name not in DATASETS:
        near = get_close_matches(name, DATASETS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UserError(f"data={name!r} is unknown: {hint}choose one of {', '.join(DATASETS)}")


def place_of(
    name: str, *, subset: str | None = None, data_dir: str | Path | None = None
) -> tuple[SetFile, Path]:
    """Finds the first existing file of a set; returns its description and its path.

    Without ``subset`` a set with one file per subset has its first one. The error for missing files
    names the possible ones.
    """
    entry = SETS[name]
    files = [p.file.replace("{subset}", subset or entry.first_subset) for p in entry.places]
    shown = " or ".join(file if file.endswith("/") else f"{file}[.gz]" for file in files)
    folder = data_folder(data_dir, name=name, places=shown)
    for place, file in zip(entry.places, files, strict=True):
        path = find_file(folder, file)
        if path is not None:
            return place, path
    hub = ", or fetch it with data.origin=hub" if entry.hub is not None else ""
    raise UserError(
        f"data={name}: {str(folder)!r} holds no {shown}; put the file there, or set"
        f" SPECDEC_DATA to the folder that has it{hub} (data=stdlib needs no files)"
    )


def holds(name: str, data_dir: str | Path | None) -> bool:
    try:
        place_of(name, data_dir=data_dir)
    except UserError:
        return False
    return True
