"""A folder outside the repository with one class and one YAML for each kind of part.

The classes are those of docs/examples; their annotations use aliases that the example defines.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"

_IMPORT = "from specdec.parts.fields import "
_ALIASES = """\
from typing import Annotated

from pydantic import Field

from specdec.parts.fields import validated

Size = Annotated[int, Field(ge=1)]
Chance = Annotated[float, Field(gt=0, le=1)]
"""
_OWN_NAMES = {"PositiveShare": "Chance", "Share": "Chance", "Count": "Size"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """One outside part.

    Attributes:
        module: file of its class, without ending.
        group: of its YAML, which has the name ``option``.
        title: of its list in ``specdec list``.
        words: further overrides with which it runs.
        bad: an override that its annotations refuse.
        rows: strategies of a comparison with it; the second one is lossless unless ``lossy``.
    """

    module: str
    group: str
    option: str
    title: str
    words: tuple[str, ...] = ()
    bad: str
    rows: str = "strategies=[ar,speculative]"
    lossy: bool = False

    @property
    def overrides(self) -> list[str]:
        return [f"{self.group}={self.option}", *self.words]


OUTSIDE = {
    "source": Outside(
        module="echo", group="source", option="echo", title="sources", bad="source.trust=0.0"
    ),
    "policy": Outside(
        module="careful", group="policy", option="careful", title="policies", bad="policy.gamma=0"
    ),
    "verifier": Outside(
        module="topk",
        group="verifier",
        option="topk",
        title="verifiers",
        bad="verifier.k=0",
        lossy=True,
    ),
    "executor": Outside(
        module="replicas",
        group="executor",
        option="replicas",
        title="executors",
        bad="executor.replicas=0",
    ),
    "clock": Outside(
        module="roofline", group="clock", option="roofline", title="clocks", bad="clock.tflops=0.0"
    ),
    "scheduler": Outside(
        module="shortest",
        group="serving",
        option="shortest",
        title="servings",
        words=("batch_size=2",),
        bad="serving.patience=-1",
    ),
    "model pair": Outside(
        module="recurrent",
        group="model",
        option="recurrent",
        title="models",
        words=("source=prompt_lookup", "policy=prompt_lookup"),
        bad="model.width=0",
        rows="strategies=[ar,prompt_lookup]",
    ),
    "data reader": Outside(
        module="csv_prompts",
        group="data",
        option="csv",
        title="datasets",
        words=("model=tiny", "data.path=prompts.csv"),
        bad="data.column=''",
    ),
    "logger": Outside(
        module="csv_logger", group="logger", option="csv", title="loggers", bad="logger.metrics=[]"
    ),
}


def make_folder(folder: Path) -> Path:
    """Writes the classes and the configuration tree; returns the tree."""
    for part in OUTSIDE.values():
        text = (EXAMPLES / f"{part.module}.py").read_text(encoding="utf-8")
        before, found, after = text.partition(_IMPORT)
        if found:
            names, after = after.split("\n", 1)
            for name in names.replace(", validated", "").split(", "):
                after = after.replace(f": {name}", f": {_OWN_NAMES[name]}")
            text = before + after.replace("\n\nclass ", f"\n\n{_ALIASES}\n\nclass ", 1)
        assert "Annotated[" in text, "annotations use aliases"
        (folder / f"{part.module}.py").write_text(text, encoding="utf-8")
        yaml = Path("conf", part.group, f"{part.option}.yaml")
        (folder / yaml).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(EXAMPLES / yaml, folder / yaml)
    (folder / "prompts.csv").write_text(
        'prompt,topic\n"def add(first, second):\n    return",1\n"def f(n):",2\n"import os",3\n',
        encoding="utf-8",
    )
    return folder / "conf"
