"""Workloads: prompts from benchmarks, from files, and from Python's standard library."""

from specdec.data.files import DATA_VARIABLE
from specdec.data.prompt import DataReader, Prompt, fit_prompt, prompt_tokens
from specdec.data.prompts import check_data, load_prompts
from specdec.data.request import DataOptions, Request, data_provenance, section_provenance
from specdec.data.sets import DATASETS

__all__ = [
    "DATASETS",
    "DATA_VARIABLE",
    "DataOptions",
    "DataReader",
    "Prompt",
    "Request",
    "check_data",
    "data_provenance",
    "fit_prompt",
    "load_prompts",
    "prompt_tokens",
    "section_provenance",
]
