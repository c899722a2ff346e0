"""The benchmarks of the papers: where their files lie and the fixed words around each text.

A template's ``{field}`` is replaced by the record's field, dots going deeper. ``template`` is what
a base model is given to continue; ``message`` is what a model with a chat template is asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from specdec.data.readers import (
    Reader,
    books,
    by_category,
    instructions,
    json_array,
    json_lines,
    multiple_choice,
    text_lines,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One place where a set's records may be found.

    Attributes:
        file: relative to the data folder, with or without .gz; a folder where it ends in "/".
            ``{subset}`` stands for the subset.
        template: the base model's prompt.
        message: the chat model's user message.
        read: how the records lie there.
    """

    file: str
    template: str
    message: str
    read: Reader = json_lines

    @property
    def shown(self) -> str:
        """The place, as an error message names it."""
        return self.file if self.file.endswith("/") else f"{self.file}[.gz]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hub:
    """A set's copy on the Hugging Face hub.

    Attributes:
        repo, config, split: as ``datasets.load_dataset`` takes them.
        template, message: as in ``Place``, with the hub's field names.
    """

    repo: str
    config: str | None = None
    split: str = "test"
    template: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    """A data set.

    Attributes:
        about: one line.
        places: first found first taken.
        hub: its copy on the hub; None where there is none that needs no code of its own.
        subsets: values of ``data.subset``; None where there is none, () where the files say.
    """

    about: str
    places: tuple[Place, ...]
    hub: Hub | None = None
    subsets: tuple[str, ...] | None = None

    @property
    def shown(self) -> str:
        """The places, as an error message names them."""
        return " or ".join(place.shown for place in self.places)


class Words(TypedDict):
    """What stands around a record's text."""

    template: str
    message: str


def _asked(field: str) -> Words:
    """An open question: as it is to a chat model, in Vicuna's words to a base model."""
    return {"template": f"USER: {{{field}}}\nASSISTANT:", "message": f"{{{field}}}"}


def _question(field: str) -> Words:
    return {"template": f"Question: {{{field}}}\nAnswer:", "message": f"{{{field}}}"}


def _code(field: str, language: str) -> Words:
    return {
        "template": f"{{{field}}}",
        "message": f"Complete this {language} function. Answer with the code alone.\n\n{{{field}}}",
    }


def _translation(field: str) -> Words:
    return {
        "template": f"German: {{{field}}}\nEnglish:",
        "message": f"Translate German to English: {{{field}}}",
    }


def _choices(a: str, b: str, c: str, d: str) -> Words:
    text = f"{{question}}\nA. {{{a}}}\nB. {{{b}}}\nC. {{{c}}}\nD. {{{d}}}\nAnswer:"
    return {"template": text, "message": text}


_SUMMARY = "Article: {%s}\n\nSummary of the article in one sentence:"
_XSUM: Words = {
    "template": _SUMMARY % "document",
    "message": "Summarize this article in one sentence.\n\n{document}",
}
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

