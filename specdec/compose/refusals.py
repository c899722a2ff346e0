"""Refuses parts that cannot work together, by ``UserError`` with the reason and the remedy.

A rule that concerns only one policy or executor is in that class (``check``, ``check_clock``, ...).
"""

from __future__ import annotations

from specdec.clocks import Clock
from specdec.errors import UserError
from specdec.interfaces import Executor, TokenSource, TreePolicy, Verifier
from specdec.types import ExecutorPlan, Lossless


def check_choice(policy: TreePolicy, verifier: Verifier, clock: Clock) -> None:
    name, judge = type(policy).__name__, type(verifier).__name__
    policy.check_clock(clock)
    if verifier.needs.draft_probs and policy.time_dependent:
        raise UserError(
            f"{name} submits chains whose length depends on the times of passes, so with {judge}"
            " the output would depend on them too; use verifier=match, policy=pearl or policy=ssd"
        )
    if verifier.needs.draft_probs and policy.value_dependent:
        raise UserError(
            f"{name} chooses among a node's candidates by their probability, which would bias"
            f" {judge}; use verifier=match, policy=chain, or policy=static (draft_overlap=none)"
        )


def check_source(
    source: TokenSource, policy: TreePolicy, verifier: Verifier, target_vocab: int
) -> None:
    name, judge, needs = type(source).__name__, type(verifier).__name__, source.needs
    policy.check_source(source)
    if verifier.needs.draft_probs and not source.gives_probs:
        raise UserError(
            f"{judge} needs the distribution that candidates were sampled from, which {name} does"
            " not give; use verifier=match or source=draft_model"
        )
    if verifier.needs.draft_probs and needs.hidden and not policy.serial:
        raise UserError(
            f"{name} gets hidden states after {type(policy).__name__} drafts on, so with {judge}"
            " the output would depend on the executor; use verifier=match or policy=chain"
        )
    if needs.target_draws and verifier.lossless is not Lossless.TOKEN:
        raise UserError(
            f"{name} reads the target's own draws, which only verifier=match keeps lossless; use"
            " verifier=match or source.guess_draw=false"
        )
    if source.vocab_size not in (None, target_vocab):
        raise UserError(
            f"the source proposes from a vocabulary of {source.vocab_size} tokens, the target has"
            f" {target_vocab}; use a draft trained with the target's tokenizer (model.draft)"
        )


def check_executor(
    source: TokenSource, policy: TreePolicy, executor: ExecutorPlan | Executor
) -> None:
    """Refuses an executor, or its plan, that does not deliver what the source needs."""
    name, needs = type(source).__name__, source.needs
    if needs.exits and (executor.latency == 1 or not policy.follows_exits):
        why = f"{type(policy).__name__} drafts before it submits, but a token's exit comes after"
        if executor.latency == 1:
            why = f"{name} needs exits before the answers, but one stage gives both at once"
        raise UserError(
            f"{why}; use executor=early_exit, or executor=pipeline with at least 2 stages and"
            " policy=ppsd or policy=ppsd_tree"
        )
    if isinstance(executor, ExecutorPlan):  # a plan does not state its hidden states
        return
    early = {*needs.early_hidden} - {*executor.early_hidden}
    layers = sorted({missing.layer for missing in early | ({*needs.hidden} - {*executor.hidden})})
    if layers:
        raise UserError(
            f"{name} needs hidden states of target layers {layers}, which"
            f" {type(executor).__name__} does not deliver; choose another source or executor"
        )
