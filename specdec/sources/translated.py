from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import compress
from typing import NamedTuple

import numpy as np
from torch import Tensor

from specdec.clocks.meter import Meter
from specdec.executors.models import ModelPair
from specdec.models.vocabulary import Tail, TranslatedDraft, Translation
from specdec.parts.fields import Count, validated
from specdec.sources.model_source import CachedModelSource, PassWork
from specdec.state import RequestState
from specdec.tree import TokenTree
from specdec.types import NO_NODE, BoolArray, Commit, IntArray, Needs, Output, TreeRows


class TranslatedSource(CachedModelSource):
    """Proposes the tokens of a draft with another tokenizer that the target's vocabulary shares.

    This is token-level intersection (Timor et al. 2025, arXiv 2502.05202, algorithm 4). The draft's
    distribution is renormalised over the intersection, so rejection sampling is exact for it. A
    node has no candidates if its text ends inside a character that the draft cannot write, or
    beyond the draft's positions. Counted rows are draft tokens; catch-up rows are committed ones.

    Args:
        pair: the model pair, with the draft that ``model.translated`` names.
        meter: counts the passes as "translated".
        sample, prefill_chunk: see ``CachedModelSource``.

    Raises:
        UserError: the pair has no such draft, a tokenizer is missing, or the vocabularies have no
            token in common.
    """

    _shares_entries = True  # nodes with the same text in other tokens

    @validated
    def __init__(
        self,
        *,
        pair: ModelPair,
        meter: Meter,
        sample: bool = False,
        prefill_chunk: Count = 512,
    ) -> None:
        self._model = pair.artefact(TranslatedDraft, meter=meter)
        runner = self._model.runner
        super().__init__(
            runner=runner,
            label=runner.name,
            needs=Needs(),
            vocab_size=self._model.vocab_size,
            sample=sample,
            prefill_chunk=prefill_chunk,
        )
        self._token_ids = self._model.translation.target_ids
        self._texts: dict[int, DraftText] = {}

    @property
    def pass_bytes(self) -> int:
        return self._model.weight_bytes

    def open(self, request: RequestState) -> None:
        super().open(request)
        text = DraftText(self._model.translation, request.tokens.tolist())
        self._texts[request.id] = text

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        known = [commit for commit in commits if commit.request in self._texts]
        super().commit([self._texts[commit.request].commit(commit) for commit in known], output)

    def close(self, request_id: int) -> None:
        super().close(request_id)
        self._texts.pop(request_id, None)

    def _can_expand(self, request: RequestState, ids: IntArray) -> BoolArray:
        text, most = self._texts[request.id], self._runner.max_positions
        ends = text.ends(request.tree, ids)
        return np.array([text.can_draft(end, most) for end in ends], np.bool_)

    def _plan(self, request: RequestState, ids: IntArray) -> PassWork:
        """Returns what a pass computes to expand the nodes; its entries are trie nodes."""
        text, cache = self._texts[request.id], self._caches[request.id]
        stored = self._logits[request.id]
        leaves = [end.leaf for end in text.ends(request.tree, ids)]
        new = [leaf for leaf in leaves if leaf not in stored]
        entries = text.rows(text.missing(new, set(cache.node_ids.tolist())))
        prefix = np.array(text.final[cache.cached_len :], np.int64)
        return PassWork(request, cache, np.array(leaves), prefix, entries)

    def _target_logits(self, logits: Tensor) -> Tensor:
        return self._model.target_logits(logits)

    def _proposed_logits(self, logits: Tensor) -> Tensor:
        return self._model.shared_logits(logits)


class TextEnd(NamedTuple):
    """Where the text of a target node ends in the trie of draft tokens (``DraftText``).

    Attributes:
        anchor: trie node before ``tail``; no further text changes its token or those above it.
        tail: draft tokens that further text may change.
        leaf: trie node of the last draft token.
    """

    anchor: int
    tail: Tail
    leaf: int


class _TrieNode(NamedTuple):
    parent: int
    token: int
    position: int


