"""SpecPipe's node budget spent best first: ours, beyond the paper.

Each step feeds the most probable unsubmitted nodes of any level, where ``specpipe`` feeds the next
level whole. Same draft, width, children and pipeline.
"""

from __future__ import annotations

from strategies.specpipe_bf.policy import PipelineBestFirst

__all__ = ["PipelineBestFirst"]
