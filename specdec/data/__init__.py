"""Workloads: prompts from benchmarks, from files, and from Python's standard library."""

from typing import TYPE_CHECKING

from specdec.lazy import lazy_exports

if TYPE_CHECKING:
    from specdec.data.files import DATA_VARIABLE
    from specdec.data.prompt import DataReader, Prompt, fit_prompt, prompt_tokens
    from specdec.data.prompts import check_data, load_prompts
    from specdec.data.request import Request, data_provenance
    from specdec.data.sets import DATASETS

__getattr__, __dir__ = lazy_exports(__name__)
