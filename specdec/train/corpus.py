"""Training text: which files are read, how they are cleaned, and what is held out.

Text comes from Python's standard library and from installed distributions whose own metadata
states a permissive licence, plus GSM8K's training questions where the data folder has them.
Nothing is read from the evaluation sets but the n-grams that keep them out.

Two documents are made of most files: the file itself ("file") and, where it holds documented
module-level functions, one of those functions alone with the imports they use ("functions").
"""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import sysconfig
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from specdec.data.files import find_file, read_records
from specdec.data.stdlib import imports_used
from specdec.errors import UserError

HELD_OUT_MODULUS = 20
"""One standard-library module in this many is held out."""

PERMISSIVE = re.compile(
    r"\b(MIT|BSD|Apache|PSF|ISC|Python Software Foundation|MIT-CMU|HPND|0BSD)\b", re.IGNORECASE
)
RESTRICTIVE = re.compile(r"\b(GPL|LGPL|AGPL|MPL|Mozilla|EPL|CC-BY-NC)", re.IGNORECASE)
SKIPPED_FOLDERS = frozenset(
    [
        "__pycache__",
        "_pyinstaller",
        "_vendor",
        "_vendored_packages",
        "benchmarks",
        "conftest",
        "encodings",
        "ensurepip",
        "extern",
        "idlelib",
        "lib-dynload",
        "lib2to3",
        "locale",
        "locales",
        "pydoc_data",
        "site-packages",
        "test",
        "testing",
        "tests",
        "turtledemo",
        "vendor",
        "vendored",
    ]
)
WORDS_PER_EVALUATION_GRAM = 13
EVALUATED = {
    "HumanEval": ("humaneval/HumanEval.jsonl", ("prompt", "canonical_solution"), ""),
    "GSM8K's test questions": ("gsm8k/test.jsonl", ("question", "answer"), " "),
}
"""Sets whose text is kept out: file, keys of a record, and what joins them."""
LINES_PER_SHINGLE = 3


@dataclass(frozen=True, slots=True)
class Document:
    """One training or held-out text.

    Attributes:
        source: distribution name, "stdlib" or "gsm8k".
        kind: "file", "functions" or "text".
        path: path relative to the source's root, POSIX form.
        text: the cleaned text.
    """

    source: str
    kind: str
    path: str
    text: str


@dataclass(slots=True)
class Corpus:
    """Training and held-out documents, and what was dropped and why.

    Attributes:
        train: documents that may be trained on.
        held_out: standard-library files that is_held_out names; never trained on.
        licences: licence statement of each source, as its metadata gives it.
        dropped: files dropped, by reason.
        kept_out: evaluation sets that were at hand, so that files quoting them were dropped.
    """

    train: list[Document] = field(default_factory=list)
    held_out: list[Document] = field(default_factory=list)
    licences: dict[str, str] = field(default_factory=dict)
    dropped: Counter[str] = field(default_factory=Counter)
    kept_out: list[str] = field(default_factory=list)


def is_held_out(relative_path: str) -> bool:
    """Says whether a standard-library file is kept for evaluation.

    The rule: CRC-32 of the path, relative to the standard library's folder and with forward
    slashes, is a multiple of HELD_OUT_MODULUS. It depends on nothing else.

    Args:
        relative_path: for example "json/decoder.py"; backslashes are taken as slashes.
    """
    name = relative_path.replace("\\", "/").lstrip("/")
    return zlib.crc32(name.encode("utf-8")) % HELD_OUT_MODULUS == 0


def stdlib_root() -> Path:
    """Folder of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def data_root() -> Path | None:
    """Folder of evaluation and training sets: SPECDEC_DATA, or None where unset or absent."""
    value = os.environ.get("SPECDEC_DATA", "")
    return Path(value) if value and Path(value).is_dir() else None


def python_files(root: Path) -> Iterator[tuple[str, Path]]:
    """Yields (relative POSIX path, path) of a folder's Python files, sorted, tests left out."""
    paths = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name.lower() not in SKIPPED_FOLDERS]
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    for path in sorted(paths):
        if not path.name.startswith("test_") and not path.name.endswith("_test.py"):
            yield path.relative_to(root).as_posix(), path


def read_source(path: Path) -> str | None:
    """Text of a Python file, newlines normalised; None where it is not UTF-8."""
    try:
        text = path.read_bytes().decode("utf-8")
    except (UnicodeDecodeError, OSError):
        return None
    return text.replace("\r\n", "\n").replace("\r", "\n").expandtabs(8)


