from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn

from specdec.errors import UserError
from specdec.parts.build import check_values
from specdec.parts.fields import signature_of
from specdec.train import card, draft, eagle, exits, recipes, unlikelihood
from specdec.train.sections import build
from specdec.train.session import Recipe, Session, start

RECIPES: dict[str, Recipe] = {
    "tokenizer": recipes.make_tokenizer,
    "target": recipes.train_target,
    "finish": unlikelihood.finish_target,
    "draft": draft.train_draft,
    "ngram": draft.sample_ngram,
    "exit_head": exits.train_exit_heads,
    "bundled_heads": exits.train_exit_heads,
    "medusa_heads": exits.train_exit_heads,
    "eagle3_head": eagle.train_eagle3,
    "card": card.make_card,
}


def run(what: str, cfg: dict[str, Any]) -> int:
    if what not in RECIPES:
        raise UserError(f"unknown recipe {what!r}; known: {', '.join(RECIPES)}")
    recipe, names = RECIPES[what], signature_of(Session).plain
    shared = {key: value for key, value in cfg.items() if key in names}
    own = {key: value for key, value in cfg.items() if key not in names}
    check_values(recipe, own, also=names)
    columns = *Progress.get_default_columns()[:3], TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=1.0)

        def report(progress: float, line: str) -> None:
            bar.update(task, completed=progress)
            bar.console.print(line, markup=False, highlight=False)

        start(recipe, build(Session, shared, report=report), own)
    return 0
