"""Writes the tables and figures about drafters from the stored results.

    python -m experiments.drafters.page

Replaces what is between ``<!-- NAME -->`` and ``<!-- end -->`` in ``PAGES``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from experiments.drafters.lateness import DRAFTS, GROUPS, PIPELINES, PLANTED
from experiments.drafters.measure import RESULTS, Measured, difference, quotient, read
from experiments.drafters.presets import EDITS
from experiments.drafters.sources import EXECUTORS
from experiments.reproduce.rendering import grid
from specdec.files import write_text
from specdec.report.styles import row_styles

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("docs/medusa.md", "docs/suffix.md", "experiments/log/2026-11-27-drafters.md")
_SETS = {"humaneval": "HumanEval", "gsm8k": "GSM8K"}
_BLOCK = re.compile(r"(<!-- (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
Rows = Sequence[dict[str, Any]]


def main() -> int:
    for name in PAGES:
        path = ROOT / name
        write_text(path, rendered(path.read_text(encoding="utf-8")))
        print(path)
    draw_lateness(read("lateness"), ROOT / "docs" / "images" / "eagle_lateness.png")
    draw_tokenizers(read("other_tokenizer"), ROOT / "docs" / "images" / "translated.png")
    return 0


def rendered(page: str, folder: Path = RESULTS) -> str:
    """The page with its tables made from the results in ``folder``."""

    def table(found: re.Match[str]) -> str:
        name = found[2]
        return f"{found[1]}\n{TABLES[name](folder)}\n{found[3]}"

    return _BLOCK.sub(table, page)


def _title(content: dict[str, Any]) -> str:
    """The workload, its size and loops, and the revisions of its rows."""
    shares = [row["measured"].loop_share for row in content["rows"] if row["measured"]]
    revisions = ", ".join(dict.fromkeys(row["revision"] for row in content["rows"]))
    return (
        f"{_SETS[content['data']]}, `{content['sampling']}`, {content['prompts']} prompts of"
        f" {content['tokens']} tokens, loop_share {max(shares):.2f} (revision {revisions}):"
    )


def _workload(content: dict[str, Any]) -> str:
    return f"{_SETS[content['data']]}, `{content['sampling']}`"


def _grid(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join([*grid(columns, rows), ""])


def _cell(found: Measured | None) -> str:
    return f"{found.value:.2f} ({found.low:.2f}-{found.high:.2f})" if found else "-"


def _change(one: Measured | None, other: Measured | None) -> str:
    if one is None or other is None:
        return "-"
    value, low, high = difference(one, other)
    text = f"{value:+.3f} ({low:+.3f} to {high:+.3f})"
    return f"**{text}**" if low > 0 or high < 0 else text


# Lateness.


def _by_draft(rows: Rows, strategy: str, num: int) -> dict[str, Measured]:
    here = [row for row in rows if (row["strategy"], row["stages"]) == (strategy, num)]
    return {row["draft"]: row["measured"] for row in here}


def lateness(folder: Path = RESULTS) -> str:
    parts = []
    for content in read("lateness", folder):
        rows, lines = content["rows"], []
        for strategy in PIPELINES:
            for num in dict.fromkeys(r["stages"] for r in rows if r["strategy"] == strategy):
                found = _by_draft(rows, strategy, num)
                late, early, draft = (found.get(name) for name in DRAFTS)
                gained = next(r["steps_gained"] for r in rows if r["stages"] == num)
                lines.append(
                    [f"`{strategy}`", str(num), _cell(late)]
                    + [_cell(early) if gained else "the same", str(gained)]
                    + [_change(early, late) if gained else "0", _cell(draft)]
                    + [_change(late, draft)]
                )
        columns = ("", "stages", *list(DRAFTS)[:2], "steps gained", "early - late")
        columns += ("draft model", "late - draft model")
        parts.append(f"{_title(content)}\n\n{_grid(columns, lines)}")
    return "\n".join(parts)


def lateness_control(folder: Path = RESULTS) -> str:
    """What changes if features leave the first stage, and if these are wrong."""
    lines = []
    for content in read("lateness", folder):
        for strategy in PIPELINES:
            for num in dict.fromkeys(row["stages"] for row in content["rows"]):
                found = _by_draft(content["rows"], strategy, num)
                if not set(PLANTED) & set(found):
                    continue
                late = found["with the answers"]
                cells = [_workload(content), f"`{strategy}`", str(num), _cell(late)]
                for name in PLANTED:
                    cells += [_cell(found.get(name)), _change(found.get(name), late)]
                lines.append(cells)
    columns = ("", "", "stages", "with the answers", "at once", "- late", "wrong", "- late")
    return _grid(columns, lines)


def lateness_groups(folder: Path = RESULTS) -> str:
    lines = []
    for content in read("lateness", folder):
        for name in GROUPS:
            found = _by_draft(content["rows"], name, 1)
            late, draft = (found.get(key) for key in ("with the answers", "draft model"))
            lines.append([_workload(content), name, _cell(late), _cell(draft)])
    return _grid(("", "", "EAGLE-3 head", "draft model"), lines)


def draw_lateness(contents: Sequence[dict[str, Any]], path: Path) -> None:
    """Hit rate over the number of stages: a column per workload, a row per pipeline."""
    size = (max(5.0, 3.2 * len(contents)), 6.0)
    figure, axes = _panels(len(PIPELINES), len(contents), size, sharey="row", sharex=True)
    stages = sorted({row["stages"] for content in contents for row in content["rows"]})
    for column, content in enumerate(contents):
        for axis, strategy in zip(axes[:, column], PIPELINES, strict=True):
            for place, draft in enumerate((*DRAFTS, PLANTED[0])):
                key = (strategy, draft)
                here = [r for r in content["rows"] if (r["strategy"], r["draft"]) == key]
                label = draft if draft == "draft model" else f"EAGLE-3 head, features {draft}"
                factor = 1.03 ** (place - 1)  # so that intervals do not hide each other
                at = [row["stages"] * factor for row in here]
                _points(axis, at, [row["measured"] for row in here], label)
            axis.set(xscale="log")
            axis.set_xticks(stages, [str(num) for num in stages])
            axis.minorticks_off()
            axis.grid(alpha=0.3)
        axes[0, column].set_title(_workload(content).replace("`", ""), fontsize=10)
        axes[-1, column].set_xlabel("stages")
    for axis, strategy in zip(axes[:, 0], PIPELINES, strict=True):
        axis.set_ylabel(f"{strategy}: hit rate (simulated)")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, loc="outside lower center", ncols=2)
    _save(figure, path)


def _points(axis: Any, at: Sequence[float], found: Sequence[Measured], label: str) -> None:
    values, *ends = _with_ends(found)
    axis.errorbar(at, values, ends, marker="o", markersize=4, capsize=2, label=label)


def _with_ends(found: Sequence[Measured]) -> np.ndarray:
    """float64[3, N]: values, and distances of their intervals' lower and upper ends."""
    ends = [(m.value, m.value - m.low, m.high - m.value) for m in found]
    return np.array(ends).reshape(-1, 3).T


