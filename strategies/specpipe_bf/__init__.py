"""SpecPipe with its node budget spent best first, an extension that is not in the paper.

Each step submits the most probable unsubmitted nodes of any level, where ``specpipe`` submits the
whole next level. Draft, width, children and pipeline are the same.
"""

from __future__ import annotations

from strategies.specpipe_bf.policy import PipelineBestFirst

__all__ = ["PipelineBestFirst"]