def why_junk(text: str) -> str | None:
    """Reason a file is not worth training on, or None.

    Tiny files, files with very long lines (minified or generated), files that announce
    themselves as generated, and files that are mostly digits, punctuation or non-ASCII (tables).
    """
    if len(text) < 400:
        return "short"
    if len(text) > 400_000:
        return "huge"
    lines = text.split("\n")
    if max(map(len, lines)) > 400 or len(text) / len(lines) > 70:
        return "long lines"
    if re.search("generated by|auto-?generated", text[:2000].lower()):
        return "generated"
    letters = sum(1 for c in text if c.isascii() and (c.isalpha() or c.isspace() or c == "_"))
    return "table" if letters / len(text) < 0.72 else None


def held_out_files() -> Iterator[tuple[str, str]]:
    """Yields (relative path, text) of the standard library's held-out files that are no junk."""
    for relative, path in python_files(stdlib_root()):
        text = read_source(path) if is_held_out(relative) else None
        if text is not None and why_junk(text) is None:
            yield relative, text


def clean_source(text: str) -> str:
    """Drops a leading comment block that states a copyright, and trailing spaces."""
    lines = [line.rstrip() for line in text.split("\n")]
    end = 0
    while end < len(lines) and (lines[end].startswith("#") or not lines[end]):
        end += 1
    block = "\n".join(lines[:end]).lower()
    if "copyright" in block or "licen" in block or "coding:" in block:
        lines = lines[end:]
    return "\n".join(lines).strip("\n") + "\n"


def line_shingles(text: str) -> set[int]:
    """Hashes of every LINES_PER_SHINGLE consecutive lines of substance (12 characters or more)."""
    lines = [s for s in (line.strip() for line in text.split("\n")) if len(s) >= 12]
    width = LINES_PER_SHINGLE
    return {hash(tuple(lines[i : i + width])) for i in range(max(1, len(lines) - width + 1))}


class NearDuplicates:
    """Remembers line shingles; a document mostly made of remembered ones is a near copy."""

    def __init__(self, threshold: float = 0.5) -> None:
        """Takes the share of shingles, in (0, 1], from which a document counts as a copy."""
        if not 0.0 < threshold <= 1.0:
            raise UserError(f"threshold must be in (0, 1], got {threshold}")
        self.threshold, self.seen = threshold, set[int]()

    def is_copy(self, text: str) -> bool:
        """True for a near copy; any other text is remembered."""
        shingles = line_shingles(text)
        if len(shingles & self.seen) >= self.threshold * len(shingles):
            return True
        self.seen |= shingles
        return False


def word_grams(text: str, width: int = WORDS_PER_EVALUATION_GRAM) -> set[int]:
    """Hashes of every `width` consecutive words (letters, digits, underscore) of a text."""
    words = re.findall(r"\w+", text.lower())
    return {hash(tuple(words[i : i + width])) for i in range(len(words) - width + 1)}


def evaluation_grams(data: Path | None) -> dict[str, set[int]]:
    """Word n-grams of each set of EVALUATED whose file a data folder holds, gzipped or plain."""
    grams = {}
    for name, (file, keys, joint) in EVALUATED.items():
        path = None if data is None else find_file(data, (file,))
        if path is not None:
            texts = (joint.join(str(row[key]) for key in keys) for _, row in read_records(path))
            grams[name] = set[int]().union(*map(word_grams, texts))
    return grams


def function_documents(text: str, max_lines: int = 70, per_document: int = 1) -> list[str]:
    """Module-level documented functions of a file, under the imports they use.

    One per text by default: the end token after it teaches the model where a body ends, as a
    prompt that is a function's head expects.

    Args:
        text: a Python module's source; one that does not parse gives no functions.
        max_lines: longest function taken, and shortest is 4.
        per_document: functions per returned text.
    """
    try:
        module = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    lines = text.split("\n")
    pieces: list[tuple[list[str], str]] = []
    for node in module.body:
        if not isinstance(node, ast.FunctionDef) or not ast.get_docstring(node):
            continue
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        doc_end = node.body[0].end_lineno or 0
        if 4 <= length <= max_lines and doc_end - node.lineno <= 40 and len(node.body) > 1:
            body = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            pieces.append((imports_used(module, node), body))
    texts = []
    for start in range(0, len(pieces), per_document):
        chosen = pieces[start : start + per_document]
        imports = list(dict.fromkeys(line for used, _ in chosen for line in used))
        head = "\n".join(imports) + "\n\n\n" if imports else ""
        texts.append(head + "\n\n\n".join(body for _, body in chosen) + "\n")
    return texts


