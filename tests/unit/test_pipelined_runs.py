"""PipeInfer and FlowSpec: their laws against simulated time, their runs, segments and cut-offs.

The synthetic pair has one class of positions and the profile constant times, so the simulated time
per token must be the law's, up to chance and the ends of texts. The bound is 5 %.
"""

import pytest

from experiments.open.time_laws import flowspec_time, pipeinfer_time
from specdec.compose.workbench import Parts, build
from tests.laws import one_class_bench, ranks, submitted_batches
from tests.states import new_request
from tests.unit.test_asynchronous import NUM_TOKENS, decoded

pytestmark = pytest.mark.slow

BOUND = 0.05


def submitted(parts: Parts, num_tokens: int = NUM_TOKENS) -> list[tuple[int, str]]:
    """(nodes submitted, kind of the commit or "") of every step of one request."""
    batches, kinds = submitted_batches(parts), list[str]()
    for commits in parts.decode(parts.new_state(), [new_request(1, (1,), num_tokens)]):
        kinds.append("".join(commit.kind for commit in commits))
    return list(zip([batch.num_nodes for batch in batches], kinds, strict=True))


# PipeInfer.


@pytest.mark.parametrize(
    ("alpha", "stages", "tokens", "draft", "cutoff", "recovery", "decay"),
    [
        (0.8, 6, 1, 1.0, 0.6, 0.15, 0.05),  # speculation pauses
        (0.6, 4, 3, 1.0, 0.7, 0.0, 0.05),  # and must wait
        pytest.param(
            0.9, 8, 3, 4.0, 0.1, 0.0, 0.0, marks=pytest.mark.exhaustive
        ),  # the draft is slower
        pytest.param(0.7, 1, 2, 1.0, 0.1, 0.05, 0.05, marks=pytest.mark.exhaustive),  # no pipeline
    ],
)
def test_pipeinfer_takes_the_time_of_its_law(
    alpha: float,
    stages: int,
    tokens: int,
    draft: float,
    cutoff: float,
    recovery: float,
    decay: float,
) -> None:
    run = {"tokens": tokens, "cutoff": cutoff, "recovery": recovery, "decay": decay}
    parts = build("pipeinfer", one_class_bench(alpha, 10.0, draft), stages=stages, **run)  # type: ignore[arg-type]
    law = pipeinfer_time(alpha=alpha, stages=stages, stage=10.0, draft=draft, **run)  # type: ignore[arg-type]
    time, _ = decoded(parts, num_requests=10, batch_size=10)  # their rows cost nothing
    assert time == pytest.approx(law, rel=BOUND)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("tokens", [1, 4])
def test_pipeinfers_law_without_a_cutoff_is_the_closed_form(alpha: float, tokens: int) -> None:
    stages, step = 5, max(10.0, 3.0 * tokens)
    closed = step * (1 - alpha) * (stages + alpha / (1 - alpha**tokens))
    law = pipeinfer_time(alpha=alpha, tokens=tokens, stages=stages, stage=10.0, draft=3.0)
    assert law == pytest.approx(closed)


def test_the_cutoff_rises_with_runs_and_falls_with_fruitless_attempts() -> None:
    """Before the first verdict: 0.5, 0.6, 0.7 begin runs, 0.8 (above 0.75) none, 0.7 one, ..."""
    run = {"tokens": 1, "cutoff": 0.5, "recovery": 0.1, "decay": 0.1}
    parts = build("pipeinfer", one_class_bench(0.75, 10.0, 1.0), stages=8, **run)  # type: ignore[arg-type]
    sizes = "".join(str(size) for size, _ in submitted(parts)[:8])
    assert sizes == "11110101"


# FlowSpec.


@pytest.mark.parametrize(
    ("alpha", "stages", "segment", "nodes", "draft", "num_requests"),
    [
        pytest.param(0.6, 4, 8, 40, 1e-6, 16, marks=pytest.mark.exhaustive),
        (0.6, 3, 6, 24, 0.5, 1),  # drafting between rounds
    ],
)
def test_flowspec_takes_the_time_of_its_law(
    alpha: float, stages: int, segment: int, nodes: int, draft: float, num_requests: int
) -> None:
    """Requests of a batch would wait for each other's drafting, so with a cost one is alone."""
    width, depth = nodes // 3, nodes // 3
    sizes = {"segment": segment, "grown_segment": segment, "nodes": nodes, "grown_nodes": nodes}
    beam = {"width": width, "children": width, "depth": depth}
    parts = build("flowspec", one_class_bench(alpha, 10.0, draft), stages=stages, **sizes, **beam)
    law = flowspec_time(
        ranks=ranks(alpha)[:width],
        segment=segment,
        nodes=nodes,
        stages=stages,
        stage=10.0,
        between=(depth + 1) * draft,
    )
    num_tokens = 250 if num_requests > 1 else 2000
    batch = {"num_requests": num_requests, "batch_size": num_requests}
    time, _ = decoded(parts, num_tokens=num_tokens, **batch)
    assert time == pytest.approx(law, rel=BOUND)
