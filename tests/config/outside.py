"""A folder outside the repository with one class and one YAML for each kind of part.

The classes are those of docs/examples.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """One outside part.

    Attributes:
        module: file of its class, without ending.
        group: of its YAML, which has the name ``option``.
        words: further overrides with which it runs.
        bad: an override that its annotations refuse.
        rows: strategies of a comparison with it; the second one is lossless unless ``lossy``.
    """

    module: str
    group: str
    option: str
    words: tuple[str, ...] = ()
    bad: str
    rows: str = "strategies=[ar,speculative]"
    lossy: bool = False

    @property
    def overrides(self) -> list[str]:
        return [f"{self.group}={self.option}", *self.words]


OUTSIDE = {
    "source": Outside(module="echo", group="source", option="echo", bad="source.trust=0.0"),
    "policy": Outside(module="careful", group="policy", option="careful", bad="policy.gamma=0"),
    "verifier": Outside(
        module="topk",
        group="verifier",
        option="topk",
        bad="verifier.k=0",
        lossy=True,
    ),
    "executor": Outside(
        module="replicas",
        group="executor",
        option="replicas",
        bad="executor.replicas=0",
    ),
    "clock": Outside(module="roofline", group="clock", option="roofline", bad="clock.tflops=0.0"),
    "scheduler": Outside(
        module="shortest",
        group="serving",
        option="shortest",
        words=("batch_size=2",),
        bad="serving.patience=-1",
    ),
    "model pair": Outside(
        module="recurrent",
        group="model",
        option="recurrent",
        words=("source=prompt_lookup", "policy=prompt_lookup"),
        bad="model.width=0",
        rows="strategies=[ar,prompt_lookup]",
    ),
    "data reader": Outside(
        module="csv_prompts",
        group="data",
        option="csv",
        words=("model=tiny", "data.path=prompts.csv"),
        bad="data.column=''",
    ),
    "logger": Outside(module="csv_logger", group="logger", option="csv", bad="logger.metrics=[]"),
}


def make_folder(folder: Path) -> Path:
    """Writes the classes and the configuration tree; returns the tree."""
    for part in OUTSIDE.values():
        shutil.copy(EXAMPLES / f"{part.module}.py", folder)
        yaml = Path("conf", part.group, f"{part.option}.yaml")
        (folder / yaml).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(EXAMPLES / yaml, folder / yaml)
    (folder / "prompts.csv").write_text(
        'prompt,topic\n"def add(first, second):\n    return",1\n"def f(n):",2\n"import os",3\n',
        encoding="utf-8",
    )
    return folder / "conf"
