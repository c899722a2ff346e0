"""The builders of ``strategies``: the YAML preset with arguments in place of its values."""

from __future__ import annotations

import importlib
import inspect
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import strategies
from specdec.compose.workbench import Parts, Workbench
from specdec.config.hydra import compose_config
from specdec.pairs import RandomPair
from specdec.pairs.pretrained import build_pretrained
from specdec.pairs.random import build_random
from specdec.verifiers import RejectionVerifier
from strategies import (
    amusd,
    autoregressive,
    best_first,
    dsi,
    eagle,
    eesd,
    flowspec,
    leviathan2023,
    medusa,
    multi_exit,
    pearl,
    pipedec,
    pipeinfer,
    pipespec,
    ppsd,
    specinfer,
    specpipe,
    specpipe_bf,
    specpipe_db,
    ssd,
    staged,
    swiftspec,
)

FOLDER = Path(strategies.__path__[0])
MODULES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")


@pytest.fixture(scope="module")
def pair() -> RandomPair:
    return build_random(num_layers=14, middle_layers=7, hidden_size=8, num_heads=2, exit_layer=2)


def changed(build: Callable[..., Parts], **keys: Any) -> tuple[Callable[..., Parts], dict]:
    return build, keys


EVERY_ARGUMENT = {
    "ar": changed(autoregressive.build, stages=3),
    "speculative": changed(leviathan2023.build, gamma=2),
    "specinfer": changed(specinfer.build, branching=[2, 1], stages=3, draft_overlap="rule"),
    "best_first": changed(best_first.build, bs=9, w=2, d=2, min_mass=0.25, min_prob=0.125),
    "swiftspec": changed(swiftspec.build, bs=9, w=2, d=2, target_degree=3, draft_degree=1),
    "swiftspec_base": changed(swiftspec.build_base, bs=9, w=2, d=2, degree=3),
    "staged": changed(staged.build, branching=[2, 1]),
    "pipedec": changed(pipedec.build, width=5, children=3, stages=7),
    "specpipe": changed(specpipe.build, width=5, children=3, stages=7, levels_per_step=2),
    "specpipe_bf": changed(specpipe_bf.build, width=5, children=3, draft_passes=1, stages=7),
    "specpipe_db": changed(specpipe_db.build, width=5, children=3, stages=7, kv_tokens=640),
    "eesd": changed(eesd.build, gamma=2, stages=3),
    "eesd_ts": changed(eesd.build, max_gamma=4, stages=3),
    "ppsd": changed(ppsd.build, width=2, children=3, stages=5),
    "multi": changed(multi_exit.build, further_exits=[5], stages=5),
    "multi, serial": changed(multi_exit.build, gamma=2, further_exits=[5], stages=5),
    "eagle": changed(eagle.build, preset="eagle", branching=[3, 2], stages=3),
    "eagle2": changed(eagle.build, preset="eagle2", nodes=9, width=2, depth=2),
    "eagle3": changed(eagle.build, early=True),
    "amusd": changed(amusd.build, ahead=5, wait=False),
    "dsi": changed(dsi.build, lookahead=2, replicas=3),
    "pearl": changed(pearl.build, gamma=3),
    "pipespec": changed(pipespec.build, ahead=9, least=2),
    "ssd": changed(ssd.build, gamma=3, outcomes=7, acceptance=0.5, power=2.0),
    "pipeinfer": changed(pipeinfer.build, tokens=4, cutoff=0.3, recovery=0.2, decay=0.1, stages=5),
    "flowspec": changed(
        flowspec.build, nodes=20, segment=5, width=4, children=3, depth=2, stages=5
    ),
    "flowspec, grown": changed(flowspec.build, grown_nodes=9, grown_segment=7, idle_depth=2),
    "medusa": changed(medusa.build, heads=2, branching=[3, 2], stages=3),
}


def settings(parts: Parts) -> dict[str, Any]:
    """Public attributes of policy, source and serving, and the pipeline's length."""
    public = {k: v for part in (parts.policy, parts.source) for k, v in vars(part).items()}
    heads = getattr(parts.source, "_heads", None)
    return {
        **{k: v for k, v in public.items() if not k.startswith("_")},
        "heads": getattr(heads, "num_heads", None),
        "kv_tokens": parts.serving.kv_tokens,
        "further_exits": list(getattr(parts.source, "layers", ()))[1:],
    }


@pytest.mark.parametrize("name", EVERY_ARGUMENT)
def test_arguments_reach_the_parts(name: str, pair: RandomPair) -> None:
    build, keys = EVERY_ARGUMENT[name]
    parts = build(Workbench(pair), **keys)
    found = settings(parts)
    for key, value in keys.items():
        if key == "stages":
            assert parts.executor.latency in (1, value)
        elif key in found:
            same = (value, tuple(value)) if isinstance(value, list) else (value,)
            assert found[key] in same


@pytest.mark.parametrize("name", MODULES)
def test_the_example_runs(name: str) -> None:
    module = importlib.import_module(f"strategies.{name}")
    example = [line for line in inspect.getdoc(module).splitlines() if line.startswith("    ")]
    assert example, f"strategies/{name}.py shows no example"
    models = build_pretrained(
        target="bundled:target",
        draft="bundled:draft",
        middle="bundled:draft",
        ngram="bundled:ngram/samples.safetensors",
        exit_heads="bundled:heads",
        exit_layer=3,
        eagle_head="untrained",
    )
    names = {name: module, "bench": Workbench(models), "RejectionVerifier": RejectionVerifier}
    exec(textwrap.dedent("\n".join(example)), names)
    assert isinstance(names["parts"], Parts)


def test_a_verifier_replaces_the_preset_s(pair: RandomPair) -> None:
    parts = leviathan2023.build(Workbench(pair), verifier=RejectionVerifier())
    assert isinstance(parts.verifier, RejectionVerifier)
    assert parts.source.gives_probs  # type: ignore[attr-defined]


def test_staged_branches_at_the_start() -> None:
    """Staged 3.1: second choices where agreement is likeliest, none at the end of long paths.

    The shape once was 1,1,3,1,1,1: as many rows, more draft passes and fewer accepted tokens.
    """
    shape = compose_config(["strategy=staged"]).values["policy"]["branching"]
    assert shape[0] > 1 == shape[-1]
    assert shape == sorted(shape, reverse=True)
