"""The cache as blocks: what a request may come to need, and whether there is room for it.

Each stage of the target has a pool of equal blocks (``kv_storage.BlockPool``). Every stage holds
the same prefixes, and the first one the most tree nodes, so one account serves for all stages. A
request is admitted once its longest prefix and its largest tree are free, and keeps that claim to
its end: no stage can run out, and nothing admitted is ever put back.
"""

from __future__ import annotations

from specdec.errors import UserError


class BlockBudget:
    """Blocks claimed by the requests that are decoded.

    Attributes:
        num_blocks, block_tokens: the pool of each stage.
        peak_blocks: most blocks claimed at a time so far.
    """

    def __init__(self, *, kv_tokens: int, block_tokens: int, tree_nodes: int) -> None:
        """Sets the budget.

        Args:
            kv_tokens: tokens and tree nodes that a stage may hold; rounded down to whole blocks.
            block_tokens: tokens per block.
            tree_nodes: most nodes of one request that the target holds at a time.

        Raises:
            ValueError: for a budget of less than one block.
        """
        self.num_blocks = kv_tokens // block_tokens
        self.block_tokens = block_tokens
        self.peak_blocks = 0
        self._tree_nodes = tree_nodes
        self._claims: dict[int, int] = {}
        if self.num_blocks < 1:
            raise ValueError(
                f"serving.kv_tokens={kv_tokens} is less than one block of"
                f" serving.block_tokens={block_tokens}: raise it"
            )

    @property
    def num_claimed(self) -> int:
        """Blocks claimed now."""
        return sum(self._claims.values())

    def need(self, num_prompt: int, max_new_tokens: int) -> int:
        """Blocks that a request may come to need."""
        return -(-(num_prompt + max_new_tokens + self._tree_nodes) // self.block_tokens)

    def check(self, request_id: int, num_prompt: int, max_new_tokens: int) -> None:
        """Refuses a request that could never be admitted.

        Raises:
            UserError: naming what it needs and what there is.
        """
        need = self.need(num_prompt, max_new_tokens)
        if need > self.num_blocks:
            raise UserError(
                f"prompt {request_id} can never be admitted: its {num_prompt} tokens,"
                f" max_new_tokens={max_new_tokens} and a tree of up to {self._tree_nodes} nodes"
                f" need {need} blocks of {self.block_tokens}, and the cache has {self.num_blocks}:"
                f" raise serving.kv_tokens to {need * self.block_tokens}, or lower max_new_tokens"
                " or the tree's size"
            )

    def admit(self, request_id: int, num_prompt: int, max_new_tokens: int) -> bool:
        """Claims a request's blocks; False where it has to wait."""
        need = self.need(num_prompt, max_new_tokens)
        if self.num_claimed + need > self.num_blocks:
            return False
        self._claims[request_id] = need
        self.peak_blocks = max(self.peak_blocks, self.num_claimed)
        return True

    def release(self, request_id: int) -> None:
        """Gives a request's blocks back."""
        del self._claims[request_id]
