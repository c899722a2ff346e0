"""The strategies in Python and the presets in YAML are the same combinations."""

from __future__ import annotations

from functools import partial

import pytest

from specdec.compose.build import compose
from specdec.compose.workbench import Parts, Workbench
from specdec.config.hydra import compose_config
from specdec.executors import PipelineExecutor
from specdec.pairs import RandomPair
from strategies import (
    autoregressive,
    best_first,
    eesd,
    leviathan2023,
    medusa,
    pipedec,
    ppsd,
    specinfer,
    specpipe,
    specpipe_bf,
    specpipe_db,
    staged,
    swiftspec,
)

BUILDERS = {
    "ar": autoregressive.build,
    "speculative": leviathan2023.build,
    "specinfer": specinfer.build,
    "best_first": best_first.build,
    "swiftspec": swiftspec.build,
    "swiftspec_base": swiftspec.build_base,
    "staged": staged.build,
    "pipedec": pipedec.build,
    "specpipe": specpipe.build,
    "specpipe_bf": specpipe_bf.build,
    "specpipe_db": specpipe_db.build,
    "specpipe_db_adaptive": partial(specpipe_db.build, shared_width=True),
    "eesd": eesd.build,
    "eesd_ts": lambda bench: eesd.build(bench, max_gamma=10),
    "ppsd": ppsd.build,
    "medusa": medusa.build,
    "ppsd_tree": lambda bench: ppsd.build(bench, width=4, children=4),
}


@pytest.fixture(scope="module")
def pair() -> RandomPair:
    return RandomPair(num_layers=14, hidden_size=8, num_heads=2, exit_layer=2)


def described(parts: Parts) -> dict[str, object]:
    """Classes and public settings of the parts."""
    policy = {k: v for k, v in vars(parts.policy).items() if not k.startswith("_")}
    stages = parts.executor.latency if isinstance(parts.executor, PipelineExecutor) else None
    return {
        "source": type(parts.source).__name__,
        "policy": (type(parts.policy).__name__, policy),
        "verifier": type(parts.verifier).__name__,
        "stages": stages,
        "serving": parts.serving,
    }


@pytest.mark.parametrize("name", BUILDERS)
def test_python_and_yaml_build_the_same_strategy(name: str, pair: RandomPair) -> None:
    cfg = compose_config([f"strategy={name}", "model=random"]).values
    in_python = BUILDERS[name](Workbench(pair))  # type: ignore[operator]
    assert described(in_python) == described(compose(cfg, pair))


def test_staged_branches_at_the_start() -> None:
    """Staged 3.1: second choices where agreement is likeliest, none at the end of long paths.

    The shape once was 1,1,3,1,1,1: as many rows, more draft passes and fewer accepted tokens.
    """
    shape = list(staged.BRANCHING)
    assert shape[0] > 1 == shape[-1]
    assert shape == sorted(shape, reverse=True)
    assert compose_config(["strategy=staged"]).values["policy"]["branching"] == shape
