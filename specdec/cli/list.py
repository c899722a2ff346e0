"""``specdec list``: the options of every group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from omegaconf import OmegaConf

from specdec.cli.arguments import read_arguments
from specdec.config.options import PARTS, first_comment, flatten, options, own_values
from specdec.errors import UserError
from specdec.parts.suggest import did_you_mean

HELP = """\
specdec list [--config-dir DIR] [WHAT]

Lists the available options, one line each: strategies, sources, policies, verifiers,
executors, models, datasets, samplings, servings, clocks, profiles, loggers. Without WHAT all.
"""

Row = tuple[str, str]


def main(words: Sequence[str]) -> int:
    """Runs the command; returns the exit status."""
    arguments = read_arguments(words, flags=())
    for word in arguments.overrides:
        if word not in SECTIONS:
            raise UserError(f"specdec list {word}: {did_you_mean(word, SECTIONS)}")
    for title in arguments.overrides or SECTIONS:
        how, rows = SECTIONS[title](arguments.config_dirs)
        print(f"{title}  ({how})")
        width = max((len(name) for name, _ in rows), default=0)
        for name, about in rows:
            print(f"  {name:<{width}}  {about}".rstrip())
        print()
    return 0


def _presets(extra: Sequence[Path]) -> tuple[str, list[Row]]:
    presets = options("strategy", extra).items()
    rows = [(n, str(own_values(p).get("strategy", {}).get("title", ""))) for n, p in presets]
    return "strategy=NAME, or 'strategies=[NAME,...]' with compare", rows


def _group(group: str) -> Callable[[Sequence[Path]], tuple[str, list[Row]]]:
    def rows(extra: Sequence[Path]) -> tuple[str, list[Row]]:
        paths = options(group, extra).items()
        return f"{group}=NAME", [(n, first_comment(p) + _keys(group, p)) for n, p in paths]

    return rows


def _keys(group: str, path: Path) -> str:
    """A part's keys with their values."""
    if group not in PARTS:
        return ""
    flat = flatten(OmegaConf.to_container(OmegaConf.create(own_values(path))))
    shown = [f"{k}={'null' if v is None else v}" for k, v in flat.items() if "_target_" not in k]
    shown = [word for word in shown if not word.startswith("sources=")]
    return (
        f" [{' '.join(shown)}]".replace("True", "true").replace("False", "false") if shown else ""
    )


def _profiles(extra: Sequence[Path]) -> tuple[str, list[Row]]:
    rows = [(n, first_comment(p)) for n, p in options("profile", extra).items()]
    return "clock.profile=NAME with clock=simulated or clock=paced", rows


SECTIONS: dict[str, Callable[[Sequence[Path]], tuple[str, list[Row]]]] = {
    "strategies": _presets,
    "sources": _group("source"),
    "policies": _group("policy"),
    "verifiers": _group("verifier"),
    "executors": _group("executor"),
    "models": _group("model"),
    "datasets": _group("data"),
    "samplings": _group("sampling"),
    "servings": _group("serving"),
    "clocks": _group("clock"),
    "profiles": _profiles,
    "loggers": _group("logger"),
}
"""Title -> (further trees) -> (how an option is chosen, (name, description) of each)."""
