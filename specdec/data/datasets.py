"""The data sets: where each one's file lies, which field is the text, and its fixed template."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass
from difflib import get_close_matches

from specdec.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSet:
    """A data set in one JSON-lines file of the data folder.

    Attributes:
        files: places it may lie, each with or without .gz, first found first taken.
        field: the record's text, dots going deeper.
        template: the prompt; ``{text}`` stands for the text.
        about: one line.
    """

    files: tuple[str, ...]
    field: str
    template: str
    about: str

    @property
    def places(self) -> str:
        """The files, as an error message names them."""
        return " or ".join(f"{name}[.gz]" for name in self.files)


FILE_SETS = {
    "humaneval": FileSet(
        files=("humaneval/HumanEval.jsonl", "HumanEval.jsonl"),
        field="prompt",
        template="{text}",
        about="164 Python functions to complete, prompt field (Chen et al. 2021)",
    ),
    "gsm8k": FileSet(
        files=("gsm8k/test.jsonl", "gsm8k_test.jsonl"),
        field="question",
        template="Question: {text}\nAnswer:",
        about="1,319 grade-school mathematics questions, test split (Cobbe et al. 2021)",
    ),
    "xsum": FileSet(
        files=("xsum/test.jsonl", "xsum_test.jsonl"),
        field="document",
        template="Article: {text}\n\nSummary of the article in one sentence:",
        about="1,000 news articles to summarise (Narayan et al. 2018)",
    ),
    "mt_bench": FileSet(
        files=("mt_bench/question.jsonl", "eagle/mt_bench/question.jsonl", "mt_bench.jsonl"),
        field="turns.0",
        template="USER: {text}\nASSISTANT:",
        about="80 open questions, first turn (Zheng et al. 2023)",
    ),
}
"""Sets whose files come from the data folder."""

ABOUT = {
    "stdlib": "function heads from held-out modules of the running Python's standard library",
    **{name: entry.about for name, entry in FILE_SETS.items()},
    "mixed": "round robin over stdlib and the sets above that the data folder holds",
    "jsonl": "data.path=FILE (JSON lines, gzip or not), data.field=NAME of the prompt's text",
    "text": "data.path=FILE split at blank lines, each paragraph a prompt",
}

DATASETS: tuple[str, ...] = tuple(ABOUT)
"""Every value of ``data=``."""

DEFAULT_FIELD = "prompt"
"""``data.field`` of ``data=jsonl`` where none is given."""


def describe(name: str) -> str:
    """One line about a data set.

    Raises:
        UserError: there is none of that name.
    """
    require_known(name)
    return ABOUT[name]


def require_known(name: str) -> None:
    """Checks a data set's name.

    Raises:
        UserError: there is none of that name; the nearest is suggested.
    """
    if name not in ABOUT:
        near = get_close_matches(name, DATASETS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UserError(f"data={name!r} is unknown: {hint}choose one of {', '.join(DATASETS)}")


def template_of(name: str) -> str:
    """The fixed template of a data set; ``{text}`` alone where the text is used as it is."""
    require_known(name)
    return FILE_SETS[name].template if name in FILE_SETS else "{text}"


def data_provenance(name: str) -> dict[str, object]:
    """What must be known to build the same prompts again: templates, their hash, Python's version.

    Returns:
        ``data``, ``templates`` (name -> text), ``templates_sha256``, and for sets with standard
        library prompts ``python`` (another version has other prompts).
    """
    require_known(name)
    names = ["stdlib", *FILE_SETS] if name == "mixed" else [name]
    templates = {each: template_of(each) for each in names}
    digest = hashlib.sha256(repr(sorted(templates.items())).encode()).hexdigest()
    found: dict[str, object] = {"data": name, "templates": templates, "templates_sha256": digest}
    if "stdlib" in names:
        found["python"] = ".".join(map(str, sys.version_info[:3]))
    return found
