"""Changes code of the core at random places and counts which changes the fast tests notice.

    python -m tests.planted.generated --root CHECKOUT --work FOLDER [--number 120] [--seed 0]

CHECKOUT is copied to FOLDER/code; it stays as it is. The fast tests run once with coverage, one
context per test. Then each mutant runs with tests that execute its lines, the most special ones
first, until one fails. FOLDER/results.json has every mutant with its outcome: "killed", "timeout"
(counts as killed), "survived", or "not run" (no test executes the line). It and the coverage are
continued by a second call. Needs the package ``coverage``.

Libraries, code and tests are imported once; a mutant is a forked process in which the code of the
changed function is exchanged.
"""

import argparse
import ast
import copy
import gc
import json
import os
import random
import resource
import shutil
import sys
import tempfile
import time
import types
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

CORE = ("tree*", "sampling*", "verifiers*", "executors*", "state*", "attention/[kt]*")
# Tests with other subjects, and those that start processes.
IGNORED = ["config", "distributed", "docs", "parity", "planted"]
IGNORED += ["unit/test_" + name for name in ("cli*", "data*", "doctor*", "endpoint*", "fit*")]
IGNORED += ["unit/test_" + name for name in ("plan*", "profile*", "report*", "rivals*", "train*")]
IGNORED += ["unit/test_" + name for name in ("reproduce*", "hostile*", "repo_rules*", "gpu_exp*")]
FAST = ["-m", "fast", "-q", "-p", "no:cacheprovider", "--no-header"]
CPU_S, WALL_S = 60, 300  # per run of tests; the last for those that wait for ever
FIRST_TESTS, MOST_TESTS = 16, 300  # the others run where the first ones find nothing
COMPARED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
Mutation = tuple[str, ast.stmt, Callable[[], None]]
"""The kind, the statement, and a function that changes the syntax tree in place."""


class Contexts:
    """A plugin of pytest: one coverage context per test, and CPU seconds of each that passes."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds = seconds
        self._failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self._failed.add(report.nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        import coverage

        running = coverage.Coverage.current()
        assert running is not None, "started by coverage"
        running.switch_context(item.nodeid)
        begin = time.process_time()
        try:
            return (yield)
        finally:
            if item.nodeid not in self._failed:
                self._seconds[item.nodeid] = time.process_time() - begin
            running.switch_context("")


def collect(code: Path, work: Path, words: Sequence[str]) -> None:
    """Writes the coverage of the tests and their seconds to ``work``."""
    import coverage

    ends = ("", ".py", "/*")
    measured = coverage.Coverage(
        data_file=str(work / "coverage"),
        config_file=False,
        include=[f"{code}/specdec/{name}{end}" for name in CORE for end in ends],
    )
    seconds: dict[str, float] = {}
    with measured.collect():
        pytest.main([*FAST, *words], plugins=[Contexts(seconds)])
    measured.save()
    (work / "seconds.json").write_text(json.dumps(seconds), encoding="utf-8")


def mutations(tree: ast.Module) -> Iterator[Mutation]:
    """All mutations of a module: changes inside functions."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            yield from _of_body(function.body)


def _of_body(body: list[ast.stmt]) -> Iterator[Mutation]:
    for i, statement in enumerate(body):
        if isinstance(statement, (ast.Raise, ast.Assert, ast.FunctionDef, ast.ClassDef)):
            continue  # refusals have tests of their own; inner functions come by themselves
        is_call = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
        is_stored = isinstance(statement, ast.Assign) and isinstance(
            statement.targets[0], (ast.Attribute, ast.Subscript)
        )
        if is_call or is_stored or isinstance(statement, ast.AugAssign):

            def drop(body: list[ast.stmt] = body, i: int = i) -> None:
                body[i] = ast.copy_location(ast.Pass(), body[i])

            yield "drop", statement, drop
        for field, value in ast.iter_fields(statement):
            if field in ("annotation", "handlers", "type_comment"):
                continue
            values = value if isinstance(value, list) else [value]
            if values and isinstance(values[0], ast.stmt):
                yield from _of_body(values)
                continue
            for node in (n for v in values if isinstance(v, ast.AST) for n in ast.walk(v)):
                change = _of_expression(node)
                if change is not None:
                    yield change[0], statement, change[1]


