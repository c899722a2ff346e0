"""Baselines of other libraries, run and counted under our conditions."""

from specdec.runs.hf_generate import HF_KINDS, HFBaseline, HFOptions, run_hf, weight_bytes

__all__ = ["HF_KINDS", "HFBaseline", "HFOptions", "run_hf", "weight_bytes"]
