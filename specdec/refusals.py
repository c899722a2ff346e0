"""Refuses parts that cannot work together, when they are composed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.clocks import ClockKind
from specdec.errors import UserError
from specdec.executors.exit_building import check_exits
from specdec.policies import StagedTree, Static
from specdec.policies.staged import cheap_source
from specdec.types import Lossless

if TYPE_CHECKING:
    from specdec.workbench import Parts


def check(parts: Parts, target_vocab: int) -> None:
    """Refuses parts that cannot work together, with the reason and the remedy.

    Raises:
        UserError: see the messages.
    """
    source, policy, verifier = parts.source, parts.policy, parts.verifier
    names = {k: type(getattr(parts, k)).__name__ for k in ("source", "policy", "verifier")}
    at = "policy"
    if isinstance(policy, StagedTree):
        try:
            cheap_source(source)
        except ValueError as error:
            raise UserError(str(error)) from error
        at = "policy.inner"
    hidden = getattr(getattr(policy, "inner", policy), "draft_overlap", "none") == "full"
    if hidden and parts.clock.kind is not ClockKind.SIMULATED:
        raise UserError(
            f"{at}.draft_overlap=full is a limit that no machine reaches, for clock=simulated"
            f" only; use {at}.draft_overlap=rule or none"
        )
    if verifier.needs.draft_probs and policy.value_dependent:
        who, remedy = names["policy"], "a policy that takes candidates in sampling order"
        remedy += " (policy=chain, policy=static)"
        if isinstance(policy, Static):  # only drafting ahead looks at values there
            who, remedy = f"{who} with policy.draft_overlap=rule", "policy.draft_overlap=none"
        raise UserError(
            f"{who} chooses among a node's candidates by their probability, which would bias"
            f" {names['verifier']}; use verifier=match, or {remedy}"
        )
    if verifier.needs.draft_probs and not getattr(source, "gives_probs", False):
        raise UserError(
            f"{names['verifier']} needs the distribution that candidates were sampled from, which"
            f" {names['source']} does not give; use verifier=match or source=draft_model"
        )
    if source.needs.target_draws and verifier.lossless is not Lossless.TOKEN:
        raise UserError(
            f"{names['source']} reads the target's own draws, which is lossless under"
            f" verifier=match only, not under {names['verifier']}; use verifier=match or"
            " source.guess_draw=false"
        )
    check_exits(source, policy, parts.executor)
    missing = set(source.needs.hidden_layers) - set(parts.executor.hidden_layers)
    if missing:
        raise UserError(
            f"{names['source']} needs hidden states of target layers {sorted(missing)}, which"
            f" {type(parts.executor).__name__} does not deliver; choose another source or executor"
        )
    if source.vocab_size is not None and source.vocab_size != target_vocab:
        raise UserError(
            f"the source proposes from a vocabulary of {source.vocab_size} tokens, the target has"
            f" {target_vocab}; use a draft trained with the target's tokenizer (model.draft)"
        )
