"""Refuses parts that cannot work together, by ``UserError`` with the reason and the remedy."""

from __future__ import annotations

from specdec.clocks import Clock, SimulatedClock
from specdec.errors import UserError
from specdec.interfaces import Executor, TokenSource, TreePolicy, Verifier
from specdec.policies import Static
from specdec.types import Lossless


def check_choice(policy: TreePolicy, verifier: Verifier, clock: Clock) -> None:
    """Refuses a policy that does not fit the verifier or the clock."""
    at = "policy.inner" if hasattr(policy, "inner") else "policy"
    hidden = getattr(getattr(policy, "inner", policy), "draft_overlap", "none") == "full"
    if hidden and not isinstance(clock, SimulatedClock):
        raise UserError(
            f"{at}.draft_overlap=full hides all drafting, which only clock=simulated can do; use"
            f" {at}.draft_overlap=rule or none"
        )
    if verifier.needs.draft_probs and getattr(policy, "time_dependent", False):
        raise UserError(
            f"{type(policy).__name__} submits chains whose length depends on the times of passes,"
            f" so with {type(verifier).__name__} the output for a seed would; use verifier=match,"
            " or a policy of fixed rounds (policy=pearl, policy=ssd)"
        )
    if verifier.needs.draft_probs and policy.value_dependent:
        who, remedy = type(policy).__name__, "a policy that takes candidates in sampling order"
        remedy += " (policy=chain, policy=static)"
        if isinstance(policy, Static):  # only drafting ahead looks at values there
            who, remedy = f"{who} with policy.draft_overlap=rule", "policy.draft_overlap=none"
        raise UserError(
            f"{who} chooses among a node's candidates by their probability, which would bias"
            f" {type(verifier).__name__}; use verifier=match, or {remedy}"
        )


def check_source(
    source: TokenSource, policy: TreePolicy, verifier: Verifier, target_vocab: int
) -> None:
    """Refuses a source that does not fit the policy, the verifier or the target's vocabulary."""
    name, judge = type(source).__name__, type(verifier).__name__
    if check := getattr(policy, "check_source", None):
        check(source)
    if verifier.needs.draft_probs and not getattr(source, "gives_probs", False):
        raise UserError(
            f"{judge} needs the distribution that candidates were sampled from, which {name} does"
            " not give; use verifier=match or source=draft_model"
        )
    late = source.needs.hidden and not getattr(policy, "serial", True)
    if verifier.needs.draft_probs and late:
        raise UserError(
            f"{name} drafts from hidden states that arrive after {type(policy).__name__} drafts on,"
            f" so its candidates, and with {judge} the output, would depend on the executor; use"
            " verifier=match or policy=chain"
        )
    if source.needs.target_draws and verifier.lossless is not Lossless.TOKEN:
        raise UserError(
            f"{name} reads the target's own draws, which is lossless under verifier=match only, not"
            f" under {judge}; use verifier=match or source.guess_draw=false"
        )
    if source.vocab_size is not None and source.vocab_size != target_vocab:
        raise UserError(
            f"the source proposes from a vocabulary of {source.vocab_size} tokens, the target has"
            f" {target_vocab}; use a draft trained with the target's tokenizer (model.draft)"
        )


def check_exits(source: TokenSource, policy: TreePolicy, latency: int | None) -> None:
    """Refuses a source of early exits where the policy or the executor (its steps) has none."""
    if source.needs.exits and latency == 1:
        raise UserError(
            f"{type(source).__name__} needs exits of the target before its answers, and on one"
            " stage (executor=local) both come at once: use executor=early_exit, which drafts with"
            " the layers before the exit and then verifies, or executor=pipeline with at least 2"
            " stages and policy=ppsd or policy=ppsd_tree, which verifies while drafting"
        )
    if source.needs.exits and not getattr(policy, "follows_exits", False):
        raise UserError(
            f"{type(policy).__name__} drafts before it submits, but in a pipeline a token's exit"
            " comes after it was submitted: use policy=ppsd or policy=ppsd_tree, or draft first"
            " and verify then with executor=early_exit"
        )


def check_executor(source: TokenSource, policy: TreePolicy, executor: Executor) -> None:
    """Refuses an executor that does not deliver what the source needs."""
    check_exits(source, policy, executor.latency)
    early = set(source.needs.early_hidden) - set(getattr(executor, "early_hidden", ()))
    missing = (set(source.needs.hidden) - set(executor.hidden)) | early
    if missing:
        layers = sorted({name.layer for name in missing})
        raise UserError(
            f"{type(source).__name__} needs hidden states of target layers {layers}, which"
            f" {type(executor).__name__} does not deliver; choose another source or executor"
        )
