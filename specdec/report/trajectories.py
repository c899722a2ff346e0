"""Plots acceptance over a run: by prompt in the order in which they finished, and by domain.

A prompt's domain is its category in the data set (the task, in Spec-Bench), else its data set.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from specdec.report.plots import DRAFTED_LABEL, figure_of, png, tidy
from specdec.report.result_plots import MAX_CURVES, Curve, styles_of
from specdec.report.spec_bench import task_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from specdec.report.requests import RequestRecord
    from specdec.report.styles import Style

_MAX_DOMAINS = 16
_LEAST_PROMPTS = 4


def drafted_by_prompt(records: Sequence[RequestRecord]) -> tuple[list[float], list[float]]:
    """Returns the share of drafted tokens per prompt and in all prompts so far, of repeat 0."""
    shares, so_far = list[float](), list[float]()
    drafted = emitted = 0
    for origins in (r.result.origins for r in records if r.repeat == 0 and r.result.origins):
        own = sum(origin >= 0 for origin in origins)
        drafted, emitted = drafted + own, emitted + len(origins)
        shares.append(own / len(origins))
        so_far.append(drafted / emitted)
    return shares, so_far


def drafted_by_domain(records: Sequence[RequestRecord]) -> dict[str, float]:
    """Maps each domain to the share of its tokens that a source proposed, in the first repeat.

    Prompts without a domain are left out.
    """
    drafted, emitted = Counter[str](), Counter[str]()
    for record in records:
        domain = domain_of(record)
        if record.repeat == 0 and domain:
            drafted[domain] += sum(origin >= 0 for origin in record.result.origins)
            emitted[domain] += len(record.result.origins)
    return {name: drafted[name] / count for name, count in emitted.items() if count}


def domain_of(record: RequestRecord) -> str:
    """Returns the domain of a finished prompt; "" if its name is unknown."""
    return task_of(record.category) or record.prompt.rpartition("/")[0]


def trajectory_png(curves: Sequence[Curve]) -> bytes | None:
    """Plots both shares; returns None with fewer than four prompts, or if no source drafted."""
    shown = [c for c in curves[:MAX_CURVES] if not c.is_plain]
    paths = {c.result.name: drafted_by_prompt(c.result.records) for c in shown}
    if max((len(shares) for shares, _ in paths.values()), default=0) < _LEAST_PROMPTS:
        return None
    domains = {c.result.name: drafted_by_domain(c.result.records) for c in shown}
    names = list(dict.fromkeys(name for shares in domains.values() for name in shares))
    panels = 2 if 1 < len(names) <= _MAX_DOMAINS else 1
    figure = figure_of(11.0, 4.0)
    axes = figure.subplots(1, panels, squeeze=False)[0]
    styles = styles_of(curves)
    _by_prompt(axes[0], paths, styles)
    if panels == 2:
        _by_domain(axes[1], names, domains, styles)
    handles, labels = axes[0].get_legend_handles_labels()
    style: dict[str, Any] = {"ncols": min(6, len(labels)), "fontsize": 8, "frameon": False}
    figure.legend(handles, labels, loc="outside lower center", **style)
    return png(figure, "Acceptance over the run: dots are prompts, lines all prompts so far")


def _by_prompt(
    ax: Axes, paths: Mapping[str, tuple[list[float], list[float]]], styles: Mapping[str, Style]
) -> None:
    for name, (shares, so_far) in paths.items():
        at = range(1, len(shares) + 1)
        ax.scatter(at, shares, s=10, alpha=0.45, lw=0, **styles[name].point())
        ax.plot(at, so_far, lw=1.5, label=name, **{**styles[name].line(), "marker": ""})
    ax.locator_params(axis="x", integer=True)
    tidy(ax, xlabel="prompts finished", ylabel=DRAFTED_LABEL, ylim=(0, 1.02))


def _by_domain(
    ax: Axes,
    names: Sequence[str],
    domains: Mapping[str, Mapping[str, float]],
    styles: Mapping[str, Style],
) -> None:
    high = 0.8 / max(1, len(domains))
    for i, (row, shares) in enumerate(domains.items()):
        at = [names.index(name) + (i - (len(domains) - 1) / 2) * high for name in shares]
        ax.barh(at, list(shares.values()), 0.92 * high, **styles[row].bar())
    ax.set_yticks(range(len(names)), [name.replace("$", r"\$") for name in names])
    ax.set_ylim(len(names) - 0.5, -0.5)
    tidy(ax, xlabel=DRAFTED_LABEL, xlim=(0, 1.02), title="by category or data set")
