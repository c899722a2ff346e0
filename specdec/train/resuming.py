"""Unfinished work: refuses to resume under changed settings."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from specdec.errors import UserError
from specdec.files import plain, write_json
from specdec.train.model import LanguageModel, weights_of
from specdec.train.parallel import rank_and_size


def weights_hash(model: LanguageModel) -> str:
    """First 16 hexadecimal digits of the SHA-256 of a model's weights, whatever their device."""
    digest = hashlib.sha256()
    for name, weight in sorted(weights_of(model).items()):
        digest.update(name.encode())
        digest.update(weight.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def keep_settings(path: Path, settings: Mapping[str, Any], products: Iterable[Path]) -> None:
    """Records the settings of new work, or compares them with those of existing work.

    Args:
        path: JSON file of settings beside the work.
        settings: plain values.
        products: files of the work; if none exists, the work is new.

    Raises:
        UserError: the work exists and its settings differ or were not recorded.
    """
    current = plain(dict(settings))
    if not any(product.exists() for product in products):
        if rank_and_size()[0] == 0:
            write_json(path, current)
        return
    remedy = f"give another work_dir, or delete {path.parent} to start over"
    if not path.exists():
        raise UserError(f"{path.parent} holds work without a record of its settings: {remedy}")
    recorded = json.loads(path.read_text())
    changed = [
        f"{key} was {recorded.get(key)}, is {current.get(key)}"
        for key in {**recorded, **current}
        if recorded.get(key) != current.get(key)
    ]
    if changed:
        raise UserError(
            f"{path.parent} holds work of other settings ({'; '.join(changed)}): {remedy}"
        )
