"""Weights, tokenizers and samples of the bundled family; see tiny/README.md."""
