"""Strategies that draft while the target works, side by side (``open/asynchronous``).

A *case* is a layout of the target's devices, a ratio of pass times, hits, a link latency and a
batch size. In each case all methods decode the same prompts with the same hits on one generated
profile, so their times differ by the schedule alone.

A hop between stages, and each answer, takes one link latency; what the controller sends with it
takes none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.open.asynchronous_cases import Case, Speed, Speeds, cases, hits_of, numbers
from experiments.open.asynchronous_text import sentences
from experiments.reproduce.drafts import size_overrides
from experiments.reproduce.drawing import styles, tidy
from experiments.reproduce.findings import Findings
from experiments.reproduce.items import Item
from experiments.reproduce.lab import Lab, Outcome, speed_ratio
from experiments.reproduce.profiles import write_profile
from specdec.errors import UserError


def asynchronous(item: Item, lab: Lab) -> Findings:
    """Tables, page of plots, sentences and claims.

    Keys: ``target_ms``, ``law`` (hits by acceptance), ``layouts``, ``methods`` (see the YAML),
    ``reference``, ``base``, ``grid`` and ``axes`` by size, ``replayed``, ``duels``, ``laws``,
    ``claims``, ``distance``.
    """
    findings = Findings()
    bench = _Bench(item, lab, findings)
    speeds = {case: bench.speeds(case) for case in cases(item.config, quick=lab.quick)}
    replayed = {case: bench.speeds(case, words) for case, words in bench.replays()}
    for title, found in (("Synthetic hits", speeds), ("Bundled pair, replayed", replayed)):
        findings.table(f"{title}: speed-up over plain decoding, and per device", *_rows(found))
    bench.claims()
    bench.distance()
    findings.notes += sentences(item.config, speeds)
    findings.figure = picture(item, speeds, replayed)
    return findings


class _Bench:
    def __init__(self, item: Item, lab: Lab, findings: Findings) -> None:
        self._item = item
        self._config = item.config
        self._lab = lab
        self._findings = findings
        self._methods = self._config["methods"]

    def speeds(self, case: Case, hits: Sequence[str] | None = None) -> dict[str, Speed]:
        """Every method of the case's layout; ``hits``: overrides in place of the synthetic law."""
        if hits is None:
            assert case.acceptance is not None
            hits = hits_of(self._config["law"], case.acceptance)
        runs = {}
        for name, method in self._methods.items():
            if case.layout in method.get("layouts", self._config["layouts"]):
                try:
                    runs[name] = self._run(case, method, hits)
                except UserError as error:
                    if name == self._config["reference"]:
                        raise
                    self._miss(f"{name}: {error}")
        plain, methods = runs[self._config["reference"]], self._methods
        return {n: self._speed(case, methods[n], run, plain) for n, run in runs.items()}

    def replays(self) -> Iterator[tuple[Case, list[str]]]:
        """The bundled pair at the base case, per layout and temperature."""
        for title, words in self._config["replayed"].items():
            try:
                prompts, tokens = self._item.size["quick" if self._lab.quick else "full"]
                size = [f"data.limit={max(8, prompts)}", f"max_new_tokens={tokens}"]
                path = self._lab.record([*words, *size])
            except UserError as error:
                self._miss(f"bundled pair, {title}: {error}")
                continue
            for layout in self._config["layouts"]:
                base = {**self._config["base"], "acceptance": None}
                hits = ["model=replay", f"model.record={path}"]
                yield Case(layout=layout, hits=f"bundled pair, {title}", **base), hits

    def claims(self) -> None:
        """The stated values: the ratio of two methods with the hits of a measured pair."""
        for claim, spec in self._config["claims"].items():
            case = self._case(spec)
            try:
                hits, words = self._hits(spec["hits"]), spec.get("words", ())
                fast, slow = (self._run(case, self._methods[n], hits, words) for n in spec["rows"])
            except UserError as error:
                self._miss(f"claim {claim}: {error}")
                continue
            value, low, high = speed_ratio(fast, slow)
            title = self._config["laws"][spec["hits"]]["title"]
            layout = self._config["layouts"][spec["layout"]]["title"]
            rows = " over ".join(spec["rows"])
            times = ", ".join(spec.get("words", (f"t_target/t_draft {spec['ratio']:g}",)))
            where = f"{rows}; {title}; {layout}, {times}"
            simulated = (claim, value, "simulated", where)
            self._findings.add(*simulated, kind="calibrated", interval=(low, high))

    def distance(self) -> None:
        """Serial speculation with the draft beside the target or across a link."""
        spec = self._config["distance"]
        hits, serial = self._hits(spec["hits"]), self._methods["speculative"]
        rows = []
        for link_ms in spec["link_ms"]:
            case = self._case({"layout": "group", **spec, "link_ms": link_ms})
            across = {**serial, "in_group": ["executor=two_groups"]}
            plain = self._run(case, self._methods[self._config["reference"]], hits)
            alone, split = self._run(case, serial, hits), self._run(case, across, hits)
            own, far = speed_ratio(alone, plain), speed_ratio(split, plain)
            gamma = numbers(self._config["law"], case, 1)["chain"]
            rows.append((link_ms, own[0], *far, far[0] / own[0], 1 + gamma / case.ratio))
        columns = ("link ms", "co-located", "split", "low", "high", "split/co-located")
        last = "requests per target device, split over co-located: 1 + gamma t_draft/t_target"
        self._findings.table(
            "Speculation at a distance: speed-up over plain decoding", (*columns, last), rows
        )

    def _case(self, spec: Mapping[str, Any]) -> Case:
        base = {**self._config["base"], "acceptance": None}
        own = {key: spec[key] for key in ("ratio", "link_ms") if key in spec}
        return Case(layout=spec["layout"], hits=spec["hits"], **{**base, **own})

    def _hits(self, law: str) -> Sequence[str]:
        words: Sequence[str] = self._config["laws"][law]["words"]
        return words

    def _run(
        self,
        case: Case,
        method: Mapping[str, Any],
        hits: Sequence[str],
        further: Sequence[str] = (),
    ) -> Outcome:
        stages = self._config["layouts"][case.layout]["stages"]
        settings = numbers(self._config["law"], case, stages)
        words = [word.format(**settings) for word in method["words"]]
        if stages > 1:
            words += ["executor=pipeline", f"executor.stages={stages}"]
        else:
            words += method.get("in_group", ())
        if case.hits in method.get("hits", {}):
            words.append(method["hits"][case.hits].format(**settings))
        profile = write_profile(
            self._lab.folder,
            target_ms=self._config["target_ms"],
            stages=stages,
            draft_ms=self._config["target_ms"] / case.ratio,
            transfer_ms=case.link_ms,
            middle_ms=self._config["target_ms"] * method.get("middle", 0.0),
        )
        prompts, tokens = size_overrides(self._item, self._lab)
        if case.batch > 1:
            num = max(int(prompts.partition("=")[2]), case.batch)
            prompts = f"data.limit={num}"
        time = ["clock=simulated", f"clock.profile={profile}"]
        size = [prompts, tokens, f"batch_size={case.batch}"]
        return self._lab.run([*hits, *words, *time, *size, *further])

    def _speed(self, case: Case, method: Mapping[str, Any], run: Outcome, plain: Outcome) -> Speed:
        value, low, high = speed_ratio(run, plain)
        stages = self._config["layouts"][case.layout]["stages"]
        devices = (stages * method.get("copies", 1) + method["extra"]) / stages
        loops = run.summary["loop_share"]
        return Speed(value=value, low=low, high=high, devices=devices, loops=loops, run=run)

    def _miss(self, text: str) -> None:
        if text not in self._findings.missing:
            self._findings.missing.append(text)