class DraftText:
    """A request's text in draft tokens: a list of final ones, and a trie of those that may change.

    Several target nodes may end in the same draft token (the same text by other target tokens), and
    one target node may need several draft tokens, so the draft's cache has entries per trie node.
    The id of a trie node is never reused, and greater than that of its parent.

    Attributes:
        final: draft tokens of the committed text that no further text changes.
        root: end of the text of the target tree's root, which at first is the last prompt token.
    """

    def __init__(self, translation: Translation, prompt: Iterable[int]) -> None:
        self._translation = translation
        self._nodes: dict[int, _TrieNode] = {}
        self._children: dict[tuple[int, int], int] = {}
        self._next = 1
        self._end = 0  # trie id of the last final token
        self._ends: dict[int, TextEnd] = {}  # target node -> its end
        self._root_id = -1
        tail = translation.translated(prompt)
        num = translation.num_final(tail.tokens)
        self.final: list[int] = list(tail.tokens[:num])
        self.root = self._end_of(self._end, replace(tail, tokens=tail.tokens[num:]))

    def ends(self, tree: TokenTree, ids: IntArray) -> list[TextEnd]:
        slots = tree.slots(ids)
        assert (slots >= 0).all(), f"nodes {ids} are not in the tree"
        return [self._text_end(tree, slot) for slot in slots.tolist()]

    def _text_end(self, tree: TokenTree, slot: int) -> TextEnd:
        """Finds the end of a target node's text, from the nearest ancestor whose end is known."""
        if slot == 0:
            return self.root
        node = int(tree.ids[slot])
        if node not in self._ends:
            above = self._text_end(tree, int(tree.parents[slot]))
            self._ends[node] = self._below(above, int(tree.tokens[slot]))
        return self._ends[node]

    def can_draft(self, end: TextEnd, max_positions: int) -> bool:
        """Whether the draft's tokens write the whole text and lie within the draft's positions."""
        whole = bool(end.tail.tokens) and not end.tail.rest
        return whole and self._nodes[end.leaf].position < max_positions

    def _below(self, end: TextEnd, token: int) -> TextEnd:
        return self._end_of(end.anchor, self._translation.extended(end.tail, token))

    def _end_of(self, anchor: int, tail: Tail) -> TextEnd:
        """Adds ``tail``'s tokens below ``anchor``; the returned anchor is the last final token."""
        final = self._translation.num_final(tail.tokens)
        leaf = anchor
        for number, token in enumerate(tail.tokens):
            if number == final:
                anchor = leaf
            leaf = self._child(leaf, token)
        return TextEnd(anchor, replace(tail, tokens=tail.tokens[final:]), leaf)

    def _child(self, parent: int, token: int) -> int:
        node = self._children.get((parent, token))
        if node is None:
            node, self._next = self._next, self._next + 1
            above = self._nodes.get(parent)
            position = len(self.final) if above is None else above.position + 1
            self._children[parent, token] = node
            self._nodes[node] = _TrieNode(parent, token, position)
        return node

    # Rows.

    def missing(self, leaves: Sequence[int], cached: set[int]) -> list[int]:
        """Returns ``leaves`` and their ancestors that are not in ``cached``, parents first."""
        needed: set[int] = set()
        for node in leaves:
            while node in self._nodes and node not in cached and node not in needed:
                needed.add(node)
                node = self._nodes[node].parent
        return sorted(needed)

    def rows(self, nodes: Sequence[int]) -> TreeRows:
        known, paths = self._nodes, [list(nodes)]

        def above(node: int) -> int:
            parent = known[node].parent if node in known else NO_NODE
            return parent if parent in known else NO_NODE

        while set(level := [above(node) for node in paths[-1]]) - {NO_NODE}:
            paths.append(level)
        return TreeRows(
            request=0,
            prefix_len=len(self.final),
            tokens=np.array([known[node].token for node in nodes], np.int64),
            paths=np.array(paths, np.int64),
        )

    # Commits.

    def commit(self, commit: Commit) -> Commit:
        """Moves the root, drops text of pruned nodes, and returns the commit in trie node ids."""
        ids = [*commit.retired_ids[1:].tolist(), commit.root_id]
        end = self.root
        for node, token in zip(ids, commit.new_tokens, strict=True):
            end = self._ends.get(node) or self._below(end, token)
        self.root = end
        retired = self._path(end.anchor)
        tokens = [self._nodes[node].token for node in retired]
        kept = commit.keeps(np.array(list(self._ends), np.int64)).tolist()
        self._ends = dict(compress(self._ends.items(), kept))
        self.final.extend(tokens)
        self._end = end.anchor
        live = self._live(retired)
        return replace(
            commit,
            retired_ids=np.array(retired, np.int64),
            retired_tokens=np.array(tokens, np.int64),
            prefix_len=len(self.final),
            kept_ids=np.array(live, np.int64),
        )

    def _path(self, node: int) -> list[int]:
        """Returns the trie nodes from the first whose token was not final down to ``node``."""
        path: list[int] = []
        while node != self._end:
            path.append(node)
            node = self._nodes[node].parent
        return path[::-1]

    def _live(self, retired: Sequence[int]) -> list[int]:
        """Drops the trie nodes ``retired``, and unneeded ones; returns the others' ids, sorted."""
        for node in retired:
            self._drop(node)
        live = self.missing([p.leaf for p in (self.root, *self._ends.values())], set())
        for node in self._nodes.keys() - set(live):
            self._drop(node)
        return live

    def _drop(self, node: int) -> None:
        gone = self._nodes.pop(node)
        del self._children[gone.parent, gone.token]
