from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.data import Request, fit_prompt, load_prompts
from specdec.data.files import read_json
from specdec.errors import UserError
from specdec.files import why_unreadable

_KNOWN_TO_FIT = (
    "stdlib",
)  # data sets with prompts of bounded length, not read here to save a second


def check_prompts(config: Mapping[str, Any], model_folder: Path, max_positions: int) -> int | None:
    """Checks the prompts' lengths in tokens, so that errors come before models are loaded.

    Checks nothing for a model without ``tokenizer.json``, with a chat template that is used
    (applying it needs transformers), or for prompts from the hub: the run checks all lengths again.
    Returns the tokens of the longest prompt, or None if nothing was checked.
    """
    data, file = config["data"], model_folder / "tokenizer.json"
    if data["name"] in _KNOWN_TO_FIT or data["origin"] == "hub" or not file.is_file():
        return None
    if data["chat"] == "always" or (data["chat"] == "auto" and _has_chat_template(model_folder)):
        return None
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises no other class
        raise UserError(
            f"{file} is not a tokenizer ({why_unreadable(error)}); copy the file again"
        ) from error
    room = max_positions - int(config["max_new_tokens"])
    bound = data["max_prompt_tokens"]
    longest = 0
    for prompt in load_prompts(Request.of(**data)):
        tokens = tokenizer.encode(prompt.text).ids
        if not tokens:
            raise UserError(
                f"prompt {prompt.id} of data={data['name']} is empty: remove it, or give it text"
            )
        fitted, _ = fit_prompt(
            tokens,
            max_len=room if bound is None else min(room, bound),
            truncation=data["truncation"],
            label=f"prompt {prompt.id} of data={data['name']}",
        )
        longest = max(longest, len(fitted))
    return longest


def _has_chat_template(model_folder: Path) -> bool:
    file = model_folder / "tokenizer_config.json"
    config = read_json(file) if file.is_file() else {}
    if not isinstance(config, dict):
        raise UserError(f"{file} is not a JSON object; copy the file again")
    return (model_folder / "chat_template.jinja").is_file() or bool(config.get("chat_template"))
