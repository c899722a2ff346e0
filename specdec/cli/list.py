import json
import sys
from pathlib import Path
from shutil import get_terminal_size
from textwrap import fill

from specdec.cli.arguments import Arguments
from specdec.config.options import (
    GROUPS,
    PARTS,
    Trees,
    chosen_parts,
    first_comment,
    options,
    own_values,
    stated,
)
from specdec.errors import UserError
from specdec.files import flatten
from specdec.parts.fields import did_you_mean

HELP = """\
specdec list [--config-dir DIR] [WHAT]

Lists the available options, one line each: strategies (with what each needs and costs), sources,
policies, verifiers, executors, models, datasets, samplings, servings, clocks, profiles, loggers.
Without WHAT all. The name of a group, as in policy=NAME, does too.
"""

_TITLES = {group: f"{group}s" for group in (*GROUPS[:-1], "profile", GROUPS[-1])}
_TITLES |= {"strategy": "strategies", "policy": "policies", "data": "datasets"}
"""Folder of options in a configuration tree -> section of the listing."""

_USES = {
    "strategy": "strategy=NAME, or 'strategies=[NAME,...]' with compare",
    "profile": "clock.profile=NAME with clock=simulated or clock=paced",
}


def main(arguments: Arguments) -> int:
    groups = {title: group for group, title in _TITLES.items()}
    for word in arguments.overrides:
        if word not in (*groups, *_TITLES):
            raise UserError(f"specdec list {word}: {did_you_mean(word, groups)}")
    for group in [groups.get(word, word) for word in arguments.overrides] or _TITLES:
        print(f"{_TITLES[group]}  ({_USES.get(group, f'{group}=NAME')})")
        paths = options(group, arguments.config_dirs)
        width = max(map(len, paths), default=0)
        columns = get_terminal_size().columns if sys.stdout.isatty() else 10_000
        for name, path in paths.items():
            line = f"  {name:<{width}}  {_about(group, path, arguments.config_dirs)}".rstrip()
            indent = " " * (width + 4)
            print(fill(line, max(columns, 72), subsequent_indent=indent, break_on_hyphens=False))
        print()
    return 0


def _about(group: str, path: Path, trees: Trees) -> str:
    """Describes an option by its title or first comment. For a part its own keys and defaults
    follow, for a preset the comments "# Needs:" and "# Costs:" of its file and its parts' files.
    """
    values = own_values(path)
    if group != "strategy":
        keys = [
            f"{key}={value if isinstance(value, str) else json.dumps(value)}"
            for key, value in flatten(values).items()
            if group in PARTS and "_target_" not in f"{key} {value}"
        ]
        return first_comment(path) + (f" [{' '.join(keys)}]" if keys else "")
    chosen = {g: option for g, option in chosen_parts(path).items() if g in PARTS}
    files = [path, *(options(g, trees).get(option) for g, option in chosen.items())]
    about = str(values.get("strategy", {}).get("title", ""))
    for word in ("Needs", "Costs"):
        texts = ", ".join(filter(None, (stated(file, word) for file in files if file)))
        about += f"; {word.lower()} {texts}" if texts else ""
    return about
