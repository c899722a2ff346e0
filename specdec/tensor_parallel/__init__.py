"""Tensor parallelism of any degree for transformers' decoder models (SwiftSpec section 4)."""

from typing import TYPE_CHECKING

from specdec.lazy import lazy_exports

if TYPE_CHECKING:
    from specdec.tensor_parallel.collective import Collective
    from specdec.tensor_parallel.cuts import HeadSplit
    from specdec.tensor_parallel.sharding import shard_modules

__getattr__, __dir__ = lazy_exports(__name__)
