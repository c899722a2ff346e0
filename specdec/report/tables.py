"""Comparison tables for the terminal and in Markdown, notes on rows, advice on what to run next."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from specdec.metrics.speedup import expected_accepted

Row = Mapping[str, Any]

NONE = "-"  # the cell text of an undefined value
_FEW_PROMPTS = 16
_GAIN = 1.1  # a smaller predicted gain is not worth a line


@dataclass(frozen=True, slots=True)
class Column:
    heading: str
    about: str  # unit or explanation
    cell: Callable[[Row], str]  # formats a row's cell
    left: bool = False  # alignment


def number(value: Any, digits: int = 2) -> str:
    return NONE if value is None else f"{value:,.{digits}f}"


def percent(value: Any, digits: int = 0) -> str:
    return NONE if value is None else f"{100 * value:.{digits}f} %"


def lossless_label(row: Row) -> str:
    if row.get("strategy") == "ar":
        return "reference"
    if row.get("claims") == "lossy":
        return "LOSSY"
    lossless = row.get("lossless")
    if lossless is None:
        return "in distribution" if row.get("claims") == "distribution" else NONE
    word = "ties?" if row.get("quantized") else "NO"
    return "yes" if lossless else f"{word} ({row.get('num_differing', '?')} differ)"


def _speedup(row: Row) -> str:
    value, spread = row.get("speedup_wall"), row.get("speedup_wall_range")
    text = " ({:.2f}-{:.2f})".format(*spread) if spread and row.get("repeats", 1) > 1 else ""
    return NONE if value is None else f"{value:.2f}x{text}"


def _of(key: str, digits: int, form: Callable[[Any, int], str] = number) -> Callable[[Row], str]:
    return lambda row: form(row.get(key), digits)


COLUMNS = (
    Column("strategy", "", lambda r: r["strategy"] + (" *" if r.get("fastest") else ""), left=True),
    Column("lossless", "tokens compared with ar", lossless_label, left=True),
    Column("tokens/s", "decoding only", _of("tokens_per_s", 1)),
    Column("vs ar", "median (range of repeats)", _speedup),
    Column("TTFT ms", "mean time to the first token", _of("ttft_ms", 1)),
    Column("TBT ms", "mean between tokens", _of("tbt_ms_mean", 2)),
    Column("accept len", "emitted per target pass", _of("acceptance_length", 2)),
    Column("hit rate", "of level-per-step answers", _of("hit_rate", 0, percent)),
    Column("target", "passes", _of("target_passes", 0)),
    Column("draft", "passes", _of("draft_passes", 0)),
    Column("overhead", "outside model calls", _of("overhead_share", 1, percent)),
    Column("runtime", "runs the models", lambda r: str(r.get("runtime") or NONE), left=True),
    Column("loops", "loop_share", _of("loop_share", 0, percent)),
)

CATEGORIES = (  # the heading of the table by category
    "By category: speed-up over ar (without ar: tokens/s) as Spec-Bench computes it, a mean over"
    " questions with their prefill; in brackets emitted tokens per step"
)


def category_columns(rows: Sequence[Row]) -> list[Column]:
    names = dict.fromkeys(name for row in rows for name in row.get("by_category") or {})
    columns = [Column(name, "", partial(_category_cell, name)) for name in names]
    return [COLUMNS[0], *columns] if columns else []


def _category_cell(name: str, row: Row) -> str:
    figures = (row.get("by_category") or {}).get(name)
    if figures is None:
        return NONE
    ratio = figures["speedup"]
    speed = number(figures["tokens_per_s"], 1) if ratio is None else f"{ratio:.2f}x"
    return f"{speed} ({number(figures['accept_length'])})"


def used_columns(rows: Sequence[Row]) -> list[Column]:
    """Returns the columns with a value in at least one row; the runtimes only if they differ."""
    one_runtime = len({row.get("runtime") for row in rows}) < 2
    used = [column for column in COLUMNS if any(column.cell(row) != NONE for row in rows)]
    return [column for column in used if not (one_runtime and column.heading == "runtime")]


def markdown_lines(columns: Sequence[Column], rows: Sequence[Row]) -> list[str]:
    aligns = ["---" if column.left else "---:" for column in columns]
    cells = [[column.cell(row) for column in columns] for row in rows]
    table = [[column.heading for column in columns], aligns, *cells]
    return [f"| {' | '.join(line)} |" for line in table]


_TITLED = (
    *("target", "draft", "translated", "backend", "dtype", "quantization", "sampling"),
    *("max_new_tokens", "batch_size", "executor"),
)

TITLE_KEYS = ("clock", "clock_profile", "data", "num_prompts", *_TITLED)
"""Conditions that ``title_of`` shows."""


RUNTIMES = {"eager": "PyTorch", "onnx": "ONNX Runtime"}  # backend -> program that runs its models


def title_of(conditions: Mapping[str, Any], rows: Sequence[Row] = ()) -> str:
    """Returns one line of a run's conditions; the backend is the other program of all ``rows``."""
    runtimes = {row.get("runtime") for row in rows} - {None}
    if len(runtimes) == 1 and runtimes != {RUNTIMES.get(conditions.get("backend", ""))}:
        conditions = {**conditions, "backend": runtimes.pop()}
    parts = [f"{conditions.get('clock', 'measured')} time"]
    if conditions.get("clock_profile") is not None:
        scale = conditions.get("clock_scale", 1.0)
        parts[0] += f" on {conditions['clock_profile']}" + (f" x {scale:g}" if scale != 1.0 else "")
    if conditions.get("data") is not None:
        count = conditions.get("num_prompts")
        parts.append(f"data={conditions['data']}" + (f" ({count} prompts)" if count else ""))
    if conditions.get("chat_template"):
        parts.append("chat template applied")
    for key in _TITLED:
        if conditions.get(key) is not None:
            parts.append(f"{key}={_inline(conditions[key])}")
    return ", ".join(parts)


