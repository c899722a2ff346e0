"""Records what result files contain, the counts of ``make demo``, and a reproduction per paper.

    python -m tests.matrix.record_results                  (everything)
    python -m tests.matrix.record_results files demo       (these parts; the others stay)

writes ``recorded_results.json``, which ``test_recorded_results.py`` compares with the present code.

- ``files``, ``files_slow``: command -> file -> key -> type of its values, with the keys of nested
  objects joined by dots. Keys that are data (ids, ranks) are written "*", members of lists "[]".
- ``demo`` and ``demo_full``: the strategies of ``make demo`` on one prompt and on all of them; the
  counts of each row, no times.
- ``figures``: of an item of ``specdec reproduce`` per paper, at its quick size, every figure that
  is computed, simulated or counted; measured ones depend on the machine.
"""

import io
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from specdec.cli.main import main as specdec
from tests.docs.blocks import ROOT

FILE = Path(__file__).with_name("recorded_results.json")
COMMAND = "python -m tests.matrix.record_results"
SMALL = "model=random data.limit=2 max_new_tokens=8 seed=3 threads=1"
CLOCK = "clock=simulated clock.profile=uniform_30ms"
COMMANDS = {
    "run": f"run strategy=best_first {SMALL} {CLOCK} trace=true record=true output_dir=run",
    "pipeline": f"run strategy=specpipe executor.stages=4 {SMALL} {CLOCK} trace=true"
    " output_dir=pipeline",
    "serving": f"run strategy=specpipe_db executor.stages=4 {SMALL} {CLOCK} batch_size=2"
    " serving.arrivals=poisson serving.rate_per_s=1 output_dir=serving",
    "sweep": f"run -m strategy=ar,speculative {SMALL} {CLOCK} output_dir=sweep",
    "compare": f"compare strategies=[ar,staged,best_first,hf_generate] {SMALL} repeats=2"
    " executor=local output_dir=compare",
    "record": "record answers.jsonl draft=bundled:draft output_dir=record",
    "trace": "trace run",
    "report": "report compare",
}
SLOW_COMMANDS = {
    "verify": f"verify --fail-fast strategy=prompt_lookup {SMALL} output_dir=verify",
    "plan": "plan model=law_pipespec_1b_8b profile=one_gpu.yaml batch=1 context=512"
    " output_dir=plan",
    "fit": "fit accepted.jsonl name=mine output_dir=fit",
}
REPRODUCED = (
    "specpipe/fig12",
    "pipedec/pruning",
    "ppsd/fig4",
    "swiftspec/fig2",
    "staged/table1",
    "open/pipespec_runs",
)
_COUNTED = ("staged/table1",)  # whose measured figures are counts
_DATA = re.compile(r"^(-?\d+(\.\d+)?|\d+-\d+|.*/.*|.* .*)$")  # keys that are data
_TIMES = re.compile(
    r"(_s|_ms|ms_\w+|_per_s|_range|_interval|_share|_median|_mean)$|^(speedup|wall|clock|disturbed)"
)


def files(commands: dict[str, str]) -> dict[str, Any]:
    """Runs commands one after the other in a folder; returns the types in the files they write."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name, chdir(name):
        shutil.copy(ROOT / "docs/examples/one_gpu.yaml", name)
        answer = {"prompt": "def double(x):", "completion": "\n    return x + x\n"}
        Path("answers.jsonl").write_text(json.dumps(answer) + "\n", encoding="utf-8")
        accepted = [
            {"id": i, "num_prompt": 3, "acc_len": [1, 4, 2, 3, 1 + i % 4]} for i in range(9)
        ]
        Path("accepted.jsonl").write_text("\n".join(map(json.dumps, accepted)), encoding="utf-8")
        for command, words in commands.items():
            before = {path: path.stat().st_mtime_ns for path in Path().rglob("*")}
            code = run(words.split())
            paths = (
                p for p in sorted(Path().rglob("*")) if p.is_file() and p.name != "config.yaml"
            )
            made = (path for path in paths if before.get(path) != path.stat().st_mtime_ns)
            found[command] = {"exit status": code} | {str(path): types_of(path) for path in made}
    return found


def run(words: Sequence[str]) -> int:
    """The exit status of a command whose output nobody reads."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as err:
        code = specdec(words)
    return code if code == 0 else f"{code}: {err.getvalue()[-300:]}"  # type: ignore[return-value]


