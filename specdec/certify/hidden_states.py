"""Compares the target's hidden states in a tree with fresh forwards over the nodes' paths."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from specdec.models.slicing import final_norm, layers_name
from specdec.state import RequestState
from specdec.types import Commit, HiddenName, IntArray

TOLERANCE = 1e-6
"""Absolute error allowed in float64, because transformers' norms compute in float32."""


class FreshStates:
    """Computes hidden states with transformers' own forward over whole sequences."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._cached: dict[tuple[int, ...], list[torch.Tensor]] = {}

    def state(self, tokens: IntArray, name: HiddenName) -> torch.Tensor:
        """Returns [E], the state ``name`` of the last of ``tokens``, int64[T]."""
        path = tuple(tokens.tolist())
        if path not in self._cached:
            self._cached[path] = self._after_layers(path)
        state = self._cached[path][name.layer]
        if name.normed:
            with torch.inference_mode():
                state = final_norm(self._model)(state)
        return state

    def _after_layers(self, path: tuple[int, ...]) -> list[torch.Tensor]:
        states: list[torch.Tensor] = []

        def note(_module: object, _inputs: object, output: object) -> None:
            rows = output if isinstance(output, torch.Tensor) else output[0]  # type: ignore[index]
            states.append(rows[0, -1])

        layers = self._model.get_submodule(layers_name(self._model))
        hooks = [layer.register_forward_hook(note) for layer in layers.children()]
        device = next(self._model.parameters()).device
        try:
            with torch.inference_mode():
                self._model(torch.tensor([path], device=device), use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        return states


def hidden_problems(
    request: RequestState, commit: Commit | None, fresh: FreshStates
) -> tuple[int, list[str]]:
    """Compares the hidden states of live nodes, and of the nodes that a commit has retired.

    Returns the number of states compared and a description of each wrong one.
    """
    tree = request.tree
    given_states = [
        (node_id, request.path_tokens(slot), name, state)
        for slot, node_id in enumerate(tree.ids.tolist())
        for name, state in tree.hidden.get(node_id, {}).items()
    ]
    if commit is not None:
        first = commit.prefix_len - len(commit.retired_ids) + 1
        given_states += [
            (node_id, request.tokens[:length], name, states[row])
            for name, states in commit.hidden.items()
            for row, node_id in enumerate(commit.retired_ids.tolist())
            if (length := first + row) <= len(request.tokens)  # the others were cut
        ]
    problems = []
    for node_id, tokens, name, given in given_states:
        expected = fresh.state(tokens, name)
        error = float((given.to(expected.device) - expected).abs().max())
        if not error <= TOLERANCE:
            problems.append(
                f"tree of request {request.id}: the state of node {node_id} after layer"
                f" {name.layer} differs from a fresh forward by {error:.1e}"
            )
    return len(given_states), problems
