"""Admission to a paged cache: a request is admitted when the blocks that it may need are free.

The first stage caches the most tree nodes, so one budget serves the pools of all stages. A request
claims blocks for its longest prefix and its largest tree until it finishes: no stage runs out of
blocks, and no request is preempted.
"""

from specdec.errors import UserError


class BlockBudget:
    def __init__(self, *, kv_tokens: int, block_tokens: int, tree_nodes: int) -> None:
        """Starts with all blocks free: per stage, room for ``kv_tokens`` tokens and tree nodes,
        rounded down to whole blocks. One request caches at most ``tree_nodes`` nodes.
        """
        self.num_blocks = kv_tokens // block_tokens
        self.block_tokens = block_tokens
        self.peak_blocks = 0
        self._tree_nodes = tree_nodes
        self._claims: dict[int, int] = {}
        if self.num_blocks < 1:
            raise UserError(
                f"serving.kv_tokens={kv_tokens} is less than one block of"
                f" serving.block_tokens={block_tokens}: raise it"
            )

    @property
    def num_claimed(self) -> int:
        return sum(self._claims.values())

    def need(self, num_prompt: int, max_new_tokens: int) -> int:
        return -(-(num_prompt + max_new_tokens + self._tree_nodes) // self.block_tokens)

    def check(self, request_id: int, num_prompt: int, max_new_tokens: int) -> None:
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
        need = self.need(num_prompt, max_new_tokens)
        if self.num_claimed + need > self.num_blocks:
            return False
        self._claims[request_id] = need
        self.peak_blocks = max(self.peak_blocks, self.num_claimed)
        return True

    def release(self, request_id: int) -> None:
        del self._claims[request_id]
