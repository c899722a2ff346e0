"""Runs and comparisons, with transformers' own decoding as baselines."""

from specdec.runs.hf_generate import HF_KINDS, HFBaseline, HFOptions

__all__ = ["HF_KINDS", "HFBaseline", "HFOptions"]
