"""Forward passes of a slice of a model in ONNX Runtime, on a CPU (``model.backend=onnx``).

Shape letters: R rows of one request, A rows whose logits are computed, E hidden size, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specdec.attention.tree_attention import Rows, TreeCache
from specdec.errors import UserError
from specdec.models.onnx.graph import build_graph, with_exact_products
from specdec.models.onnx.session import Array, CacheSession
from specdec.models.onnx.support import problem
from specdec.models.runner import (
    Backend,
    Eager,
    RunnerOutput,
    in_parts,
    refuse_wrong,
)
from specdec.types import IntArray, TreeRows

_SAMPLE = 8  # tokens of the comparison with eager passes
# The graph always computes logits, so passes without logits ask for one row.
_ONE_ROW: IntArray = np.zeros(1, np.int64)


class Onnx(Backend):
    def __init__(self, eager: Eager, bits: int | None = None) -> None:
        """Builds the session; UserError if results for a few tokens differ from those of ``eager``.
        If ``bits`` is given, the weights of ``eager`` must be rounded already (``round_weights``),
        and the session that is compared does not round activations, unlike the final one.
        """
        self.layers = layers = eager.layers
        config = layers.model.config.get_text_config()
        reason = problem(config, layers.spec.dtype, layers.spec.device)
        if reason:
            raise UserError(f"model.backend=onnx cannot be used: {reason}; use model.backend=eager")
        graph = build_graph(layers, bits)
        states = list(dict.fromkeys([layers.output, *layers.capture]))
        self._captured = [(name, states.index(name)) for name in layers.capture]
        self._outputs = [f"state_{number}" for number in range(len(states))]
        self._hidden_size, self._vocab_size = layers.hidden_size, layers.vocab_size
        windows = {option.window for option in layers.options.values()}
        self._session = CacheSession(with_exact_products(graph) if bits else graph, windows)
        with torch.inference_mode():
            refuse_wrong([self._sample(self)], [self._sample(eager)], "model")
        if bits:
            del self._session  # before the next: large models would not fit twice
            self._session = CacheSession(graph, windows)

    def run(
        self, rows: Sequence[Rows], hidden: Tensor | None, logits_rows: IntArray | None
    ) -> RunnerOutput:
        parts = [[piece] for part in rows for piece in _pieces(part) if len(piece)]
        return in_parts(parts, hidden, logits_rows, self._run_part)

    def _run_part(
        self, part: Sequence[Rows], hidden: Tensor | None, logits_rows: IntArray
    ) -> RunnerOutput:
        (rows,) = part
        wants_logits = self.layers.wants_logits(logits_rows)
        inputs: dict[str, Array] = {}
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(
            self._outputs, (1, len(rows), self._hidden_size)
        )
        if hidden is None:
            inputs["tokens"] = rows.tokens[None]
        else:
            inputs["hidden"] = hidden.numpy()[None]
        if self.layers.is_last:
            inputs["logits_rows"] = logits_rows if wants_logits else _ONE_ROW
            shapes["logits"] = (1, len(inputs["logits_rows"]), self._vocab_size)
        states = self._session.run(rows, inputs, shapes)
        logits = states.pop() if self.layers.is_last else None
        return RunnerOutput(
            hidden=states[0],
            logits=logits if wants_logits else None,
            captured={name: states[i] for name, i in self._captured},
        )

    def _sample(self, backend: Backend) -> Tensor:
        """Returns the outputs of two passes over two trees, one of them with an empty prefix. The
        second pass adds one node to each, beside other branches.
        """
        nodes, tokens = np.arange(_SAMPLE).reshape(2, -1)
        parents = np.maximum(-1, nodes - 2)  # two roots, and a chain below each
        requests = []
        for prefix in (nodes, nodes[:0]):
            tree = TreeRows.within(
                prefix_len=len(prefix), node_ids=nodes, tokens=tokens, parent_ids=parents
            )
            requests.append((prefix, tree, TreeCache(spec=self.layers.spec, capacity=_SAMPLE)))
        generator, outputs = torch.Generator().manual_seed(0), list[Tensor]()
        for part in (nodes[:-1], nodes[-1:]):
            rows = [
                cache.rows(prefix_tokens=prefix[: 0 if outputs else None], tree=tree.take(part))
                for prefix, tree, cache in requests
            ]
            shape, hidden = (sum(map(len, rows)), self._hidden_size), None
            if not self.layers.is_first:
                hidden = torch.randn(shape, generator=generator)
            output = backend.run(rows, hidden, None)
            outputs.append(output.hidden if output.logits is None else output.logits)
        return torch.cat(outputs)


def _pieces(rows: Rows) -> list[Rows]:
    """Cuts rows for an empty cache after the prefix or first node if they have a branching tree.

    ONNX Runtime's attention gives the rows of an empty cache the positions 0, 1, 2, ... and ignores
    the positions of the pass, which is wrong for siblings.
    """
    if rows.start or np.array_equal(rows.positions, np.arange(len(rows))):
        return [rows]
    first = rows.num_prefix or 1
    return [rows.cut(0, first), rows.cut(first, len(rows))]
