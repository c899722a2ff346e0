"""Hugging Face models, whole or in slices of layers, run over this library's caches."""