def shown_rows(rows: Sequence[Row], conditions: Mapping[str, Any]) -> list[Row]:
    """Returns the rows with the keys ``fastest`` and ``quantized`` (the target's weights) added.

    A quantised target's logits depend on the number of rows in a pass, so rounding may decide
    between nearly equal logits otherwise than in ``ar``.
    """
    best = best_row(rows)
    quantized = conditions.get("quantization") in ("int8", "int4")
    return [{**row, "fastest": row is best, "quantized": quantized} for row in rows]


def best_row(rows: Sequence[Row]) -> Row | None:
    kept = [r for r in rows if r.get("speedup_wall") is not None and not is_lossy(r)]
    return max(kept, key=lambda row: row["speedup_wall"]) if len(kept) > 1 else None


def is_lossy(row: Row) -> bool:
    return row.get("lossless") is False or row.get("claims") == "lossy"


def print_table(
    rows: Sequence[Row],
    conditions: Mapping[str, Any],
    console: Console | None = None,
    *,
    advice: Sequence[str] = (),
) -> None:
    """Prints the comparison, notes and advice; on a narrow terminal in several tables."""
    console, rows = console or Console(), shown_rows(rows, conditions)
    show = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    show(title_of(conditions, rows))
    _print_blocks(rows, used_columns(rows), console)
    if categories := category_columns(rows):
        show(f"\n{CATEGORIES}")
        _print_blocks(rows, categories, console)
    for line in (*notes_of(rows), *advice):
        show(line)


