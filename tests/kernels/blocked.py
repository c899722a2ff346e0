"""Makes Triton, flash-attn and torchao impossible to import, as where they are not installed.

With this folder's parent packages importable: ``python -m tests.kernels.blocked`` imports every
module of the library and decodes a few tokens; ``... blocked PYTEST_ARGUMENT...`` runs tests so.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

PACKAGES = ("triton", "flash_attn", "torchao")
KERNEL_FILES = tuple(f"specdec.kernels.{name}" for name in ("modules", "swiglu", "tree_attention"))
"""Imported only where ``support.triton_problem`` has said that they can be."""


class Blocker:
    """A finder that comes first and finds that the packages are not there."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] in PACKAGES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


def block() -> None:
    """Blocks the packages in this process, also for ``find_spec``, which asks the finders too."""
    loaded = [name for name in sys.modules if name.partition(".")[0] in PACKAGES]
    assert not loaded, f"imported before they were blocked: {loaded}"
    sys.meta_path.insert(0, Blocker())
    original = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name.partition(".")[0] in PACKAGES else original(name, package)

    importlib.util.find_spec = find_spec


def import_everything() -> list[str]:
    """Every module of the library but the kernels' own files; their names."""
    import specdec

    names = [info.name for info in pkgutil.walk_packages(specdec.__path__, "specdec.")]
    names = [n for n in names if n not in KERNEL_FILES and not n.endswith("__main__")]
    for name in names:
        importlib.import_module(name)
    return names


def decode() -> list[int]:
    """A few tokens of a random pair by the default attention, kernels and buffers."""
    import numpy as np

    from specdec.config.hydra import compose_config
    from specdec.pairs import build_pair
    from specdec.runs.runners import PartsRunner, TokenPrompt
    from specdec.state import StopRules

    words = ["model=random", "strategy=best_first", "model.graphs=replay", "executor=local"]
    config = compose_config(words).values
    runner = PartsRunner(
        cfg=config, pair=build_pair(config["model"]), stop=StopRules(max_new_tokens=4)
    )
    found: list[int] = []
    runner.run([TokenPrompt(0, np.array([3, 4, 5]))], lambda result: found.extend(result.output))
    runner.close()
    return found


def main(words: Sequence[str]) -> int:
    """Everything imported and a few tokens, or the tests that are named."""
    block()
    if words:
        import pytest

        return int(pytest.main(list(words)))
    print(len(import_everything()), "modules;", len(decode()), "tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