def _of_expression(node: ast.AST) -> tuple[str, Callable[[], None]] | None:
    if isinstance(node, ast.Compare):
        new = COMPARED[type(node.ops[0])]
        return "compare", lambda: node.ops.__setitem__(0, new())
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return "number", lambda: setattr(node, "value", node.value + 1)
    if isinstance(node, ast.BoolOp):
        other = ast.Or if isinstance(node.op, ast.And) else ast.And
        return "boolean", lambda: setattr(node, "op", other())
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return "boolean", lambda: setattr(node, "operand", copy.deepcopy(node))
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
        sign = ast.Sub if isinstance(node.op, ast.Add) else ast.Add
        return "number", lambda: setattr(node, "op", sign())
    if isinstance(node, ast.Call) and len(node.args) > 1:
        first, second = node.args[:2]
        if not isinstance(first, ast.Starred) and not isinstance(second, ast.Starred):
            return "swap", lambda: node.args.__setitem__(slice(2), [second, first])
    return None


def choose(code: Path, number: int, seed: int) -> list[dict[str, Any]]:
    """A random choice of mutants, as many of each kind as there are."""
    found = [path for name in CORE for path in (code / "specdec").glob(name)]
    found += [path for folder in found if folder.is_dir() for path in folder.rglob("*")]
    by_kind: defaultdict[str, list[tuple[Path, int]]] = defaultdict(list)
    for path in sorted({path for path in found if path.suffix == ".py"}):
        for k, (kind, _, _) in enumerate(mutations(ast.parse(path.read_text("utf-8")))):
            by_kind[kind].append((path, k))
    rng = random.Random(seed)
    for kind in sorted(by_kind):
        rng.shuffle(by_kind[kind])
    chosen = []
    while len(chosen) < number and any(by_kind.values()):
        for kind in sorted(by_kind):
            if by_kind[kind] and len(chosen) < number:
                chosen.append(_described(code, *by_kind[kind].pop()))
    return chosen


def _described(code: Path, path: Path, k: int) -> dict[str, Any]:
    tree = ast.parse(path.read_text("utf-8"))
    kind, statement, change = list(mutations(tree))[k]
    body = getattr(statement, "body", None)
    last = body[0].lineno - 1 if isinstance(body, list) else statement.end_lineno
    old = ast.unparse(statement).splitlines()[0]
    before = ast.unparse(tree).splitlines()
    change()
    after = ast.unparse(tree).splitlines()
    new = next((b for a, b in zip(before, after, strict=False) if a != b), "").strip()
    lines = [statement.lineno, max(statement.lineno, last or 0)]
    name = str(path.relative_to(code))
    return {"file": name, "index": k, "kind": kind, "lines": lines, "old": old, "new": new}


def sizes_of(data: Any) -> Counter[str]:
    """Lines of the core that each test executes: few mean that it is a test of just these."""
    sizes: Counter[str] = Counter()
    for file in data.measured_files():
        for names in data.contexts_by_lineno(file).values():
            sizes.update(names)
    return sizes


def tests_of(
    mutant: dict[str, Any], code: Path, data: Any, sizes: Counter[str], seconds: dict[str, float]
) -> list[str]:
    """Tests that execute a mutant's lines, the special ones first, in turn one from each file."""
    by_line = data.contexts_by_lineno(str(code / mutant["file"]))
    first, last = mutant["lines"]
    names = {n for line in range(first, last + 1) for n in by_line.get(line, ())} & seconds.keys()
    files: defaultdict[str, list[str]] = defaultdict(list)
    for name in sorted(names, key=lambda n: (sizes[n], n)):
        files[name.partition("::")[0]].append(name)
    mutant["covering"] = len(names)
    chosen, total = [], 0.0
    for rank in range(max(map(len, files.values()), default=0)):
        for name in (of_file[rank] for of_file in files.values() if len(of_file) > rank):
            if total + seconds[name] < CPU_S / 2:
                chosen.append(name)
                total += seconds[name]
    return chosen[:MOST_TESTS]


