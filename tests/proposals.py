"""Compares every proposal of a source with logits computed afresh."""

from collections.abc import Callable

import torch
from torch import Tensor

from specdec.compose.workbench import Parts
from specdec.state import DecodeState, RequestState
from specdec.types import Candidates, Nodes


def check_proposals(
    parts: Parts,
    decode: Callable[[], object],
    logits_of: Callable[[RequestState, int], Tensor | None],
    *,
    k: int,
    token_ids: Tensor | None = None,
    atol: float = 1e-9,
) -> list[int]:
    """Decodes, and compares the best tokens of each expanded node and their log-probabilities.

    Args:
        parts: with the source.
        decode: decodes some requests with ``parts``.
        logits_of: (request, slot) -> [U], those after the node; None if it may not have candidates.
        k: candidates to compare.
        token_ids: [U], the target's ids of the logits' columns. Default: the same.
        atol: of log-probabilities.

    Returns:
        Number of nodes compared, by depth.
    """
    expand = parts.source.expand
    seen = [0] * 16

    def checked(state: DecodeState, nodes: Nodes, asked: int) -> Candidates:
        found = expand(state, nodes, k)
        requests = [(state.requests[request_id], ids) for request_id, ids in nodes.items]
        expanded = [(r, slot) for r, ids in requests for slot in r.tree.slots(ids).tolist()]
        for row, (request, slot) in enumerate(expanded):
            logits = logits_of(request, slot)
            if logits is None:
                assert found.counts[row] == 0
            elif not found.counts[row]:  # in a pipeline the prompt is still under way
                assert parts.executor.in_flight > 1
                assert not request.output
            elif not request.sampling.needs_history:
                warm = request.sampling.temperature or 1.0
                best, ranked = (logits / warm).log_softmax(-1).sort(descending=True)
                ranked = ranked if token_ids is None else token_ids[ranked]
                assert found.tokens[row].tolist() == ranked[:k].tolist()
                assert torch.allclose(torch.from_numpy(found.logprobs[row]), best[:k], atol=atol)
                seen[int(request.tree.depths[slot])] += 1
        return found

    parts.source.expand = checked  # type: ignore[method-assign]
    with torch.inference_mode():
        decode()
    return seen
