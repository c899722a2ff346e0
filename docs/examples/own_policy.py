"""A policy outside the library, from Python: compared with a fixed chain, then certified.

Run it as a script, or cell by cell in an editor with cell marks. The policy is in careful.py beside
this file; conf/ has its YAML for the command line.
"""

# %% The bundled models, and two strategies that differ only in the policy
import numpy as np
from careful import Careful

from specdec.compose.workbench import Parts, Workbench
from specdec.interfaces import TreePolicy
from specdec.pairs import PretrainedPair
from specdec.policies import Chain
from specdec.sampling.transform import SamplingParams
from specdec.sources import DraftModelSource
from specdec.state import RequestState, StopRules
from specdec.testing import assert_lossless_parts
from specdec.verifiers import MatchVerifier

pair = PretrainedPair(target="bundled:target", draft="bundled:draft")
bench = Workbench(pair, seed=0)


def strategy(bench: Workbench, policy: TreePolicy) -> Parts:
    """Draft model, the given policy, token-for-token verification."""
    source = DraftModelSource(runner=bench.draft_runner())
    return bench.parts(source=source, policy=policy, verifier=MatchVerifier())


# %% Decode one prompt with both, step by step
assert pair.tokenizer is not None
ids = np.asarray(pair.tokenizer("def is_prime(n: int) -> bool:\n    ")["input_ids"], np.int64)


def decode(parts: Parts) -> RequestState:
    """The loop to its end; ``steps`` has one list of commits per step."""
    request = RequestState(
        request_id=0, prompt=ids, stop=StopRules(max_new_tokens=48), sampling=SamplingParams()
    )
    for _ in parts.decode(parts.new_state(), [request]):
        pass
    return request


policies: dict[str, TreePolicy] = {
    "chain": Chain(gamma=4),
    "careful": Careful(gamma=8, min_prob=0.6),
}
outputs = {}
for name, policy in policies.items():
    parts = strategy(bench, policy)
    request = decode(parts)
    outputs[name] = request.output
    tokens, passes = len(request.output), parts.executor.counters.passes
    drafted = parts.source.counters.passes
    print(f"{name:8} {tokens} tokens, {passes} target passes, {drafted} draft passes")

assert outputs["chain"] == outputs["careful"], "a policy never changes the text"

# %% Certify it: the checks of `specdec verify`, on small random models in float64
report = assert_lossless_parts(
    lambda bench: strategy(bench, Careful(gamma=8, min_prob=0.3)),
    checks=["greedy_parity", "tree_invariant"],
)
for check in report.checks:
    print(f"{check.name:16} {check.detail}")
