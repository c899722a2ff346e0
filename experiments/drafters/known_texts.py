"""A target that writes texts which are known already, for runs that only count hits.

Under ``verifier=match`` the output of every run is that of plain decoding, whatever is proposed. A
sweep over sources, trees and numbers of stages therefore decodes the same texts again and again.
Here the target's tokens and hidden states are computed once per prompt, in one pass over the whole
text; a node on the text is answered from them. A node beside it is answered with token 0, which no
verdict reads: a commit walks along the text only. Hidden states of such nodes are read only where
they arrive before the answers (``source.early=true``); there they are computed.

Hits and accepted lengths are those of a run of the real target
(``tests/unit/test_known_texts.py``), except where the last bits of a hidden state decide between
candidates of equal rank.

Shape letters: R rows of a batch, T tokens of a text, W tree rows, E hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from specdec.attention.tree_attention import Rows
from specdec.clocks.meter import Meter
from specdec.executors.stage import (
    AnsweredRequest,
    Answerer,
    RowItem,
    Stage,
    StageOutput,
    row_items,
)
from specdec.models.runner import NO_ROWS, ModelRunner
from specdec.pairs.pretrained import PretrainedPair
from specdec.sampling.keyed_draws import KeyedDraws
from specdec.types import NO_NODE, Answers, Batch, Commit, HiddenName, IntArray, TreeRows

_BESIDE = 512  # rows beside a text that one pass computes at most
_Key = tuple[int, ...]  # of a node: its last position on the text, then the tokens after it


class KnownText:
    """One text: its tokens, and the hidden states of its positions.

    Attributes:
        tokens: int64[T], prompt and output.
    """

    def __init__(self, tokens: IntArray) -> None:
        """Takes the tokens."""
        self.tokens = tokens
        self._states: dict[ModelRunner, _States] = {}

    def states(self, target: ModelRunner) -> _States:
        """The hidden states that ``target``, a runner of all layers, captures."""
        if target not in self._states:
            self._states[target] = _States(target, self.tokens)
        return self._states[target]


class _States:
    """Hidden states of the rows on one text, and of nodes beside it.

    Attributes:
        on_text: name -> [T, E].
    """

    def __init__(self, target: ModelRunner, tokens: IntArray) -> None:
        self._target = target
        self._cache = target.new_cache(len(tokens) + _BESIDE)
        rows = [self._cache.rows(prefix_tokens=tokens)]
        self.on_text = target.forward(rows, logits_rows=NO_ROWS).captured
        self._beside: dict[_Key, dict[HiddenName, Tensor]] = {}

    def beside(self, keys: Sequence[_Key]) -> list[Mapping[HiddenName, Tensor]]:
        """Name -> [E] of each node beside the text; each node is computed once."""
        missing = [key for key in keys if key not in self._beside]
        above = {key[:end] for key in missing for end in range(2, len(key) + 1)}
        for part in _parts(sorted(above, key=len)):
            self._compute(part)
        return [self._beside[key] for key in keys]

    def _compute(self, keys: Sequence[_Key]) -> None:
        """One pass over nodes with all their ancestors beside the text."""
        start, index = self._cache.cached_len, {key: row for row, key in enumerate(keys)}
        visible = np.zeros((len(keys), start + len(keys)), np.bool_)
        for key, row in index.items():
            visible[row, : key[0] + 1] = True
            visible[row, start + row] = True
            if len(key) > 2:
                visible[row, start:] |= visible[index[key[:-1]], start:]
        rows = Rows(
            cache=self._cache,
            tokens=np.array([key[-1] for key in keys]),
            positions=np.array([key[0] + len(key) - 1 for key in keys]),
            node_ids=np.arange(len(keys)),
            num_prefix=0,
            start=start,
            first_masked=0,
            visible=visible,
        )
        captured = self._target.forward([rows], logits_rows=NO_ROWS).captured
        for key, row in index.items():
            self._beside[key] = {name: states[row] for name, states in captured.items()}


def _parts(keys: Sequence[_Key]) -> list[list[_Key]]:
    """The keys by the first token beside the text, at most ``_BESIDE`` of them in a part."""
    parts: list[list[_Key]] = []
    for branch in dict.fromkeys(key[:2] for key in keys):
        below = [key for key in keys if key[:2] == branch]
        if not parts or len(parts[-1]) + len(below) > _BESIDE:
            parts.append([])
        parts[-1] += below
    return parts


class _Paths:
    """Where the live nodes of one request are: on its text, or beside it."""

    def __init__(self, text: KnownText) -> None:
        self.text = text
        self._keys: dict[int, _Key] = {}

    def observe(self, rows: TreeRows) -> list[_Key]:
        """The keys of the rows; a key of one number is a position on the text."""
        found = []
        each = zip(rows.node_ids, rows.parent_ids, rows.tokens, rows.positions, strict=True)
        for node, parent, token, position in (map(int, row) for row in each):
            key = self._keys.get(node)
            if key is None:
                above = (position - 1,) if parent == NO_NODE else self._keys[parent]
                is_on = len(above) == 1 and position < len(self.text.tokens)
                is_on = is_on and int(self.text.tokens[position]) == token
                key = self._keys[node] = (position,) if is_on else (*above, token)
            found.append(key)
        return found


class _Requests:
    """The open requests, shared by the stages and the answerer of one run."""

    def __init__(self, texts: Mapping[int, KnownText]) -> None:
        self._texts = texts
        self.paths: dict[int, _Paths] = {}

    def open(self, request_id: int) -> None:
        if request_id not in self.paths:
            self.paths[request_id] = _Paths(self._texts[request_id])

    def close(self, request_id: int) -> None:
        self.paths.pop(request_id, None)


class _Stage(Stage):
    """Looks hidden states up; the last stage that captures any returns them all."""

    def __init__(self, pair: KnownTexts, requests: _Requests) -> None:
        self._pair, self._requests = pair, requests

    def open(self, request_id: int, max_len: int) -> None:
        self._requests.open(request_id)

    def run(self, batch: Batch, hidden: Tensor | None) -> StageOutput:
        captured: dict[HiddenName, Tensor] = {}
        if self._pair.capturing is self and self._pair.reads_states:
            parts = [self._states(item) for item in row_items(batch)]
            captured = {name: torch.cat([p[name] for p in parts]) for name in parts[0]}
        return StageOutput(hidden=torch.zeros(batch.num_tokens, 1), captured=captured)

    def commit(self, commits: Sequence[Commit]) -> None:
        """No-op."""

    def close(self, request_id: int) -> None:
        self._requests.close(request_id)

    def _states(self, item: RowItem) -> dict[HiddenName, Tensor]:
        """Name -> [R, E] of one request's rows."""
        paths = self._requests.paths[item.request]
        known = paths.text.states(self._pair.target_runner())
        num_prefill = len(item.prefill_tokens)
        start = 0 if item.prefill is None else item.prefill.start
        keys = [] if item.tree is None else paths.observe(item.tree)
        positions = [*range(start, start + num_prefill), *(key[0] for key in keys)]
        states = {name: rows[torch.tensor(positions)] for name, rows in known.on_text.items()}
        beside = [row for row, key in enumerate(keys) if len(key) > 1]
        if beside and not self._pair.early:
            for rows in states.values():  # not computed: nothing may read them
                rows[torch.tensor(beside) + num_prefill] = torch.nan
        elif beside:
            found = known.beside([keys[row] for row in beside])
            for name, rows in states.items():
                rows[torch.tensor(beside) + num_prefill] = torch.stack([f[name] for f in found])
        if self._pair.spoiled:
            states = {name: rows.roll(1, -1) for name, rows in states.items()}
        return states