def functions_of(module: types.CodeType) -> Iterator[types.CodeType]:
    """Code of functions and methods, without that of functions inside them."""
    for code in module.co_consts:
        if isinstance(code, types.CodeType):
            if code.co_flags & 0x1:  # CO_OPTIMIZED: a function, no class body
                yield code
            else:
                yield from functions_of(code)


def exchange(path: Path, index: int) -> None:
    """Gives the functions of an imported file the code of a mutant."""
    text = path.read_text("utf-8")
    tree = ast.parse(text)
    list(mutations(tree))[index][2]()
    changed = functions_of(compile(ast.fix_missing_locations(tree), str(path), "exec"))
    key = lambda code: (code.co_qualname, code.co_firstlineno)  # noqa: E731
    new = {key(code): code for code in changed}
    for function in gc.get_objects():
        if type(function) is types.FunctionType:
            code = function.__code__
            if code.co_filename == str(path) and key(code) in new:
                changed_code = new[key(code)]
                if not changed_code.co_freevars:  # the mutant may have dropped its ``super()``
                    changed_code = changed_code.replace(co_freevars=code.co_freevars)
                function.__code__ = changed_code


def run(mutant: dict[str, Any], code: Path, tests: Sequence[str]) -> str:
    """Runs tests on the changed code in a child process; returns the outcome."""
    with tempfile.TemporaryDirectory() as cache:
        child = os.fork()
        if child == 0:
            resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 1))
            os.environ["SPECDEC_CACHE"] = cache
            gc.unfreeze()  # so that all functions are listed
            exchange(code / mutant["file"], mutant["index"])
            status = pytest.main(["-x", *FAST, *tests])
            Path(cache, "status").write_text(str(int(status)), encoding="utf-8")
            os._exit(0)
        begin = time.monotonic()
        while os.waitpid(child, os.WNOHANG)[0] == 0:
            time.sleep(0.1)
            if time.monotonic() - begin > WALL_S:
                os.kill(child, 9)
                os.waitpid(child, 0)
                return "timeout"
        ended = Path(cache, "status")
        status = int(ended.read_text("utf-8")) if ended.is_file() else -1
    return {0: "survived", -1: "timeout"}.get(status, "killed")


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.planted.generated")
    parser.add_argument("--root", type=Path, required=True, help="folder of the code")
    parser.add_argument("--work", type=Path, required=True, help="for the copy and the results")
    parser.add_argument("--number", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(words)
    work = given.work.resolve()
    code, output = work / "code", work / "results.json"
    if not code.exists():
        ignored = shutil.ignore_patterns(".git", "__pycache__", ".venv", "outputs")
        shutil.copytree(given.root, code, symlinks=True, ignore=ignored)
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]  # this file's own package; the copy has another
    os.chdir(code)
    sys.path.insert(0, str(code))
    skipped = [f"--ignore-glob=tests/{name}" for name in IGNORED]
    if not (work / "seconds.json").exists():
        child = os.fork()
        if child == 0:
            collect(code, work, [*skipped, "tests"])
            os._exit(0)
        os.waitpid(child, 0)
    with open(work / "log", "w", encoding="utf-8") as log:
        said = os.dup(1)
        os.dup2(log.fileno(), 1)
        pytest.main([*FAST, "--collect-only", *skipped, "tests"])  # imports all that mutants need
    import coverage

    data = coverage.CoverageData(str(work / "coverage"))
    data.read()
    seconds = json.loads((work / "seconds.json").read_text("utf-8"))
    sizes = sizes_of(data)
    results = json.loads(output.read_text("utf-8")) if output.exists() else []
    for mutant in choose(code, given.number, given.seed)[len(results) :]:
        tests = tests_of(mutant, code, data, sizes, seconds)
        mutant["outcome"], mutant["tests"] = "not run", len(tests)
        for part in (tests[:FIRST_TESTS], tests[FIRST_TESTS:]):
            if part and mutant["outcome"] in ("not run", "survived"):
                mutant["outcome"] = run(mutant, code, part)
        results.append(mutant)
        output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        print(mutant["outcome"], mutant["file"], mutant["lines"], mutant["new"], file=sys.stderr)
    counts = Counter(result["outcome"] for result in results)
    killed = counts["killed"] + counts["timeout"]
    os.dup2(said, 1)
    print(f"{killed} of {len(results)} killed: {dict(counts)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
