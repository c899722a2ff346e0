"""Tensor parallelism of any degree for transformers' decoder models (SwiftSpec section 4)."""