def licence_of(distribution: str) -> str:
    """Licence statement of an installed distribution, one line, from its metadata.

    Raises:
        importlib.metadata.PackageNotFoundError: it is not installed.
    """
    meta = importlib.metadata.metadata(distribution)
    classifiers = [
        value.split("::")[-1].strip()
        for value in (meta.get_all("Classifier") or [])
        if value.startswith("License")
    ]
    stated = [*(meta.get_all("License-Expression") or []), *classifiers]
    if not any(stated):
        free_text = (meta.get_all("License") or [""])[0]
        stated = [free_text.strip().split("\n")[0][:60]]
    return "; ".join(dict.fromkeys(part for part in stated if part)) or "none stated"


def is_permissive(licence: str) -> bool:
    """True for MIT, BSD, Apache, PSF or ISC statements with no copyleft term beside them."""
    return bool(PERMISSIVE.search(licence)) and not RESTRICTIVE.search(licence)


def _roots_of(distribution: str) -> list[Path]:
    files = importlib.metadata.files(distribution) or []
    tops = {f.parts[0] for f in files if len(f.parts) > 1 and f.suffix == ".py"}
    tops = {top for top in tops if not top.startswith(".") and not top.endswith("-info")}
    base = importlib.metadata.distribution(distribution).locate_file("")
    return [Path(str(base)) / top for top in sorted(tops)]


def _take(
    corpus: Corpus,
    source: str,
    files: Iterable[tuple[str, Path]],
    max_bytes: int,
    grams: set[int],
    copies: NearDuplicates,
) -> None:
    taken = 0
    for relative, path in files:
        text = read_source(path)
        reason = "unreadable" if text is None else why_junk(text)
        if text is None or reason:
            corpus.dropped[reason or "unreadable"] += 1
            continue
        text = clean_source(text)
        if grams and not grams.isdisjoint(word_grams(text)):
            corpus.dropped["evaluation n-gram"] += 1
            continue
        if copies.is_copy(text):
            corpus.dropped["near copy"] += 1
            continue
        corpus.train.append(Document(source, "file", relative, text))
        for piece in function_documents(text):
            corpus.train.append(Document(source, "functions", relative, piece))
        taken += len(text)
        if taken >= max_bytes:
            break


def _take_gsm8k(corpus: Corpus, data: Path | None, grams: set[int], max_bytes: int) -> None:
    path = find_file(data, ("gsm8k/train.jsonl",)) if data else None
    if path is None:
        return
    corpus.licences["gsm8k"] = "MIT"
    taken = 0
    for index, (_, row) in enumerate(read_records(path)):
        answer = re.sub(r"<<[^>]*>>", "", row["answer"])
        text = f"Question: {row['question'].strip()}\nAnswer: {answer.strip()}\n"
        if not grams.isdisjoint(word_grams(text)):
            corpus.dropped["evaluation n-gram"] += 1
            continue
        corpus.train.append(Document("gsm8k", "text", f"train/{index}", text))
        taken += len(text)
        if taken >= max_bytes:
            break


def build_corpus(
    *, packages: dict[str, float], gsm8k_mb: float = 0.0, copy_threshold: float = 0.5
) -> Corpus:
    """Reads, cleans and de-duplicates all text; deterministic for one installation.

    Held-out files are remembered first, so that a near copy of one elsewhere is dropped.

    Args:
        packages: distribution name to the most megabytes (10**6 bytes) of files taken from it,
            in order of each path's CRC-32; a name that is not installed is skipped and counted.
        gsm8k_mb: megabytes of GSM8K training text; needs the SPECDEC_DATA folder.
        copy_threshold: see NearDuplicates.

    Raises:
        UserError: a package's metadata states no permissive licence.
    """
    data = data_root()
    by_set = evaluation_grams(data)
    grams = set[int]().union(*by_set.values())
    copies, corpus = NearDuplicates(copy_threshold), Corpus(kept_out=list(by_set))
    for relative, text in held_out_files():
        copies.is_copy(text)
        corpus.held_out.append(Document("stdlib", "file", relative, text))
    corpus.licences["stdlib"] = "PSF-2.0"
    training = [(r, p) for r, p in python_files(stdlib_root()) if not is_held_out(r)]
    _take(corpus, "stdlib", training, 10**9, grams, copies)
    for name, megabytes in packages.items():
        try:
            licence = licence_of(name)
        except importlib.metadata.PackageNotFoundError:
            corpus.dropped["package not installed"] += 1
            continue
        if not is_permissive(licence):
            raise UserError(f"{name}: licence {licence!r} is not one of the permissive ones")
        corpus.licences[name] = licence
        files = [pair for root in _roots_of(name) for pair in python_files(root)]
        files.sort(key=lambda pair: zlib.crc32(pair[0].encode("utf-8")))
        _take(corpus, name, files, int(megabytes * 1e6), grams, copies)
    _take_gsm8k(corpus, data, grams, int(gsm8k_mb * 1e6))
    return corpus