def _panels(rows: int, columns: int, size: tuple[float, float], **shared: Any) -> Any:
    return plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained", **shared)


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


# Sources by executor.


def sources(folder: Path = RESULTS) -> str:
    parts = []
    for content in read("sources", folder):
        lines = []
        for source in dict.fromkeys(row["source"] for row in content["rows"]):
            found = {r["executor"]: r["measured"] for r in content["rows"] if r["source"] == source}
            cells = [_cell(found[name]) if found[name] else "refused" for name in EXECUTORS]
            piped = found["pipeline of 8"]
            cells[2:2] = ["-" if piped is None else f"{piped.steps_per_token:.2f}"]
            lines.append([f"`{source}`", *cells])
        columns = [f"{name}: {measure}" for name, (measure, _) in EXECUTORS.items()]
        columns[2:2] = ["steps per token"]
        parts.append(f"{_title(content)}\n\n{_grid(('source', *columns), lines)}")
    return "\n".join(parts)


# Other tokenizers.


def other_tokenizer(folder: Path = RESULTS) -> str:
    parts = []
    for content in read("other_tokenizer", folder):
        rows, lines = content["rows"], []
        policies = list(dict.fromkeys(row["policy"] for row in rows))
        for merges in dict.fromkeys(row["merges"] for row in rows):
            found = {row["policy"]: row for row in rows if row["merges"] == merges}
            name = "the target's tokenizer" if merges is None else f"{merges} %"
            shared = found[policies[0]]["shared"]
            cells = []
            for policy in policies:
                measured, own = found[policy]["measured"], _own(rows, policy)
                cells += [_cell(measured), "-" if merges is None else _kept(measured, own)]
            lines.append([name, "-" if shared is None else str(shared), *cells])
        columns = ["merges kept", "tokens"]
        for policy in policies:
            columns += [f"`policy={policy}`", "accepted tokens kept"]
        parts.append(f"{_title(content)}\n\n{_grid(columns, lines)}")
    return "\n".join(parts)


