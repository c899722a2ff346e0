"""Drafters beyond a small model: features that arrive late, sources by executor, tokenizers."""
