from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from experiments.tiny_family.model import LanguageModel, load_hf
from specdec.models.loading import usable_device
from specdec.parts.fields import Index, Text, validated
from specdec.train.progress import Report, silent

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@validated
@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """The keys that recipes share; NAME.yaml describes those that a recipe uses."""

    output_dir: Text
    seed: Index
    work_dir: Text = "."
    precision: Literal["bf16", "fp32"] = "fp32"
    compiled: bool = False
    num_threads: Index = 0
    device: Text = "cpu"
    report: Report = silent

    def __post_init__(self) -> None:
        _ = self.place  # refuses a device that torch does not have

    @property
    def work(self) -> Path:
        return Path(self.work_dir)

    @property
    def out(self) -> Path:
        return Path(self.output_dir)

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self.precision]

    @property
    def place(self) -> torch.device:
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return usable_device(self.device)

    def load(self, folder: Path) -> LanguageModel:
        model = load_hf(folder, compute_dtype=self.dtype, compiled=self.compiled)
        return model.to(self.place)
