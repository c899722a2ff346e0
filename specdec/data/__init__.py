"""Workloads: prompts from files, from the user's own data, and from Python's standard library."""

from specdec.data.datasets import DATASETS, data_provenance, describe
from specdec.data.files import DATA_VARIABLE
from specdec.data.fitting import fit_prompt, prompt_tokens
from specdec.data.prompts import Prompt, check_data, load_prompts, load_requested
from specdec.data.request import Request

__all__ = [
    "DATASETS",
    "DATA_VARIABLE",
    "Prompt",
    "Request",
    "check_data",
    "data_provenance",
    "describe",
    "fit_prompt",
    "load_prompts",
    "load_requested",
    "prompt_tokens",
]
