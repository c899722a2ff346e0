"""Records from the Hugging Face hub, through the library ``datasets``."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from specdec.data.readers import Record
from specdec.data.sets import Hub
from specdec.errors import UserError


def require_datasets(name: str) -> None:
    """Checks that the library is installed, without importing it.

    Raises:
        UserError: it is not.
    """
    if importlib.util.find_spec("datasets") is None:
        raise UserError(
            f"data={name} data.origin=hub needs the library `datasets`: pip install"
            " 'specdec-lab[hub]', or put the files into the folder that SPECDEC_DATA names"
        )


def hub_records(name: str, hub: Hub) -> Iterator[Record]:
    """Records of a set's copy on the hub, downloaded once and cached by ``datasets``.

    Raises:
        UserError: the library is missing, or the set cannot be fetched.
    """
    require_datasets(name)
    from datasets import load_dataset

    try:
        rows = load_dataset(hub.repo, hub.config, split=hub.split)
    except Exception as error:  # network, renamed set, missing split: depends on the hub
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"data={name}: {hub.repo} (split {hub.split}) cannot be loaded from the hub ({reason});"
            " check the network, or put the files into the folder that SPECDEC_DATA names"
        ) from error
    for index, fields in enumerate(rows):
        yield Record(index, f"{hub.repo} row {index}", dict(fields))