def _print_blocks(rows: Sequence[Row], columns: Sequence[Column], console: Console) -> None:
    longest = {c: max(len(c.heading), *(len(c.cell(row)) for row in rows)) for c in columns}
    blocks = [[columns[0]]]
    for column in columns[1:]:  # of padding two characters, and one between columns
        blocks[-1].append(column)
        width = 2 + sum(longest[c] + 3 for c in blocks[-1])
        if console.is_terminal and console.width < width and len(blocks[-1]) > 2:
            blocks.append([columns[0], blocks[-1].pop()])
    for block in blocks:
        table = Table(box=SIMPLE_HEAD, padding=(0, 1), show_edge=False)
        for c in block:
            table.add_column(c.heading, justify="left" if c.left else "right", no_wrap=True)
        for row in rows:
            wrong = row.get("lossless") is False and not row.get("quantized")
            style = "bold" if row.get("fastest") else "red" if wrong else None
            table.add_row(*(column.cell(row) for column in block), style=style)
        # rich assumes 80 characters for files and pipes and would truncate the cells.
        width = max(console.width, 4 + sum(longest[c] + 3 for c in block))
        Console(file=console.file, width=width, force_terminal=console.is_terminal).print(table)


def markdown_table(
    rows: Sequence[Row], conditions: Mapping[str, Any], *, advice: Sequence[str] = ()
) -> str:
    rows = shown_rows(rows, conditions)
    columns = used_columns(rows)
    lines = [f"# Comparison: {title_of(conditions, rows)}", "", *markdown_lines(columns, rows), ""]
    lines += [f"- {note}" for note in (*notes_of(rows), *advice)]
    if categories := category_columns(rows):
        lines += ["", "## By category", "", CATEGORIES, "", *markdown_lines(categories, rows)]
    meanings = "; ".join(f"{c.heading}: {c.about}" for c in columns if c.about)
    lines += ["", f"Columns: {meanings}.", "", "## Conditions", ""]
    lines += [f"- {key}: {_inline(value)}" for key, value in conditions.items()]
    return "\n".join(lines) + "\n"


def _inline(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_inline(item)}" for key, item in value.items())
    return str(value)


def notes_of(rows: Sequence[Row]) -> list[str]:
    notes = ["*: the fastest lossless row."] if any(row.get("fastest") for row in rows) else []
    for row in rows:
        for token in (row.get("differing") or ())[:3]:
            text = "prompt {id}, token {position}: {token} instead of {ar_token}"
            if token["position"] < 0:
                text = "prompt {id} has no answer to compare"
            notes.append(f"{row['strategy']} differs from ar: {text.format(**token)}")
    if any(row.get("quantized") and row.get("lossless") is False for row in rows):
        notes.append(
            "ties?: quantised passes of one and of more rows are not bitwise equal, so these tokens"
            " may be ties; `specdec verify` tells ties from faults."
        )
    notes += [
        f"{row['strategy']} DOES NOT COUNT: {percent(row['overrun_share'], 1)} of its paced work"
        " took longer than the profile says (2 % are allowed); raise clock.scale."
        for row in rows
        if row.get("paced_counts") is False
    ]
    notes += [f"{row['strategy']}: {row['caveat']}." for row in rows if row.get("caveat")]
    if disturbed := [
        f"{row['strategy']} {row['disturbed']} of {row['num_prompts'] * row.get('repeats', 1)}"
        for row in rows
        if row.get("disturbed")
    ]:
        notes.append(f"DISTURBED by other work on this machine: {', '.join(disturbed)} times.")
    others = [row for row in rows if row["strategy"] != "ar"]
    few = [r for r in others if r.get("speedup_wall_interval") and r["num_prompts"] < _FEW_PROMPTS]
    if few:
        text = "{strategy} {speedup_wall_interval[0]:.2f}-{speedup_wall_interval[1]:.2f}x"
        notes.append(
            f"Only {few[0]['num_prompts']} prompts. 95 % intervals of `vs ar` over prompts:"
            f" {', '.join(text.format(**row) for row in few)}."
        )
    loops = max((row.get("loop_share") or 0.0 for row in rows), default=0.0)
    if loops >= 0.2:
        notes.append(
            f"Up to {percent(loops)} of the tokens end an 8-gram generated before. Loops"
            " flatter every speculative method: compare under sampling=t06 or no_repeat4 too."
        )
    return notes


