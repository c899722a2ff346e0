"""A model pair outside the library: a recurrent network, whose cache is one state per node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import Field

from specdec.clocks.meter import Meter
from specdec.executors.stage import Stage, StageOutput
from specdec.pairs import ModelPair
from specdec.types import NO_NODE, Batch, Commit, HiddenName, NodeMap

Width = Annotated[int, Field(ge=1)]  # an alias of the author's own


class RecurrentPair(ModelPair):
    """An untrained GRU as the target, and no draft model: sources that need none propose."""

    option = "recurrent"  # its name in messages
    num_layers = 1  # one pipeline stage at most
    dtype = "float64"  # of the weights

    def __init__(self, *, width: Width, vocabulary: Width, seed: int) -> None:
        """Takes the keys of its YAML.

        Args:
            width: of the hidden state.
            vocabulary: number of tokens.
            seed: of the weights.
        """
        self.vocab_size = vocabulary
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self._embedding = torch.nn.Embedding(vocabulary, width, dtype=torch.float64)
            self._cell = torch.nn.GRUCell(width, width, dtype=torch.float64)
        tensors = [*self._embedding.parameters(), *self._cell.parameters()]
        self.weight_bytes = {"target": sum(t.numel() * t.element_size() for t in tensors)}

    def stage(
        self, first: int, last: int, meter: Meter, *, capture: Sequence[HiddenName] = ()
    ) -> RecurrentStage:
        """The layers ``first`` to ``last`` of the target: here all of it."""
        return RecurrentStage(self._embedding, self._cell, meter)


class RecurrentStage(Stage):
    """Computes the rows of batches; keeps a state per request and per node of its tree."""

    def __init__(self, embedding: torch.nn.Embedding, cell: torch.nn.GRUCell, meter: Meter) -> None:
        """Shares the pair's modules; passes are counted by ``meter``."""
        self._embedding, self._cell, self._meter = embedding, cell, meter
        self._prefix: dict[int, torch.Tensor] = {}  # request -> [1, E] after the committed tokens
        self._nodes: NodeMap[torch.Tensor] = NodeMap()  # [1, E] after each node

    def open(self, request_id: int, max_len: int) -> None:
        """Begins a request of at most ``max_len`` tokens with a zero state."""
        self._prefix[request_id] = torch.zeros(1, self._cell.hidden_size, dtype=torch.float64)
        self._nodes.open(request_id)

    def run(self, batch: Batch, hidden: torch.Tensor | None) -> StageOutput:
        """Prefill chunks first, then tree rows, parents before children."""
        with self._meter.model("target"):
            for chunk in batch.prefills:
                for token in chunk.tokens.tolist():
                    self._prefix[chunk.request] = self._step(self._prefix[chunk.request], token)
            states = []
            for rows in batch.trees:
                nodes = self._nodes[rows.request]
                each = zip(rows.node_ids, rows.parent_ids, rows.tokens, strict=True)
                for node, parent, token in (map(int, row) for row in each):
                    before = self._prefix[rows.request] if parent == NO_NODE else nodes[parent]
                    nodes[node] = self._step(before, token)
                    states.append(nodes[node])
            if not states:
                return StageOutput()
            return StageOutput(logits=torch.cat(states) @ self._embedding.weight.T)  # [rows, V]

    def commit(self, commits: Sequence[Commit]) -> None:
        """Retired nodes join the prefix; nodes that left the tree are dropped."""
        for commit in commits:
            states = self._nodes[commit.request]
            self._prefix[commit.request] = states[int(commit.retired_ids[-1])]
        self._nodes.commit(commits)

    def close(self, request_id: int) -> None:
        """Forgets the request."""
        self._prefix.pop(request_id, None)
        self._nodes.close(request_id)

    def _step(self, state: torch.Tensor, token: int) -> torch.Tensor:
        embedded = self._embedding.weight[token][None]
        after: torch.Tensor = self._cell(embedded, state)
        return after