def _own(rows: Rows, policy: str) -> Measured:
    """With the target's tokenizer."""
    return next(r["measured"] for r in rows if (r["policy"], r["merges"]) == (policy, None))


def _kept(found: Measured, own: Measured) -> str:
    return f"{100 * (found.value - 1.0) / (own.value - 1.0):.0f} %"


def draw_tokenizers(contents: Sequence[dict[str, Any]], path: Path) -> None:
    """Accepted draft tokens per pass, of those with the target's tokenizer."""
    size = (3.4 * len(contents) + 0.6, 3.4)
    figure, axes = _panels(1, len(contents), size, sharey=True)
    for axis, content in zip(axes[0], contents, strict=True):
        looks = row_styles(dict.fromkeys(row["policy"] for row in content["rows"]))
        for policy, look in looks.items():
            here = [r for r in content["rows"] if r["policy"] == policy and r["merges"] is not None]
            gain = _own(content["rows"], policy).value - 1.0
            values, *ends = 100 / gain * _with_ends([row["measured"] for row in here])
            at = [row["merges"] for row in here]
            kept = values - 100 / gain
            axis.errorbar(at, kept, ends, ms=4, capsize=2, label=policy, **look.line())
        axis.axhline(100, color="grey", linewidth=0.8)
        axis.grid(alpha=0.3)
        axis.set_title(_workload(content).replace("`", ""), fontsize=10)
        axis.set_xlabel("merges of the tokenizer kept, %")
    axes[0, 0].set_ylabel("accepted tokens kept, %")
    axes[0, 0].legend(fontsize=8)
    _save(figure, path)


# Presets side by side.


def _by_preset(content: dict[str, Any]) -> dict[str, Measured]:
    return {row["preset"]: row["measured"] for row in content["rows"]}


def _times(one: Measured, other: Measured) -> str:
    value, low, high = quotient(one, other)
    return f"{value:.2f}x ({low:.2f}-{high:.2f})"


def ddtree(folder: Path = RESULTS) -> str:
    lines = []
    for content in read("presets", folder):
        found = _by_preset(content)
        medusa, tree = found["medusa"], found["ddtree"]
        lines.append(
            [_workload(content), _cell(medusa), _cell(tree), _times(tree, medusa)]
            + [f"{medusa.loop_share:.2f}"]
        )
    columns = ("", "`medusa`, static tree", "`ddtree`", "`ddtree` / `medusa`", "loop_share")
    return _grid(columns, lines)


def suffix(folder: Path = RESULTS) -> str:
    lines = []
    for content in read("presets", folder):
        found = _by_preset(content)
        rows = {row["preset"]: row["target_rows"] for row in content["rows"]}
        cells = [_workload(content)]
        for name in ("prompt_lookup", "suffix"):
            cells += [_cell(found[name]), f"{rows[name]:,}"]
        cells += [_times(found["suffix"], found["prompt_lookup"])]
        lines.append([*cells, f"{found['suffix'].loop_share:.2f}"])
    columns = ("", "`prompt_lookup`", "rows", "`suffix`", "rows", "quotient", "loop_share")
    return _grid(columns, lines)


def suffix_edits(folder: Path = RESULTS) -> str:
    """Sources that copy text on the agent's edits, by kind of turn."""
    (content,) = read("presets", folder, ((EDITS, "t06"),))
    kinds, lines = ("rewrite", "resume"), []
    base = _by_preset(content)["prompt_lookup"]
    for row in content["rows"]:
        cells = [f"`{row['preset']}`", _cell(row["measured"]), _times(row["measured"], base)]
        for kind in kinds:
            pairs = zip(row["measured"].counts, row["kinds"], strict=True)
            counts = [count for count, of in pairs if of == kind]
            tokens, passes = map(sum, zip(*counts, strict=True))
            cells.append(f"{tokens / passes:.2f}")
        lines.append([*cells, f"{row['target_rows']:,}"])
    columns = ("", "all", "of `prompt_lookup`", *(f"`{kind}`" for kind in kinds), "rows")
    return _grid(columns, lines)


_LATENESS = (lateness, lateness_control, lateness_groups)
_TABLES = (*_LATENESS, sources, other_tokenizer, ddtree, suffix, suffix_edits)
TABLES: dict[str, Callable[[Path], str]] = {table.__name__: table for table in _TABLES}
"""Name in a page -> its table."""


if __name__ == "__main__":
    sys.exit(main())
