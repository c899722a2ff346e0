"""Workloads: prompts from files, from the user's own data, and from Python's standard library."""

from specdec.data.datasets import DATASETS, data_provenance, describe
from specdec.data.files import DATA_VARIABLE
from specdec.data.prompts import Prompt, check_data, fit_prompt, load_prompts

__all__ = [
    "DATASETS",
    "DATA_VARIABLE",
    "Prompt",
    "check_data",
    "data_provenance",
    "describe",
    "fit_prompt",
    "load_prompts",
]
