"""Runs and comparisons, with transformers' own decoding as baselines."""
