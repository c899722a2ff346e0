"""Prompts against the model's positions, before torch is imported."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.data import fit_prompt, load_prompts
from specdec.errors import UserError

_KNOWN_TO_FIT = ("stdlib",)  # made from source files to a bounded length, which takes a second


def check_prompts(config: Mapping[str, Any], model_folder: Path, max_positions: int) -> None:
    """Tokenises the prompts and refuses what the run would refuse minutes later.

    Nothing is checked for a model without ``tokenizer.json``; the run checks again in any case.

    Raises:
        UserError: an empty prompt, or one too long where ``data.truncation`` is error.
    """
    data, file = config["data"], model_folder / "tokenizer.json"
    if data["name"] in _KNOWN_TO_FIT or not file.is_file():
        return
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    prompts = load_prompts(
        name=data["name"], limit=data["limit"], path=data["path"], field=data["field"]
    )
    room = max_positions - int(config["max_new_tokens"])
    bound = data.get("max_prompt_tokens")
    for prompt in prompts:
        tokens = tokenizer.encode(prompt.text).ids
        if not tokens:
            raise UserError(
                f"prompt {prompt.id} of data={data['name']} is empty: remove it, or give it text"
            )
        fit_prompt(
            tokens,
            max_len=room if bound is None else min(room, bound),
            truncation=data.get("truncation", "left"),
            label=f"prompt {prompt.id} of data={data['name']}",
        )
