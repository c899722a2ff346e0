"""Runs of the early-exit presets on the bundled target, held against PPSD's laws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.open.maps import write_profile
from experiments.pipelines.tables import SIMULATED
from experiments.reproduce.findings import Findings, Table
from experiments.reproduce.items import Item
from experiments.reproduce.lab import Lab, Outcome, speed_ratio

_LAYERS = 24  # of the bundled target
_STAGES = 8
_EXIT = ("model.exit_layer=3", "model.exit_head=transformer")  # N / 8, as in Table 2
_OTHERS: Mapping[str, tuple[str, ...]] = {
    "medusa": ("strategy=medusa", "executor=pipeline"),
    "eesd_ts": ("strategy=eesd_ts", *_EXIT),
    "ppsd": ("strategy=ppsd", *_EXIT),
}


@dataclass(frozen=True, slots=True)
class ExitRun:
    """PPSD and plain decoding on one pipeline.

    Attributes:
        exit_layer, stages: where drafts leave, and how many stages.
        plain, run: the two.
    """

    exit_layer: int
    stages: int
    plain: Outcome
    run: Outcome

    @property
    def speedup(self) -> tuple[float, float | None, float | None]:
        """Over plain decoding on the same stages, with its interval."""
        return speed_ratio(self.run, self.plain)

    @property
    def alpha(self) -> float:
        """Accepted over judged draft tokens."""
        return float(self.run.summary["acceptance_rate_verified"])

    @property
    def law(self) -> float:
        """Eq. 6 at the run's own alpha."""
        return float(self.run.summary["speedup_law"])


def exit_run(
    item: Item,
    lab: Lab,
    exit_layer: int,
    *,
    pass_ms: float,
    transfer_ms: float = 0.0,
    words: Sequence[str] = (),
) -> ExitRun:
    """PPSD on ceil(layers / exit_layer) even stages, simulated, real values of the bundled target.

    Args:
        item: its size says how many prompts and tokens.
        lab: where it runs.
        exit_layer: one that has a head.
        pass_ms: a whole target pass.
        transfer_ms: between two stages.
        words: further overrides of both, e.g. data and sampling.
    """
    stages = -(-_LAYERS // exit_layer)
    prompts, tokens = item.size["quick" if lab.quick else "full"]
    profile = write_profile(
        lab.folder, target_ms=pass_ms, stages=stages, draft_ms=0.0, transfer_ms=transfer_ms
    )
    common = [
        *("model=tiny", SIMULATED, f"clock.profile={profile}", f"executor.stages={stages}"),
        *(f"data.limit={prompts}", f"max_new_tokens={tokens}", "threads=1", *words),
    ]
    plain = lab.run(["strategy=ar", "executor=pipeline", *common])
    head = "norm" if exit_layer == _LAYERS // 2 else "transformer"
    chosen = [f"model.exit_layer={exit_layer}", f"model.exit_head={head}"]
    run = lab.run(["strategy=ppsd", *common, *chosen])
    return ExitRun(exit_layer, stages, plain, run)


def add_runs(item: Item, lab: Lab, found: Findings, config: Mapping[str, Any]) -> None:
    """Table 1's method on the bundled target: own acceptance, own speed-up, Eq. 6 beside it.

    Keys: ``claim``, ``exits``, ``data`` (name -> overrides), ``pass_ms``.
    """
    rows = []
    for name, words in config["data"].items():
        for exit_layer in config["exits"]:
            made = exit_run(item, lab, exit_layer, pass_ms=config["pass_ms"], words=words)
            ratio, low, high = made.speedup
            loops = made.run.summary["loop_share"]
            share = f"{exit_layer}/{_LAYERS}"
            rows.append(
                (name, share, made.alpha, ratio, low, high, made.law, ratio / made.law, loops)
            )
            text = f"bundled target, {name}, E = {share}: {ratio:.2f}x, Eq. 6 {made.law:.2f}x"
            off = abs(ratio / made.law - 1)
            found.add(config["claim"], off <= 0.05, "simulated", text, loops=loops)
    columns = (
        *("data", "E / N", "alpha", "speed-up", "95 % from", "to", "Eq. 6", "run / law"),
        "loop_share",
    )
    title = "PPSD on the bundled target, transfers and heads at no cost (simulated)"
    found.tables.append(Table(title, columns, tuple(rows)))


def add_others(item: Item, lab: Lab, found: Findings, config: Mapping[str, Any]) -> None:
    """Table 2's methods on the bundled target and its heads: 8 stages for every row (simulated).

    The whole tree of Medusa goes through the pipeline at once. Keys: ``claim``, ``data`` (name ->
    overrides), ``pass_ms``, ``paid`` (a profile that prices heads and output matrices).
    """
    prompts, tokens = item.size["quick" if lab.quick else "full"]
    free = write_profile(
        lab.folder, target_ms=config["pass_ms"], stages=_STAGES, draft_ms=0.0, transfer_ms=0.0
    )
    rows = []
    for name, words in config["data"].items():
        for label, profile in (("heads at no cost", free), ("heads paid", config["paid"])):
            common = [
                *(
                    "model=tiny",
                    SIMULATED,
                    f"clock.profile={profile}",
                    f"executor.stages={_STAGES}",
                ),
                *(f"data.limit={prompts}", f"max_new_tokens={tokens}", "threads=1", *words),
            ]
            plain = lab.run(["strategy=ar", "executor=pipeline", *common])
            ratios = {}
            for method, chosen in _OTHERS.items():
                run = lab.run([*chosen, *common])
                ratios[method], low, high = speed_ratio(run, plain)
                summary = run.summary
                per_answer = summary["new_tokens"] / summary["answers"]
                alpha, loops = summary["acceptance_rate_verified"], summary["loop_share"]
                rows.append(
                    (name, label, method, alpha, per_answer, ratios[method], low, high, loops)
                )
            text = f"bundled target, {name}, {label}: " + ", ".join(
                f"{method} {ratio:.2f}x" for method, ratio in ratios.items()
            )
            faster = ratios["ppsd"] > ratios["medusa"]
            found.add(config["claim"], faster, "simulated", text, loops=loops)
    columns = (
        *("data", "profile", "method", "accepted / judged", "tokens per answer", "speed-up"),
        *("95 % from", "to", "loop_share"),
    )
    title = f"On the bundled target, {_STAGES} stages for every row (simulated)"
    found.tables.append(Table(title, columns, tuple(rows)))