def _rows(speeds: Speeds) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
    columns = (
        *("hits", "layout", "t_target/t_draft", "acceptance", "link ms", "batch", "method"),
        *("speed-up", "low", "high", "devices", "per device", "hit rate", "loop_share"),
    )
    rows = [
        (
            *(case.hits, case.layout, case.ratio, case.acceptance, case.link_ms, case.batch, name),
            *(speed.value, speed.low, speed.high, speed.devices, speed.per_device),
            *(speed.run.summary["hit_rate"], speed.loops),
        )
        for case, methods in speeds.items()
        for name, speed in methods.items()
    ]
    return columns, rows


_PANELS = {
    "ratio": "t_target / t_draft",
    "acceptance": "acceptance",
    "link_ms": "link latency (ms)",
    "batch": "requests at a time",
}
_DPI = 110


def picture(item: Item, speeds: Speeds, replayed: Speeds) -> Figure:
    """Speed-up along each axis, per device at the base case, and on the replayed pair."""
    config = item.config
    names = list(config["methods"])
    layouts = list(config["layouts"])
    fig = Figure(figsize=(19.0, 4.0 * len(layouts) + 0.8), dpi=_DPI, layout="constrained")
    grid = fig.subplots(len(layouts), len(_PANELS) + 2, squeeze=False)
    for ax in grid.flat:
        ax.tick_params(labelsize=8)
    for axes, layout in zip(grid, layouts, strict=True):
        title = config["layouts"][layout]["title"]
        for ax, (axis, label) in zip(axes, _PANELS.items(), strict=False):
            _along(ax, names, _points(config, speeds, layout, axis))
            fixed = ", ".join(f"{key} {v:g}" for key, v in config["base"].items() if key != axis)
            tidy(ax, x=label, y="speed-up over plain decoding", title=f"{title}\n{fixed}")
            if axis != "acceptance":
                ax.set_xscale("log", base=10 if axis == "link_ms" else 2)
                ax.xaxis.set_major_formatter("{x:g}")
        at_base = _points(config, speeds, layout, "ratio")[config["base"]["ratio"]]
        _bars(axes[-2], names, {"base": {n: s.per_device for n, s in at_base.items()}})
        tidy(axes[-2], x="", y="speed-up per device", title=f"{title}\nbase case, per device")
        groups = {
            case.hits.partition(", ")[2]: {n: s.value for n, s in methods.items()}
            for case, methods in replayed.items()
            if case.layout == layout
        }
        _bars(axes[-1], names, groups)
        tidy(axes[-1], x="", y="speed-up", title=f"{title}\nbundled pair, replayed")
    for name, look in styles(names).items():
        shown = any(name in methods for methods in speeds.values())
        if shown:
            grid[0][0].plot([], [], ms=4, label=name, **look.line())
    fig.legend(loc="outside lower center", ncols=len(names), fontsize=9, frameon=False)
    fig.suptitle(f"{item.stated.title} (simulated; bands: 95 % over prompts)", fontsize=11)
    return fig


