"""Makes Triton, flash-attn and torchao impossible to import, as if they were not installed.

``python -m tests.kernels.blocked`` imports every module of the library and decodes a few tokens;
``python -m tests.kernels.blocked PYTEST_ARGUMENT...`` runs tests without these packages.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

PACKAGES = ("triton", "flash_attn", "torchao")
OTHERS = "specdec.rivals.workers."
KERNEL_FILES = (
    "specdec.attention.triton_kernel",
    "specdec.kernels.swiglu",
)
"""Imported only after ``support.triton_problem`` found no problem."""


class Blocker:
    """A meta-path finder that reports the packages as missing."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] in PACKAGES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


def block() -> None:
    """Blocks the packages in this process, for imports and for ``find_spec``."""
    loaded = [name for name in sys.modules if name.partition(".")[0] in PACKAGES]
    assert not loaded, f"imported before they were blocked: {loaded}"
    sys.meta_path.insert(0, Blocker())
    original = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name.partition(".")[0] in PACKAGES else original(name, package)

    importlib.util.find_spec = find_spec


def import_everything() -> list[str]:
    """Imports every module of the library except ``KERNEL_FILES``; returns their names.

    The programs in ``OTHERS`` are run by other interpreters, which have other packages.
    """
    import specdec

    names = [info.name for info in pkgutil.walk_packages(specdec.__path__, "specdec.")]
    names = [n for n in names if n not in KERNEL_FILES and not n.endswith("__main__")]
    names = [n for n in names if not n.startswith(OTHERS)]
    for name in names:
        importlib.import_module(name)
    return names


def decode() -> list[int]:
    """Decodes a few tokens of a random pair with the default attention and kernels."""
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
    output: list[int] = []
    runner.run([TokenPrompt(0, np.array([3, 4, 5]))], lambda result: output.extend(result.output))
    runner.close()
    return output


def main(words: Sequence[str]) -> int:
    """Imports everything and decodes, or runs the given tests."""
    block()
    if words:
        import pytest

        return int(pytest.main(list(words)))
    print(len(import_everything()), "modules;", len(decode()), "tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
