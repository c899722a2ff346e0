"""Lines below a table that say what its rows suggest, and what to run next."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specdec.metrics.speedup import expected_accepted

Row = Mapping[str, Any]

_GAIN = 1.1  # a smaller predicted gain is not worth a line


def advice_of(
    rows: Sequence[Row], configs: Sequence[Mapping[str, Any]], folder: Path | None
) -> list[str]:
    """Returns the lines; ``folder`` has the result files, None if they are deleted."""
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
    """Returns the predicted gain of a smaller or larger tree, and the line; 0 if nothing follows.

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
    """Returns the mean seconds of a row's target passes after the first token; None on other clocks
    than a measured one, with several requests or steps in flight, or without model calls.
    """
    target_s, ttft_ms = (row.get("model_s") or {}).get("target"), plain.get("ttft_ms")
    alone = row.get("latency") == 1 and (row.get("mean_batch") or 1.0) == 1.0
    if row.get("clock") != "measured" or not alone or not target_s or ttft_ms is None:
        return None
    later = row["target_passes"] - row["num_prompts"]  # the first token's pass is in its time
    seconds = target_s - row["num_prompts"] * ttft_ms / 1e3
    return seconds / later if later > 0 and seconds > 0 else None