class _Answerer(Answerer):
    """Answers each row with the token that follows in the text."""

    def __init__(self, requests: _Requests) -> None:
        self._requests = requests

    def open(self, request: AnsweredRequest) -> None:
        self._requests.open(request.id)

    def answer(self, batch: Batch, logits: Tensor | None) -> tuple[Answers, ...]:
        return tuple(self._answers(rows) for rows in batch.trees)

    def commit(self, commits: Sequence[Commit]) -> None:
        """No-op."""

    def close(self, request_id: int) -> None:
        self._requests.close(request_id)

    def _answers(self, rows: TreeRows) -> Answers:
        paths = self._requests.paths[rows.request]
        text, tokens = paths.text.tokens, np.zeros(len(rows.node_ids), np.int64)
        for row, key in enumerate(paths.observe(rows)):
            if len(key) == 1 and key[0] + 1 < len(text):
                tokens[row] = text[key[0] + 1]
        return Answers(request=rows.request, node_ids=rows.node_ids, tokens=tokens)


class KnownTexts(PretrainedPair):
    """A pair whose target writes known texts; drafts and heads are the pair's own.

    Attributes:
        early: hidden states are read before the answers, so those of all nodes are computed.
        spoiled: hidden states are shifted by one channel.
        capturing: the last stage that captures hidden states; None if there is none.
    """

    def __init__(
        self,
        pair: PretrainedPair,
        texts: Mapping[int, KnownText],
        *,
        at_once: bool = False,
        spoiled: bool = False,
    ) -> None:
        """Shares everything with ``pair``.

        Args:
            pair: a loaded pair.
            texts: by prompt id.
            at_once: a planted control: the first stage returns the states of all layers, which no
                target could. Default: false.
            spoiled: another one: the channels of all hidden states are shifted by one, so that
                whatever reads them must fail. Default: false.
        """
        vars(self).update(vars(pair))
        self.early, self.spoiled, self._at_once = False, spoiled, at_once
        self.capturing: _Stage | None = None
        self._texts, self._requests = texts, _Requests(texts)
        self._names: list[HiddenName] = []
        self._runners: dict[tuple[HiddenName, ...], ModelRunner] = {}

    def stage(  # type: ignore[override]
        self,
        first: int,
        last: int,
        meter: Meter,
        group: None = None,
        capture: Sequence[HiddenName] = (),
    ) -> _Stage:
        """A stage that looks up; the stages of a pipeline are made first to last."""
        if first == 0:
            self._names, self._requests, self.capturing = [], _Requests(self._texts), None
        stage = _Stage(self, self._requests)
        self._names += capture
        if first == 0 if self._at_once else capture:
            self.capturing = stage
        return stage

    @property
    def reads_states(self) -> bool:
        """Whether the last executor captures any hidden states."""
        return bool(self._names)

    def target_runner(self) -> ModelRunner:
        """All layers of the target, with the hidden states of the stages made last."""
        names = tuple(sorted(set(self._names)))
        if names not in self._runners:
            whole = super().stage(0, self.num_layers, Meter(), capture=names)
            self._runners[names] = whole.runner
        return self._runners[names]

    def answerer(self, *, draws: KeyedDraws, needs_probs: bool) -> _Answerer:  # type: ignore[override]
        """Answers from the texts."""
        assert not needs_probs, "texts have no distributions"
        return _Answerer(self._requests)
