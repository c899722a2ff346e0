"""Makes the bundled tiny family: ``python -m experiments.tiny_family RECIPE [key=value] ...``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from experiments.tiny_family import card, recipes, samples, unlikelihood
from experiments.tiny_family.session import Session
from specdec.config.hydra import parse
from specdec.config.options import has_key
from specdec.errors import UserError
from specdec.files import flatten
from specdec.parts.build import check_values
from specdec.parts.fields import did_you_mean, signature_of
from specdec.train.progress import progress_bar

RECIPES: dict[str, Callable[..., None]] = {
    "tokenizer": recipes.make_tokenizer,
    "target": recipes.train_target,
    "finish": unlikelihood.finish_target,
    "prompts": samples.write_prompts,
    "ngram": samples.sample_ngram,
    "card": card.make_card,
}
"""Recipes in their order; between prompts and ngram, `specdec train` makes the draft and heads."""

_MAPS = ("packages", "weights", "prompts")
"""Keys whose values map names to amounts; one that is given replaces the default's."""


def main(words: Sequence[str]) -> None:
    what, *overrides = words or ("",)
    if what not in RECIPES:
        raise UserError(f"recipe {what!r}: {did_you_mean(what, RECIPES)}")
    config = OmegaConf.load(Path(__file__).with_name(f"{what}.yaml"))
    keys = OmegaConf.to_container(config)
    for override in parse(overrides):
        key = str(override.key_or_group)
        if not has_key(keys, key):
            raise UserError(f"{what} has no key {key}: {did_you_mean(key, flatten(keys))}")
        OmegaConf.update(config, key, override.value(), merge=key not in _MAPS)
    values: Any = OmegaConf.to_container(config, resolve=True)
    names = signature_of(Session).plain
    own = {key: value for key, value in values.items() if key not in names}
    shared = {key: value for key, value in values.items() if key in names}
    check_values(RECIPES[what], own, also=names)
    check_values(Session, shared)
    if values.get("num_threads"):
        torch.set_num_threads(values["num_threads"])
    with progress_bar(what) as report:
        RECIPES[what](Session(**shared, report=report), **own)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"tiny_family: {error}")
