"""Sampling: keyed draws, the transform from logits to distributions, draft candidates."""
