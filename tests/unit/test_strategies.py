"""``specdec.build``: the YAML preset with arguments in place of its values."""

from typing import Any

import pytest

import specdec
from specdec import UserError, build
from specdec.compose.workbench import Parts, Workbench
from specdec.config.hydra import compose_config
from specdec.pairs import RandomPair
from specdec.pairs.random import build_random


@pytest.fixture(scope="module")
def pair() -> RandomPair:
    return build_random(num_layers=14, middle_layers=7, hidden_size=8, num_heads=2, exit_layer=2)


def changed(preset: str, **keys: Any) -> tuple[str, dict[str, Any]]:
    return preset, keys


ARGUMENTS = {
    "specinfer": changed("specinfer", branching=[2, 1], stages=3, draft_overlap="rule"),
    "swiftspec": changed("swiftspec", bs=9, w=2, d=2, target_degree=3, draft_degree=1),
    "specpipe_db": changed("specpipe_db", width=5, children=3, stages=7, kv_tokens=640),
    "multi": changed("ppsd_multi", further_exits=[5], stages=5),
    "flowspec, grown": changed("flowspec", grown_nodes=9, grown_segment=7, idle_depth=2),
    "medusa": changed("medusa", heads=2, branching=[3, 2], stages=3),
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


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_reach_the_parts(name: str, pair: RandomPair) -> None:
    preset, keys = ARGUMENTS[name]
    parts = build(preset, Workbench(pair), **keys)
    found = settings(parts)
    for key, value in keys.items():
        if key == "stages":
            assert parts.executor.latency in (1, value)
        elif key in found:
            same = (value, tuple(value)) if isinstance(value, list) else (value,)
            assert found[key] in same


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"widht": 3}, "no key 'widht': did you mean width"),
        ({"policy.widht": 3}, "widht"),
        ({"width": 0}, "width=0"),
    ],
)
def test_keys_are_checked(keys: dict[str, Any], reason: str, pair: RandomPair) -> None:
    with pytest.raises((UserError, ValueError), match=reason):
        build("specpipe", Workbench(pair), **keys)


def test_the_bundled_pair_is_the_default() -> None:
    parts = specdec.build("suffix", bs=5)
    assert parts.policy.bs == 5  # type: ignore[attr-defined]
    assert parts.draws.seed == 0


def test_staged_branches_at_the_start() -> None:
    """Staged 3.1: second choices where agreement is likeliest, none at the end of long paths.

    The shape once was 1,1,3,1,1,1: as many rows, more draft passes and fewer accepted tokens.
    """
    shape = compose_config(["strategy=staged"]).values["policy"]["branching"]
    assert shape[0] > 1 == shape[-1]
    assert shape == sorted(shape, reverse=True)
