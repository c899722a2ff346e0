"""Unfinished work is gone on with only by the settings that it was begun with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specdec.errors import UserError
from specdec.files import plain, write_json
from specdec.train.parallel import rank_and_size


def weights_hash(model: nn.Module) -> str:
    """Of a model's weights, wherever they lie."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode())
        raw = value.detach().cpu().contiguous().flatten().view(torch.uint8)
        digest.update(memoryview(raw.numpy()))
    return digest.hexdigest()[:16]


def keep_settings(path: Path, settings: Mapping[str, Any], products: Iterable[Path]) -> None:
    """Writes down what work is begun with; work that is there must have been begun with the same.

    Args:
        path: a JSON file beside the work.
        settings: plain values.
        products: files that say that the work was begun.

    Raises:
        UserError: what is there was begun with other settings, or nobody wrote down which.
    """
    now = plain(dict(settings))
    if not any(product.exists() for product in products):
        if rank_and_size()[0] == 0:
            write_json(path, now)
        return
    remedy = f"give another work_dir, or delete {path.parent} to begin anew"
    if not path.exists():
        raise UserError(f"{path.parent} holds work whose settings are not written down: {remedy}")
    before = json.loads(path.read_text())
    changed = [
        f"{key} was {before.get(key)}, is {now.get(key)}"
        for key in {**before, **now}
        if before.get(key) != now.get(key)
    ]
    if changed:
        raise UserError(
            f"{path.parent} holds work begun with other settings ({'; '.join(changed)}): {remedy}"
        )