def advice_of(
    rows: Sequence[Row], configs: Sequence[Mapping[str, Any]], folder: Path | None
) -> list[str]:
    """Returns lines on what to run next; ``folder`` has the results, None if they are deleted."""
    lines, names = [], [str(row["strategy"]) for row in rows]
    plain = next((row for row in rows if row["strategy"] == "ar"), None)
    if plain is None:
        lines.append(
            f"`ar` is missing, so nothing says what this gains over plain decoding: specdec compare"
            f" 'strategies=[ar,{names[0]}]' with the same options."
        )
    else:
        pairs = zip(rows, configs, strict=True)
        gains = [_better_size(row, plain, config.get("policy") or {}) for row, config in pairs]
        lines += [text for gain, text in sorted(gains)[-1:] if gain > _GAIN]
    differing = [i for i, row in enumerate(rows) if row.get("lossless") is False]
    for i in differing[:1]:
        model = (configs[i].get("choices") or {}).get("model", "...")
        lines.append(f"Next: specdec verify strategy={names[i]} model={model}, same options.")
    if folder is not None and not differing:
        lines.append(f"Next: specdec report {folder}, a page with pictures and coloured texts.")
    return lines


def _better_size(row: Row, plain: Row, policy: Mapping[str, Any]) -> tuple[float, str]:
    """Returns a better tree size's predicted speed-up, and a line of advice; (0, "") without any.

    A chain's best length follows from Leviathan et al. (2023), Theorem 3.8, if a pass costs a
    constant plus a term per row; other trees are halved if their passes cost more than the tokens
    that they emit.
    """
    pass_s, one_s = _pass_s(row, plain), _pass_s(plain, plain)
    num_rows, tokens = row.get("rows_per_target_pass"), row.get("acceptance_length")
    if row is plain or not (pass_s and one_s and tokens and num_rows and num_rows > 1.5):
        return 0.0, ""
    cost = pass_s / one_s
    text = f"{row['strategy']}: a pass of {num_rows:.3g} rows costs {cost:.1f} passes of one row"
    alpha, gamma = row.get("acceptance_rate_verified"), policy.get("gamma")
    if isinstance(gamma, int) and alpha is not None:
        calls = (row.get("model_calls") or {}).get("draft")
        draft = row["model_s"]["draft"] / calls / one_s if calls else 0.0
        slope = max(0.0, (cost - 1.0) / (num_rows - 1.0))

        def speed(length: int) -> float:
            return (1.0 + expected_accepted(alpha, length)) / (1.0 + length * (slope + draft))

        best = max(range(1, 2 * gamma + 1), key=speed)
        word = "shorter" if best < gamma else "longer"
        text += f" and emits {tokens:.1f} tokens: {word} drafts may help: policy.gamma={best}."
        return speed(best) / speed(gamma), text
    for key in ("bs", "width"):
        size = policy.get(key)
        if isinstance(size, int) and size > 1 and cost > tokens:
            text += f" and emits {tokens:.1f} tokens: smaller trees may help: policy.{key}="
            return cost / tokens, f"{text}{max(1, int(min(size, num_rows)) // 2)}."
    return 0.0, ""


def _pass_s(row: Row, plain: Row) -> float | None:
    """Returns mean seconds of a target pass of ``row``, except first passes (timed by ``plain``'s
    time to first token); None for unmeasured clocks, overlapping requests or missing times.
    """
    target_s, ttft_ms = (row.get("model_s") or {}).get("target"), plain.get("ttft_ms")
    alone = row.get("latency") == 1 and (row.get("mean_batch") or 1.0) == 1.0
    if row.get("clock") != "measured" or not alone or not target_s or ttft_ms is None:
        return None
    later = row["target_passes"] - row["num_prompts"]  # the first token's pass is in its time
    seconds = target_s - row["num_prompts"] * ttft_ms / 1e3
    return seconds / later if later > 0 and seconds > 0 else None
