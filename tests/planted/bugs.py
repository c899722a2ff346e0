"""Faults planted into the shipped code, one at a time: does ``specdec verify`` find them?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from specdec.sampling.keyed_draws import Purpose
from specdec.tree import TokenTree
from tests.planted.planting import BUGS, Bug, Planted, bug, planted

__all__ = ["BUGS", "SOUND", "planted"]

# ---------------------------------------------------------------------- positions, masks, caches


@bug("draft nodes stand one position too far", "strategy=speculative", "sampling=t08")
def position_off_by_one(work: Planted) -> None:
    def make(original: Any) -> Any:
        def rows(self: Any, **given: Any) -> Any:
            found = original(self, **given)
            below = np.zeros(len(found), np.bool_)
            below[found.num_prefix :] = found.positions[found.num_prefix :] > self.cached_len
            if not below.any():
                return found
            work.fired += 1
            return replace(found, positions=found.positions + below)

        return rows

    work.swap("specdec.attention.kv_cache:TreeCache.rows", make)


@bug("a commit moves the books of cache entries, not their keys and values", "strategy=best_first")
def stale_kv_after_prune(work: Planted) -> None:
    def make(original: Any) -> Any:
        def copy_slots(self: Any, sources: Any, targets: Any) -> None:
            work.fired += 1

        return copy_slots

    work.swap("specdec.attention.kv_cache:TreeCache._copy_slots", make)


@bug("the mask hides the tree's first node from the rows below it", "strategy=specinfer")
def mask_column_missing(work: Planted) -> None:
    def make(original: Any) -> Any:
        def rows(self: Any, **given: Any) -> Any:
            found = original(self, **given)
            column = self.cached_len - found.first_masked
            others = found.start + np.arange(len(found)) > self.cached_len
            if column >= found.visible.shape[1] or not found.visible[others, column].any():
                return found
            work.fired += 1
            visible = found.visible.copy()
            visible[others, column] = False
            return replace(found, visible=visible)

        return rows

    work.swap("specdec.attention.kv_cache:TreeCache.rows", make)


@bug(
    "the draft's cache is not compacted; the output stays right",
    "strategy=best_first",
    "policy.min_mass=0",
    "policy.min_prob=0",
    listed=False,
)
def draft_cache_stale(work: Planted) -> None:
    inside: list[bool] = []

    def make_commit(original: Any) -> Any:
        def commit(self: Any, commits: Any, output: Any) -> None:
            inside.append(True)
            original(self, commits, output)
            inside.pop()

        return commit

    def make_copy(original: Any) -> Any:
        def copy_slots(self: Any, sources: Any, targets: Any) -> None:
            if inside:
                work.fired += 1
            else:
                original(self, sources, targets)

        return copy_slots

    work.swap("specdec.sources.draft_model:DraftModelSource.commit", make_commit)
    work.swap("specdec.attention.kv_cache:TreeCache._copy_slots", make_copy)


# ---------------------------------------------------------------------- trees and what is in flight


@bug(
    "a node is accepted under a parent that is not its own", "strategy=fixed_width", "sampling=t08"
)
def child_under_wrong_parent(work: Planted) -> None:
    def make(original: Any) -> Any:
        def verdict(request: Any) -> Any:
            right = original(request)
            tree = request.tree
            slot, path = 0, []
            while True:
                token, depth = tree.answers[slot], tree.depths[slot] + 1
                found = np.flatnonzero(
                    (tree.depths == depth) & (tree.tokens == token) & tree.answered
                )
                if not len(found):
                    break
                slot = int(found[-1])
                path.append(slot)
            ids = tree.ids[np.array(path, np.int64)]
            work.fired += ids.tolist() != right.accepted_ids.tolist()
            return replace(right, accepted_ids=ids, next_token=int(tree.answers[slot]))

        return verdict

    work.swap("specdec.verifiers.match:_verdict", make)


@bug(
    "rows of dropped nodes go on to the next stage",
    *("strategy=specpipe", "executor.stages=3", "serving=dynamic"),
)
def in_flight_not_pruned(work: Planted) -> None:
    def make(original: Any) -> Any:
        def prune(self: Any, commits: Any, closed: frozenset[int] = frozenset()) -> None:
            work.fired += bool(commits)
            if closed:
                original(self, {}, closed)

        return prune

    work.swap("specdec.executors.row_packing:InFlight.prune", make)


@bug("the new root keeps a sibling beside it", "strategy=specpipe", "executor.stages=3")
def reroot_keeps_sibling(work: Planted) -> None:
    def make(original: Any) -> Any:
        def subtree(self: TokenTree, slot: int) -> Any:
            inside = original(self, slot)
            siblings = self.children(int(self.parents[slot])) if slot else self.ids[:0]
            siblings = siblings[siblings != slot]
            if len(siblings):
                work.fired += 1
                inside[siblings[0]] = True
            return inside

        return subtree

    work.swap("specdec.tree:TokenTree.subtree", make)


# ---------------------------------------------------------------------- what is emitted


@bug("EOS is looked for in the last token of an accepted path only", "strategy=best_first")
def eos_in_path_ignored(work: Planted) -> None:
    def make(original: Any) -> Any:
        def commit_one(self: Any, request: Any, verdict: Any, now: float) -> Any:
            if not len(verdict.accepted_ids):
                return original(self, request, verdict, now)
            stop = request.stop
            tree = request.tree
            tokens = tree.tokens[tree.slots(verdict.accepted_ids)].tolist()
            work.fired += bool(stop.eos_ids & {*tokens})
            request.stop = replace(stop, eos_ids=frozenset())
            found = original(self, request, verdict, now)
            request.stop = stop
            if not request.finished:
                request.finish_reason = stop.reason(request.output)
            return replace(found, finished=request.finished)

        return commit_one

    work.swap("specdec.state:DecodeState._commit_one", make)


@bug("the token after a wholly accepted path is not emitted", "strategy=speculative")
def bonus_token_dropped(work: Planted) -> None:
    def make(original: Any) -> Any:
        def commit_one(self: Any, request: Any, verdict: Any, now: float) -> Any:
            tree = request.tree
            path = tree.slots(verdict.accepted_ids)
            whole = len(path) > 0 and not len(tree.children(int(path[-1])))
            cut = request.counters.cut_tokens
            found = original(self, request, verdict, now)
            if whole and request.counters.cut_tokens == cut:
                work.fired += 1
                for emitted in (request.output, request.output_origins, request.emitted_s):
                    emitted.pop()
                if len(request.tokens) - request.num_prompt >= request.stop.max_new_tokens:
                    request.finish_reason = "length"
            return replace(found, finished=request.finished)

        return commit_one

    work.swap("specdec.state:DecodeState._commit_one", make)


@bug("a path is emitted beyond max_new_tokens", "strategy=best_first", listed=False)
def length_in_path_ignored(work: Planted) -> None:
    def make(original: Any) -> Any:
        def reason(self: Any, output: Any) -> Any:
            found = original(self, output)
            if found == "length" and len(output) == self.max_new_tokens > 1:
                work.fired += 1
                return None
            return found

        return reason

    work.swap("specdec.state:StopRules.reason", make)


@bug(
    "processors see the committed tokens without the node's path",
    "strategy=specinfer",
    "sampling=no_repeat4",
    listed=False,
)
def history_without_path(work: Planted) -> None:
    def make(original: Any) -> Any:
        def path(self: Any, node_id: int) -> list[int]:
            work.fired += bool(original(self, node_id))
            return []

        return path

    work.swap("specdec.sampling.history:_RequestHistory.path", make)


# ---------------------------------------------------------------------- draws and distributions

_REJECTION = ("strategy=speculative", "verifier=rejection", "sampling=t06")


@bug("the correction token is drawn from the target, not from the residual", *_REJECTION)
def correction_from_target(work: Planted) -> None:
    def make(original: Any) -> Any:
        def residual(target: Any, draft: Any) -> Any:
            work.fired += 1
            return target

        return residual

    work.swap("specdec.verifiers.rejection:_residual", make)


@bug("the rejection test is given the draft's probabilities before processors", *_REJECTION)
def draft_probs_unprocessed(work: Planted) -> None:
    def make(original: Any) -> Any:
        def candidates(self: Any, state: Any, nodes: Any, works: Any, logits: Any, k: int) -> Any:
            found = original(self, state, nodes, works, logits, k)
            if found.probs is None:
                return found
            raw = torch.softmax(logits.double(), dim=1).cpu().numpy()
            work.fired += not np.allclose(raw, found.probs)
            return replace(found, probs=raw)

        return candidates

    work.swap("specdec.sources.draft_model:DraftModelSource._candidates", make)


@bug("an acceptance test reuses the draw of its candidate", *_REJECTION, listed=False)
def accept_shares_draft_draw(work: Planted) -> None:
    def make(original: Any) -> Any:
        def uniform(self: Any, prompt_id: int, positions: Any, purpose: Any, index: Any = 0) -> Any:
            if purpose == Purpose.ACCEPT:
                work.fired += 1
                purpose = Purpose.DRAFT
            return original(self, prompt_id, positions, purpose, index)

        return uniform

    work.swap("specdec.sampling.keyed_draws:KeyedDraws.uniform", make)


class _FirstDraws:
    """Draws of one prompt, whoever asks."""

    def __init__(self, draws: Any, prompt_id: int) -> None:
        self._draws = draws
        self._prompt_id = prompt_id

    def uniform(self, prompt_id: int, *key: Any) -> Any:
        """The draw of the first prompt of the batch."""
        return self._draws.uniform(self._prompt_id, *key)


@bug(
    "all requests of a batch are sampled by the first one's draws",
    "strategy=speculative",
    "sampling=t08",
)
def draw_shared_in_batch(work: Planted) -> None:
    def make(original: Any) -> Any:
        def answer(self: Any, batch: Any, logits: Any) -> Any:
            draws = self._draws
            work.fired += len(batch.trees) > 1
            self._draws = _FirstDraws(draws, batch.trees[0].request)
            try:
                return original(self, batch, logits)
            finally:
                self._draws = draws

        return answer

    work.swap("specdec.executors.answerer:ModelAnswerer.answer", make)


@bug("draws do not depend on the prompt", "strategy=speculative", "sampling=t08", listed=False)
def draw_not_keyed_by_request(work: Planted) -> None:
    def make(original: Any) -> Any:
        def uniform(self: Any, prompt_id: int, *key: Any, **named: Any) -> Any:
            work.fired += prompt_id != 0
            return original(self, 0, *key, **named)

        return uniform

    work.swap("specdec.sampling.keyed_draws:KeyedDraws.uniform", make)


@bug("of equally probable tokens a tree's rows take the last", "strategy=specinfer")
def tie_broken_differently(work: Planted) -> None:
    def make(original: Any) -> Any:
        def argmax(logits: torch.Tensor) -> Any:
            first = original(logits)
            if len(first) < 2:
                return first
            last = logits.shape[1] - 1 - original(logits.flip(1))
            work.fired += bool((first != last).any())
            return last

        return argmax

    work.swap("specdec.sampling.host:argmax", make)


# ---------------------------------------------------------------------- no bug


def _nothing(work: Planted) -> None:
    """Leaves the code as it is."""


SOUND = frozenset({"sound_chain", "sound_rejection", "sound_pipeline"})
"""Controls: no bug, in configurations that the bugs are planted in."""

for _name, _words in {
    "sound_chain": BUGS["draw_shared_in_batch"].overrides,
    "sound_rejection": BUGS["correction_from_target"].overrides,
    "sound_pipeline": BUGS["reroot_keeps_sibling"].overrides,
}.items():
    BUGS[_name] = Bug(_name, "none", _nothing, _words, False)
