"""An executor outside the library: one device, and a line for every batch that has work."""

from __future__ import annotations

import sys

from specdec.executors.local import LocalExecutor
from specdec.types import Batch


class Logged(LocalExecutor):
    """Prints how many tree nodes and prompt tokens each target pass has."""

    def submit(self, batch: Batch) -> None:
        """Called once per step; an empty batch makes no pass."""
        if batch.num_tokens:
            nodes, prompt = batch.num_nodes, batch.num_tokens - batch.num_nodes
            run = "warm-up, " if batch.warm_up else ""
            print(f"{run}step {batch.step}: {nodes} nodes, {prompt} prompt tokens", file=sys.stderr)
        super().submit(batch)
