"""SpecPipe with its node budget spent best first, an extension that is not in the paper."""

from __future__ import annotations

from strategies.specpipe_bf.policy import PipelineBestFirst

__all__ = ["PipelineBestFirst"]
