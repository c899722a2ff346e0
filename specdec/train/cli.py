"""Entry point of the training recipes: `run(what, cfg)`, one name and a plain configuration."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from specdec.train import card, draft, exit_recipe, recipes, unlikelihood

RECIPES: dict[str, Callable[..., None]] = {
    "tokenizer": recipes.make_tokenizer,
    "target": recipes.train_target,
    "finish": unlikelihood.finish_target,
    "draft": draft.train_draft,
    "ngram": draft.sample_ngram,
    "exit_head": exit_recipe.train_exit_heads,
    "bundled_heads": exit_recipe.train_exit_heads,
    "medusa_heads": exit_recipe.train_exit_heads,
    "card": card.make_card,
}


def check_keys(recipe: Callable[..., None], cfg: dict[str, Any]) -> None:
    """Compares a configuration's keys with a recipe's arguments.

    Raises:
        ValueError: a key is unknown (with the nearest known one) or missing.
    """
    known = [name for name in inspect.signature(recipe).parameters if name != "report"]
    for key in cfg:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
            raise ValueError(f"unknown key {key!r}{hint}")
    missing = [name for name in known if name not in cfg]
    if missing:
        raise ValueError(f"missing keys: {', '.join(missing)}")


def run(what: str, cfg: dict[str, Any]) -> int:
    """Runs one recipe under a progress bar.

    Args:
        what: a key of ``RECIPES``.
        cfg: exactly the recipe's arguments, as in conf/train/<what>.yaml.

    Returns:
        0 when done, 1 when a file the recipe needs is missing (its name is printed).

    Raises:
        ValueError: an unknown recipe, or keys that are unknown, missing or out of range.
    """
    if what not in RECIPES:
        raise ValueError(f"unknown recipe {what!r}; known: {', '.join(RECIPES)}")
    recipe = RECIPES[what]
    check_keys(recipe, cfg)
    console = Console(stderr=True)
    columns = (
        TextColumn(what),
        BarColumn(),
        TextColumn("{task.percentage:.0f}%"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(what, total=1.0)

        def report(share: float, line: str) -> None:
            progress.update(task, completed=share)
            progress.console.print(line, markup=False, highlight=False)

        try:
            recipe(**cfg, report=report)
        except FileNotFoundError as error:
            console.print(str(error), markup=False)
            return 1
    return 0
