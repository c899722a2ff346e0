"""Checks what parts from outside the library return, at the call that returns it.

A token outside the vocabulary or a ``None`` would otherwise surface as an error of torch far from
its cause. The library's own parts are tested instead, and are not checked in every step.
"""

from collections.abc import Callable, Sequence, Sized
from functools import wraps
from typing import Any

import numpy as np

from specdec.config.job import nodes_of
from specdec.errors import UserError
from specdec.interfaces import Executor, TokenSource, TreePolicy, Verifier
from specdec.policies.tree_growth import last_position
from specdec.state import DecodeState, RequestState
from specdec.types import NO_NODE, NO_TOKEN, Candidates, Nodes, Output, Verdict


class BrokenPart(UserError):
    """A part returned what its interface does not allow."""


def is_outside(node: object) -> bool:
    """Returns whether ``node``, or a node nested in it, names a class outside this library."""
    named = [str(each["_target_"]) for each in nodes_of(node) if "_target_" in each]
    return not all(name.startswith(("specdec.", "strategies.")) for name in named)


def _wrong_type(found: object, wanted: type) -> str:
    what = "None" if found is None else f"an object of type {type(found).__name__}"
    return "" if isinstance(found, wanted) else f"{what}, but must return {wanted.__name__}"


def candidates_fault(
    found: Candidates, vocab_size: int | None, _state: DecodeState, nodes: Sized, k: int
) -> str:
    """Says which rule of ``Candidates`` the result of ``expand`` breaks; "" if none."""
    tokens, logprobs, counts, num_nodes = found.tokens, found.logprobs, found.counts, len(nodes)
    if not all(isinstance(array, np.ndarray) for array in (tokens, logprobs, counts)):
        return "candidates whose tokens, logprobs or counts are no NumPy arrays"
    if tokens.ndim != 2 or len(tokens) != num_nodes or counts.shape != (num_nodes,):
        return (
            f"tokens of shape {tokens.shape} and counts of shape {counts.shape}, but must have one"
            f" row for each of {num_nodes} nodes"
        )
    if tokens.shape != logprobs.shape:
        return "tokens and logprobs that differ in shape"
    if tokens.shape[1] > k:
        return f"more than k={k} candidates"
    if not tokens.dtype == counts.dtype == np.int64:
        types = f"tokens of {tokens.dtype} and counts of {counts.dtype}"
        return f"{types}: tokens and counts must be int64"
    if ((counts < 0) | (counts > tokens.shape[1])).any():
        return "counts that are negative or above the number of columns"
    valid = np.arange(tokens.shape[1]) < counts[:, None]
    limit = vocab_size or np.iinfo(np.int64).max
    if ((tokens < 0) | (tokens >= limit))[valid].any():
        return f"a token outside the vocabulary of {vocab_size}"
    if any(len({*row[of]}) < of.sum() for row, of in zip(tokens, valid, strict=True)):
        return "the same token twice: candidates of a node must differ"
    if not (logprobs[valid] <= 0).all():
        return "log-probabilities that are not numbers of at most 0"
    return ""


def _nodes_fault(found: Nodes, _vocab_size: int, state: DecodeState, _source: TokenSource) -> str:
    for request_id, ids in found.items:
        request = state.requests.get(request_id)
        if request is None:
            return f"nodes of request {request_id}, which is not live"
        if fault := selection_fault(request, ids):
            return f"nodes of request {request_id} that break a rule: {fault}"
    return ""


def selection_fault(request: RequestState, ids: Any) -> str:
    """Says which rule of ``TreePolicy.select`` the nodes ``ids`` of a request break; "" if none."""
    ids, tree = np.asarray(ids), request.tree
    if ids.ndim != 1 or (len(ids) and ids.dtype.kind != "i"):
        return f"ids of shape {ids.shape} and dtype {ids.dtype}, not int64[W]"
    slots = tree.slots(ids.astype(np.int64))
    parents, submitted = tree.parents[slots], tree.submitted_at
    known = np.isin(parents, slots) | (submitted[parents] >= 0) | (slots == 0)
    faults = {
        "a chosen node is not in the tree": NO_NODE in slots,
        "chosen nodes must be in order, and none twice": (np.diff(slots) <= 0).any(),
        "a node is submitted twice": (submitted[slots] >= 0).any(),
        "a node is submitted before its parent": not known.all(),
        "a node lies beyond max_new_tokens": tree.positions.max() > last_position(request),
        "the prompt is not yet computed": len(ids) and request.prefill_sent != request.num_prefill,
    }
    return next((fault for fault, is_found in faults.items() if is_found), "")


def _verdicts_fault(
    found: Sequence[Verdict], vocab_size: int, _state: DecodeState, requests: Sequence[RequestState]
) -> str:
    trees = {request.id: request.tree for request in requests}
    for verdict in found:
        if fault := _wrong_type(verdict, Verdict):
            return f"a list with {fault}"
        if verdict.request not in trees:
            return f"a verdict on request {verdict.request}, which has no answered root"
        if not 0 <= verdict.next_token < vocab_size:
            return f"next_token={verdict.next_token}, outside the vocabulary of {vocab_size}"
        tree = trees[verdict.request]
        slots = tree.slots(np.asarray(verdict.accepted_ids, np.int64))
        if NO_NODE in slots or tree.parents[slots].tolist() != [0, *slots.tolist()][: len(slots)]:
            return "accepted_ids that are not a path from a child of the root"
    judged = {verdict.request for verdict in found}
    for request in requests:  # one whose nodes are in flight may be judged with their answers
        if request.id not in judged and not request.awaiting:
            return f"no verdict on request {request.id}, whose root is answered"
    return ""


def _answers_fault(found: Output, vocab_size: int, **_: object) -> str:
    for answers in found.answers:
        tokens = np.asarray(answers.tokens)
        if tokens.shape != np.shape(answers.node_ids):
            return f"{tokens.shape} tokens for {np.shape(answers.node_ids)} nodes"
        if ((tokens >= vocab_size) | ((tokens < 0) & (tokens != NO_TOKEN))).any():
            return f"an answer outside the vocabulary of {vocab_size}"
    return ""


_METHODS: dict[type, tuple[str, type, Callable[..., str]]] = {
    TokenSource: ("expand", Candidates, candidates_fault),
    TreePolicy: ("select", Nodes, _nodes_fault),
    Verifier: ("verify", list, _verdicts_fault),
    Executor: ("collect", Output, _answers_fault),
}
"""Base class of a part -> name of the method that is checked, the type that it must return, and a
function of the result, the vocabulary's size and the method's arguments that says what is wrong.
"""


def guard(part: Any, label: str, vocab_size: int) -> None:
    """Makes a part's checked method raise ``BrokenPart``, with ``label``, for a wrong result."""
    name, wanted, fault_of = next(of for base, of in _METHODS.items() if isinstance(part, base))
    method = getattr(part, name)

    @wraps(method)
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            found = method(*args, **kwargs)
        except Exception as error:
            error.add_note(f"in {name} of {label}")
            raise
        if fault := _wrong_type(found, wanted) or fault_of(found, vocab_size, *args, **kwargs):
            raise BrokenPart(f"{label}: {name} returned {fault}")
        return found

    object.__setattr__(part, name, checked)
