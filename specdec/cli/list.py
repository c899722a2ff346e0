from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from specdec.cli.arguments import Arguments
from specdec.config.options import (
    GROUPS,
    PARTS,
    chosen_parts,
    first_comment,
    flatten,
    options,
    own_values,
    stated,
)
from specdec.errors import UserError
from specdec.parts.fields import did_you_mean

HELP = """\
specdec list [--config-dir DIR] [WHAT]

Lists the available options, one line each: strategies (with what each needs and costs), sources,
policies, verifiers, executors, models, datasets, samplings, servings, clocks, profiles, loggers.
Without WHAT all. The name of a group, as in policy=NAME, does too.
"""

_PLURALS = {"strategy": "strategies", "policy": "policies", "data": "datasets"}
SECTIONS = {
    _PLURALS.get(group, f"{group}s"): group for group in (*GROUPS[:-1], "profile", GROUPS[-1])
}
"""Section of the listing -> folder of its options in a configuration tree."""

_USES = {
    "strategy": "strategy=NAME, or 'strategies=[NAME,...]' with compare",
    "profile": "clock.profile=NAME with clock=simulated or clock=paced",
}


def main(arguments: Arguments) -> int:
    titles = {group: title for title, group in SECTIONS.items()}  # so `specdec list policy` too
    chosen = [titles.get(word, word) for word in arguments.overrides]
    for word in chosen:
        if word not in SECTIONS:
            raise UserError(f"specdec list {word}: {did_you_mean(word, SECTIONS)}")
    for title in chosen or SECTIONS:
        group = SECTIONS[title]
        print(f"{title}  ({_USES.get(group, f'{group}=NAME')})")
        paths = options(group, arguments.config_dirs)
        width = max(map(len, paths), default=0)
        for name, path in paths.items():
            about = _about(group, path)
            if group == "strategy":
                about += _needs_and_costs(path, arguments.config_dirs)
            print(f"  {name:<{width}}  {about}".rstrip())
        print()
    return 0


def _about(group: str, path: Path) -> str:
    """Describes an option by its title or first comment; parts also by their keys and defaults."""
    values = own_values(path)
    if group == "strategy":
        return str(values.get("strategy", {}).get("title", ""))
    keys = [
        f"{key}={json.dumps(value) if value is None or value in (True, False) else value}"
        for key, value in flatten(values).items()
        if group in PARTS and "_target_" not in key and key != "sources"
    ]
    return first_comment(path) + (f" [{' '.join(keys)}]" if keys else "")


def _needs_and_costs(path: Path, trees: Sequence[Path]) -> str:
    """Joins the comments "# Needs:" and "# Costs:" of a preset and of the parts that it chooses."""
    needs, costs = [stated(path, "Needs")], [stated(path, "Costs")]
    for group, option in chosen_parts(path).items():
        part = options(group, trees).get(option) if group in PARTS else None
        if part is not None:
            needs.append(stated(part, "Needs"))
            costs.append(stated(part, "Costs"))
    facts = {"needs": ", ".join(filter(None, needs)), "costs": ", ".join(filter(None, costs))}
    return "".join(f"; {word} {text}" for word, text in facts.items() if text)