def types_of(path: Path) -> dict[str, str]:
    """Key -> type in a JSON, JSON Lines, YAML or npz file; of other files only that they exist."""
    if path.suffix == ".npz":
        with np.load(path) as arrays:
            return {key: str(arrays[key].dtype.kind) for key in sorted(arrays)}
    readers: dict[str, Callable[[str], Any]] = {
        ".json": json.loads,
        ".jsonl": lambda text: [json.loads(line) for line in text.splitlines()],
        ".yaml": yaml.safe_load,
    }
    if path.suffix not in readers:
        return {}
    types: dict[str, set[str]] = {}
    for key, kind in _leaves(readers[path.suffix](path.read_text(encoding="utf-8")), ""):
        if ".git." not in f".{key}":  # which a copy without its history lacks
            types.setdefault(key, set()).add(kind)
    return {key: " or ".join(sorted(kinds)) for key, kinds in sorted(types.items())}


def _leaves(value: Any, place: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            # Strategies that a plan leaves out are data too.
            name = "*" if _DATA.match(str(key)) or place == "left_out" else str(key)
            yield from _leaves(inner, f"{place}.{name}" if place else name)
        if not value:
            yield place, "empty"
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner, f"{place}[]")
        if not value:
            yield f"{place}[]", "empty"
    else:
        if place.endswith("disturbed_because"):
            value = ""  # null on a quiet machine
        kinds = {bool: "bool", int: "number", float: "number", str: "text", type(None): "null"}
        yield place, kinds[type(value)]


def demo(limit: int = 1, max_new_tokens: int = 32, repeats: int = 1) -> dict[str, Any]:
    """Strategy -> the counts of its row in the comparison of ``make demo``."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    names = re.search(r"^DEMO_STRATEGIES \?= (\S+)$", makefile, re.M)
    assert names
    words = [f"strategies=[{names[1]}]", "data=stdlib", f"data.limit={limit}"]
    words += [f"max_new_tokens={max_new_tokens}", "sampling=no_repeat4", f"repeats={repeats}"]
    words += ["threads=1", "model.backend=auto", "output_dir=demo"]
    with tempfile.TemporaryDirectory() as name, chdir(name):
        code = run(["compare", *words])
        assert code == 0, code
        rows = json.loads(Path("demo/comparison.json").read_text(encoding="utf-8"))["rows"]
    return {row["strategy"]: _counts(row) for row in rows}


def _counts(row: dict[str, Any]) -> dict[str, Any]:
    return {
        key: round(value, 9) if isinstance(value, float) else value
        for key, value in row.items()
        if not _TIMES.search(key) and isinstance(value, int | float | dict | bool)
    }


def figures() -> dict[str, Any]:
    """Item -> its figures that do not depend on the machine, in order."""
    found = {}
    with tempfile.TemporaryDirectory() as name, chdir(name):
        for item in REPRODUCED:
            code = run(["reproduce", "--quick", item])
            assert code == 0, (item, code)
            path = Path(f"outputs/reproduce/{item.replace('/', '/results/')}.json")
            measures = json.loads(path.read_text(encoding="utf-8"))["measures"]
            found[item] = [
                f"{m['claim']} | {m['conditions']} | {float(m['value']):.6g}"
                for m in measures
                if m["value"] is not None
                if m["origin"] not in ("measured", "paced") or item in _COUNTED
            ]
    return found


PARTS: dict[str, Callable[[], Any]] = {
    "files": lambda: files(COMMANDS),
    "files_slow": lambda: files(SLOW_COMMANDS),
    "demo": demo,
    "demo_full": lambda: demo(limit=4, max_new_tokens=96, repeats=2),
    "figures": figures,
}


def read() -> dict[str, Any]:
    """The records; empty without the file."""
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}


def differences(recorded: Any, now: Any, place: str = "") -> list[str]:
    if isinstance(recorded, dict) and isinstance(now, dict):
        keys = dict.fromkeys([*recorded, *now])
        pairs = [(recorded.get(key), now.get(key), f"{place} / {key}") for key in keys]
        return [line for pair in pairs for line in differences(*pair)]
    if isinstance(recorded, list) and isinstance(now, list) and len(recorded) == len(now):
        pairs = [(one, other, place) for one, other in zip(recorded, now, strict=True)]
        return [line for pair in pairs for line in differences(*pair)]
    return [f"{place}: recorded {recorded!r}, now {now!r}"] if recorded != now else []


def main(parts: Sequence[str]) -> None:
    torch.set_num_threads(1)
    for part in parts or PARTS:
        now = PARTS[part]()
        records = read()
        print(*differences(records.get(part, {}), now, part), sep="\n")
        records[part] = now
        FILE.write_text(json.dumps(records, indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
