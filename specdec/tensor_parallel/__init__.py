"""Tensor parallelism of any degree for transformers' decoder models (SwiftSpec section 4)."""

from specdec.tensor_parallel.collective import Collective
from specdec.tensor_parallel.cuts import HeadSplit
from specdec.tensor_parallel.sharding import shard_modules, shared_copy

__all__ = ["Collective", "HeadSplit", "shard_modules", "shared_copy"]