def _points(
    config: Mapping[str, Any], speeds: Speeds, layout: str, axis: str
) -> dict[float, Mapping[str, Speed]]:
    """Value of the axis -> speeds, the other axes at the base."""
    base = {key: value for key, value in config["base"].items() if key != axis}

    def on_line(case: Case) -> bool:
        return case.layout == layout and all(getattr(case, k) == v for k, v in base.items())

    found = {getattr(case, axis): methods for case, methods in speeds.items() if on_line(case)}
    return dict(sorted(found.items()))


def _along(ax: Axes, names: Sequence[str], points: Mapping[float, Mapping[str, Speed]]) -> None:
    for name, style in styles(names).items():
        found = [(x, methods[name]) for x, methods in points.items() if name in methods]
        if not found:
            continue
        xs = [x for x, _ in found]
        ax.plot(xs, [s.value for _, s in found], ms=3.5, lw=1.3, **style.line())
        banded = [(x, s.low, s.high) for x, s in found if s.low is not None and s.high is not None]
        if len(banded) == len(found):
            lows, highs = [b[1] for b in banded], [b[2] for b in banded]
            ax.fill_between(xs, lows, highs, color=style.color, alpha=0.12, lw=0)
    ax.axhline(1.0, color="#888888", lw=0.8)


def _bars(ax: Axes, names: Sequence[str], groups: Mapping[str, Mapping[str, float]]) -> None:
    looks = styles(names)
    for place, (_, values) in enumerate(groups.items()):
        shown = [name for name in names if name in values]
        width = 0.84 / max(1, len(shown))
        for i, name in enumerate(shown):
            x = place + (i - (len(shown) - 1) / 2) * width
            ax.bar(x, values[name], 0.92 * width, **looks[name].bar())
    ax.set_xticks(range(len(groups)), list(groups), fontsize=8)
    ax.axhline(1.0, color="#888888", lw=0.8)
