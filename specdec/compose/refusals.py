"""Refuses parts that cannot work together, by ``UserError`` with the reason and the remedy."""

from __future__ import annotations

from specdec.clocks import Clock, SimulatedClock
from specdec.errors import UserError
from specdec.interfaces import Executor, TokenSource, TreePolicy, Verifier
from specdec.types import ExecutorPlan, Lossless


def check_choice(policy: TreePolicy, verifier: Verifier, clock: Clock) -> None:
    """Refuses a policy that does not fit the verifier or the clock."""
    chooser, judge = type(policy).__name__, type(verifier).__name__
    at = "policy.inner" if hasattr(policy, "inner") else "policy"
    hidden = getattr(getattr(policy, "inner", policy), "draft_overlap", "none") == "full"
    if hidden and not isinstance(clock, SimulatedClock):
        raise UserError(
            f"{at}.draft_overlap=full hides all drafting, which only clock=simulated can do; use"
            f" {at}.draft_overlap=rule or none"
        )
    if not verifier.needs.draft_probs:
        return
    if getattr(policy, "time_dependent", False):
        raise UserError(
            f"{chooser} submits chains whose length depends on the times of passes, so with {judge}"
            " the output for a seed would; use verifier=match, or a policy of fixed rounds"
            " (policy=pearl, policy=ssd)"
        )
    if policy.value_dependent:
        remedy = "a policy that takes candidates in sampling order (policy=chain, policy=static)"
        if hasattr(policy, "draft_overlap"):  # only drafting ahead looks at values there
            chooser, remedy = (
                f"{chooser} with policy.draft_overlap=rule",
                "policy.draft_overlap=none",
            )
        raise UserError(
            f"{chooser} chooses among a node's candidates by their probability, which would bias"
            f" {judge}; use verifier=match, or {remedy}"
        )


def check_source(
    source: TokenSource, policy: TreePolicy, verifier: Verifier, target_vocab: int
) -> None:
    """Refuses a source that does not fit the policy, the verifier or the target's vocabulary."""
    name, judge, needs = type(source).__name__, type(verifier).__name__, source.needs
    if check := getattr(policy, "check_source", None):
        check(source)
    if verifier.needs.draft_probs and not getattr(source, "gives_probs", False):
        raise UserError(
            f"{judge} needs the distribution that candidates were sampled from, which {name} does"
            " not give; use verifier=match or source=draft_model"
        )
    if verifier.needs.draft_probs and needs.hidden and not getattr(policy, "serial", True):
        raise UserError(
            f"{name} drafts from hidden states that arrive after {type(policy).__name__} drafts on,"
            f" so its candidates, and with {judge} the output, would depend on the executor; use"
            " verifier=match or policy=chain"
        )
    if needs.target_draws and verifier.lossless is not Lossless.TOKEN:
        raise UserError(
            f"{name} reads the target's own draws, which is lossless under verifier=match only, not"
            f" under {judge}; use verifier=match or source.guess_draw=false"
        )
    if source.vocab_size not in (None, target_vocab):
        raise UserError(
            f"the source proposes from a vocabulary of {source.vocab_size} tokens, the target has"
            f" {target_vocab}; use a draft trained with the target's tokenizer (model.draft)"
        )


def check_executor(
    source: TokenSource, policy: TreePolicy, executor: ExecutorPlan | Executor
) -> None:
    """Refuses a planned or built executor that does not deliver what the source needs."""
    name, needs = type(source).__name__, source.needs
    if needs.exits and executor.latency == 1:
        raise UserError(
            f"{name} needs exits of the target before its answers, and on one stage"
            " (executor=local) both come at once: use executor=early_exit, which drafts with the"
            " layers before the exit and then verifies, or executor=pipeline with at least 2 stages"
            " and policy=ppsd or policy=ppsd_tree, which verifies while drafting"
        )
    if needs.exits and not getattr(policy, "follows_exits", False):
        raise UserError(
            f"{type(policy).__name__} drafts before it submits, but in a pipeline a token's exit"
            " comes after it was submitted: use policy=ppsd or policy=ppsd_tree, or draft first"
            " and verify then with executor=early_exit"
        )
    if isinstance(executor, ExecutorPlan):  # which does not state hidden states
        return
    early = {*needs.early_hidden} - {*getattr(executor, "early_hidden", ())}
    layers = sorted({missing.layer for missing in early | ({*needs.hidden} - {*executor.hidden})})
    if layers:
        raise UserError(
            f"{name} needs hidden states of target layers {layers}, which"
            f" {type(executor).__name__} does not deliver; choose another source or executor"
        )
