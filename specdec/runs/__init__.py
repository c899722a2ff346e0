"""Runs and comparisons of strategies, with the decoding of other programs as baselines."""