SETS = {
    "humaneval": DataSet(
        about="164 Python functions to complete (Chen et al. 2021)",
        places=(
            Place(file="humaneval/HumanEval.jsonl", **_code("prompt", "Python")),
            Place(file="HumanEval.jsonl", **_code("prompt", "Python")),
        ),
        hub=Hub(repo="openai/openai_humaneval", **_code("prompt", "Python")),
    ),
    "gsm8k": DataSet(
        about="1,319 grade-school mathematics questions, test split (Cobbe et al. 2021)",
        places=(
            Place(file="gsm8k/test.jsonl", **_question("question")),
            Place(file="gsm8k_test.jsonl", **_question("question")),
        ),
        hub=Hub(repo="openai/gsm8k", config="main", **_question("question")),
    ),
    "xsum": DataSet(
        about="news articles to summarise, test split (Narayan et al. 2018)",
        places=(
            Place(file="xsum/test.jsonl", **_XSUM),
            Place(file="xsum_test.jsonl", **_XSUM),
        ),
        hub=Hub(repo="EdinburghNLP/xsum", **_XSUM),
    ),
    "mt_bench": DataSet(
        about="80 open questions, first turn (Zheng et al. 2023)",
        places=(
            Place(file="mt_bench/question.jsonl", **_asked("turns.0")),
            Place(file="eagle/mt_bench/question.jsonl", **_asked("turns.0")),
            Place(file="mt_bench.jsonl", **_asked("turns.0")),
        ),
        hub=Hub(repo="HuggingFaceH4/mt_bench_prompts", split="train", **_asked("prompt.0")),
    ),
    "humaneval_x": DataSet(
        about="164 functions to complete in a language, data.subset (Zheng et al. 2023)",
        places=(Place(file="humaneval_x/humaneval_{subset}.jsonl", **_code("prompt", "{subset}")),),
        subsets=("python", "cpp", "java", "js", "go"),
    ),
    "alpaca": DataSet(
        about="instructions: EAGLE's 80, else Alpaca's own (Taori et al. 2023)",
        places=(
            Place(file="eagle/alpaca/question.jsonl", **_asked("turns.0")),
            Place(file="alpaca/alpaca_data.json", read=instructions, **_asked("text")),
        ),
        hub=Hub(repo="tatsu-lab/alpaca", split="train", **_asked("instruction")),
    ),
    "cnn_dm": DataSet(
        about="news articles to summarise, CNN/DailyMail (Hermann et al. 2015)",
        places=(
            Place(file="cnn_dailymail/CNNDM.jsonl", **_asked("turns.0")),
            Place(file="eagle/sum/question.jsonl", **_asked("turns.0")),
        ),
        hub=Hub(
            repo="abisee/cnn_dailymail",
            config="3.0.0",
            template="USER: Summarize: {article}\nASSISTANT:",
            message="Summarize: {article}",
        ),
    ),
    "natural_questions": DataSet(
        about="3,610 open questions without passages, NQ-open dev (Lee et al. 2019)",
        places=(
            Place(file="natural_questions/NQ-open.dev.jsonl", **_question("question")),
            Place(file="eagle/qa/question.jsonl", **_question("turns.0")),
        ),
        hub=Hub(
            repo="google-research-datasets/nq_open", split="validation", **_question("question")
        ),
    ),
    "drop": DataSet(
        about="questions about a passage, dev split (Dua et al. 2019)",
        places=(Place(file="drop/drop_v0_dev.jsonl", template="{context}", message="{context}"),),
        hub=Hub(repo="ucinlp/drop", split="validation", template=_DROP, message=_DROP),
    ),
    "mmlu": DataSet(
        about="questions with four choices, 57 subjects, data.subset (Hendrycks et al. 2021)",
        places=(Place(file="mmlu/test/", read=multiple_choice, **_choices("A", "B", "C", "D")),),
        hub=Hub(
            repo="cais/mmlu",
            config="all",
            **_choices("choices.0", "choices.1", "choices.2", "choices.3"),
        ),
        subsets=(),
    ),
    "wmt14": DataSet(
        about="3,003 sentences to translate from German, newstest2014 (Bojar et al. 2014)",
        places=(
            Place(file="wmt14_deen/newstest2014.deu", read=text_lines, **_translation("text")),
        ),
        hub=Hub(repo="wmt/wmt14", config="de-en", **_translation("translation.de")),
    ),
    "triviaqa": DataSet(
        about="TriviaQA-Wiki questions, without passages (Joshi et al. 2017)",
        places=(
            Place(file="triviaqa_wiki/triviaqa.json", read=json_array, **_question("question")),
        ),
        hub=Hub(
            repo="mandarjoshi/trivia_qa",
            config="rc.wikipedia.nocontext",
            split="validation",
            **_question("question"),
        ),
    ),
    "spec_bench": DataSet(
        about="480 prompts of six tasks, data.subset, first turn (Xia et al. 2024)",
        places=(
            Place(file="spec_bench/question.jsonl", read=by_category(TASKS), **_asked("turns.0")),
        ),
        subsets=tuple(TASKS),
    ),
    "gutenberg": DataSet(
        about="ten books with three tasks each, data.subset (SpecPipe, appendix B)",
        places=(Place(file="gutenberg/", read=books(BOOKS), template=_BOOK, message=_BOOK),),
        subsets=tuple(BOOKS),
    ),
}
"""Sets whose records come from the data folder or the hub.

The order is kept: ids in ``data=mixed`` follow from it. New sets are added at the end.
"""

MIXED = tuple(name for name in SETS if name not in ("spec_bench", "gutenberg"))
"""Sets in ``data=mixed`` where ``data.sets`` names none: no overlap, no book-length prompts."""
