"""The origins of hits in simulated tables: recorded, synthetic or traced (``drafts.yaml``).

A record in a file is of a real pair, but not of the papers' sizes: its figures are what-ifs.

Calibrated ones run at both ends of the band of stage times (``bands.yaml``).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from experiments.reproduce.findings import Findings, weaker
from experiments.reproduce.items import SIZE, Item
from experiments.reproduce.lab import Lab, Outcome
from experiments.reproduce.stated import own_yaml
from specdec.errors import UserError

SIMULATED = "clock=simulated"
RECORDS = Path(__file__).parents[1] / "pipelines" / "records"


@dataclass(frozen=True, slots=True)
class Draft:
    """One origin of hits.

    Attributes:
        title, short: titles in tables and in pictures.
        overrides: overrides that choose model, prompts and length.
        profiles: latency profiles that stand in place of others, at one end of a band.
    """

    name: str
    title: str
    short: str
    overrides: tuple[str, ...]
    kind: str = "stand-in"
    profiles: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def swapped(self) -> dict[str, str]:
        """Profile -> the profile that replaces it at this end of the band, where they differ."""
        return {name: other for name, other in self.profiles.items() if name != other}

    def words(self, *overrides: str) -> list[str]:
        """Overrides of a simulated run with its hits, at its end of the band."""
        key = "clock.profile="
        swapped = {f"{key}{name}": f"{key}{other}" for name, other in self.swapped.items()}
        return [*self.overrides, SIMULATED, *(swapped.get(word, word) for word in overrides)]

    def add(
        self,
        findings: Findings,
        claim: str,
        value: float | bool | None,
        text: str = "",
        *,
        run: Outcome | None = None,
        interval: tuple[float | None, float | None] = (None, None),
        kind: str = "calibrated",
    ) -> None:
        """Adds a simulated figure with its hits; the loop share is that of ``run``.

        Args:
            kind: the strongest kind that the figure may have.
        """
        where = f"{self.title}; {text}" if text else self.title
        loops = run.summary["loop_share"] if run else None
        simulated = (claim, value, "simulated", where)
        findings.add(*simulated, kind=weaker(self.kind, kind), loops=loops, interval=interval)


def known_bands() -> Mapping[str, Mapping[str, str]]:
    bands: Mapping[str, Mapping[str, str]] = own_yaml("bands.yaml")
    return bands


def known_drafts() -> Mapping[str, Mapping[str, Any]]:
    known: Mapping[str, Mapping[str, Any]] = own_yaml("drafts.yaml")
    return known


def drafts(names: Sequence[str], item: Item, lab: Lab, findings: Findings) -> Iterator[Draft]:
    """The drafts of these names, then the user's own record if there is one.

    A fitted one comes once for each end of the band if the item runs on a profile that has one; it
    is calibrated if the item's ``fixed.counts`` names it, else a what-if.
    An unavailable draft is added to ``findings.missing``.
    """
    banded = _on_a_band(item)
    for name in names:
        try:
            draft = make_draft(name, item, lab)
        except UserError as error:
            findings.missing.append(f"{known_drafts()[name]['title']}: {error}")
            continue
        yield from _ends(draft) if banded and known_drafts()[name].get("calibrated") else [draft]
    if lab.own_record is not None:
        overrides = ("model=replay", f"model.record={lab.own_record}", *size_overrides(item, lab))
        title = f"own record {lab.own_record.name}, replayed"
        yield Draft(name="own", title=title, short="own record", overrides=overrides)


def _on_a_band(item: Item) -> bool:
    """Whether a row of the item is on a profile with a band; its name may end in a number."""
    text = str(item.config)
    return any(
        f"clock.profile={name}'" in text or f"clock.profile={name.rpartition('_')[0]}_{{" in text
        for band in known_bands().values()
        for name in band
    )


def _ends(draft: Draft) -> list[Draft]:
    ends = {_at_end(draft.title, label): profiles for label, profiles in known_bands().items()}
    return [
        replace(draft, title=title, short=short_title(title), profiles=profiles)
        for title, profiles in ends.items()
    ]


def short_title(title: str) -> str:
    """A draft's title in pictures, of its title in tables."""
    shorts = {spec["title"]: spec["short"] for spec in known_drafts().values()}
    at_ends = {
        _at_end(known, label): f"{short}, {label.split()[1]}"
        for known, short in shorts.items()
        for label in known_bands()
    }
    return (shorts | at_ends).get(title, "own record")


def _at_end(title: str, label: str) -> str:
    return f"{title}; {label}"


def make_draft(name: str, item: Item, lab: Lab) -> Draft:
    """One draft at the item's size; real models are recorded at the first call.

    Raises:
        UserError: its data are missing.
    """
    spec = known_drafts()[name]
    size = size_overrides(item, lab)
    if "record" in spec:
        path = lab.record([*spec["record"], *_record_size(item, lab)])
        overrides: tuple[str, ...] = ("model=replay", f"model.record={path}", *size)
    elif "file" in spec:
        overrides = ("model=replay", f"model.record={RECORDS / spec['file']}.npz", *size)
    elif "trace" in spec:
        file, method = spec["trace"]
        path = _data_folder() / "acceptance_traces" / file
        overrides = ("model=replay", f"model.record={path}", f"model.method={method}", *size)
    else:
        overrides = (*spec["words"], *size)
    fitted = "calibrated" if name in item.fixed.get("counts", ()) else "what-if"
    kind = fitted if spec.get("calibrated") else "what-if" if "file" in spec else "stand-in"
    return Draft(name, spec["title"], spec["short"], overrides, kind)


def size_overrides(item: Item, lab: Lab) -> tuple[str, str]:
    prompts, tokens = item.size["quick" if lab.quick else "full"]
    return f"data.limit={prompts}", f"max_new_tokens={tokens}"


def _record_size(item: Item, lab: Lab) -> tuple[str, str]:
    """As ``size_overrides``, but at least the default size, so that most items share a record."""
    kind = "quick" if lab.quick else "full"
    prompts, tokens = map(max, zip(item.size[kind], SIZE[kind], strict=True))
    return f"data.limit={prompts}", f"max_new_tokens={tokens}"


def _data_folder() -> Path:
    folder = os.environ.get("SPECDEC_DATA")
    if not folder:
        raise UserError("SPECDEC_DATA is not set: it names the folder of the data sets")
    return Path(folder)
