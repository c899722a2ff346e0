"""Validation of constructor arguments: the same from Python and from a configuration node."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, make_dataclass
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import pytest
from pydantic import Field

from specdec.config.options import options, own_values
from specdec.parts.build import build_part
from specdec.parts.fields import Count, Share, errors_of, expects, signature_of, validated
from specdec.parts.fields import Count as Number

if TYPE_CHECKING:
    from specdec.models.runner import ModelRunner

NAN, INF = float("nan"), float("inf")
Width = Annotated[int, Field(ge=1)]


class Mode(Enum):
    FAST = "fast"
    EXACT = "exact"


@dataclass
class Handle:
    """An object that the program passes."""

    size: int


@pytest.mark.parametrize(
    ("hint", "good", "bad", "message"),
    [
        (Count, [1, 7], [0, -1, 1.0, 1.5, True, "3", None], "a whole number of at least 1"),
        (Count | None, [1, None], [0, "1"], "a whole number of at least 1"),
        (Share, [0, 0.5, 1], [-0.1, 1.1, NAN, True, "0.5"], "it must be at least 0 and at most 1"),
        (Annotated[float, Field(gt=-1)], [0, 5.5], [-1, NAN, INF], "greater than -1"),
        (float, [1, 1.5], [NAN, INF, True, "1"], "it should be a"),
        (Sequence[Count], [[1], (1, 2), []], [[1, 0], 3, "113", [True]], "key"),
        (tuple[int, ...], [[1], (1, 2), []], [[1.0], "113"], "key"),
        (Count | Literal["soon"], [2, "soon"], [0, "late"], "at least 1 or it should be 'soon'"),
        (Literal["a", "b"], ["a", "b"], ["c", 1], "'a' or 'b'"),
        (Mode, ["fast", Mode.EXACT], ["slow", 1], "'fast' or 'exact'"),
        (Mapping[str, int], [{}, {"a": 1}], [3, {"a": "b"}], "key"),
        (Path, ["a/b", Path("a")], [3], "key=3"),
        (bool, [True, False], [0, 1, "true"], "valid boolean"),
        (Annotated[int, Field(ge=2), expects("it must be 2; or use X")], [2], [1], "or use X"),
    ],
)
def test_values_are_strict(hint: Any, good: list[Any], bad: list[Any], message: str) -> None:
    make = make_dataclass("Values", [("key", hint)])
    assert [value for value in good if errors_of(make, {"key": value})] == []
    assert [value for value in bad if not errors_of(make, {"key": value})] == []
    (error,) = errors_of(make, {"key": bad[0]}, "part.")
    assert error.startswith("part.key")
    assert message in error


class Part:
    @validated
    def __init__(
        self,
        size: Number,
        *,
        shares: Sequence[Share] = (),
        low: Annotated[float, Field(ge=2)] | None = None,
        word: Literal["a", "b"] = "a",
        width: Width = 1,
        inner: Part | None = None,
        runner: ModelRunner | None = None,
        handle: Handle | None = None,
        load: Callable[[int], int] = abs,
        free=None,
    ) -> None:
        self.given = (size, shares, low, inner)

    def run(self) -> None: ...


def test_a_constructor_keeps_to_its_signature() -> None:
    assert Part(2, low=None).given == (2, (), None, None)
    assert Part(size=np.int64(3), shares=[0.5], inner=Part(1)).given[:2] == (3, [0.5])
    assert list(inspect.signature(Part).parameters)[:3] == ["size", "shares", "low"]
    for make, words in [
        (lambda: Part(0), "size=0 cannot be used: it must be a whole number of at least 1"),
        (lambda: Part(1, shares=[0.5, 2.0]), r"shares\[1\]=2.0"),
        (lambda: Part(1, word="c"), "word='c' cannot be used: it should be 'a' or 'b'"),  # type: ignore[arg-type]
        (lambda: Part(1, low=1), "low=1 .* greater than or equal to 2"),
        (lambda: Part(1, width=0), "width=0"),
        (lambda: Part(NAN), "size=nan"),  # type: ignore[arg-type]
    ]:
        with pytest.raises(ValueError, match=words):
            make()
    with pytest.raises(TypeError, match="size"):
        Part()  # type: ignore[call-arg]


def test_nodes_become_parts() -> None:
    inner = {"_target_": f"{__name__}.Part", "size": 1}
    node = {"_target_": f"{__name__}.Part", "size": 2, "width": 3, "inner": inner}
    build_part(node, None, "p")
    part = build_part(node, {"handle": lambda: Handle(1), "size": lambda: 5}, "p")
    assert part.given[0] == 2, "a key of the node is not replaced"
    assert part.given[3].given == (1, (), None, None)
    assert build_part({**node, "size": 4}, {}, "p").given[0] == 4


def test_every_part_with_bounds_also_keeps_them_from_python() -> None:
    """Bounds that only the command line checked would let Python call with any value."""
    num_checked, open_doors = 0, []
    for group in ("source", "policy", "verifier"):
        for path in options(group, ()).values():
            target = own_values(path).get("_target_")
            if target is None:
                continue
            module, _, name = target.rpartition(".")
            cls = getattr(import_module(module), name)
            hints = str(inspect.signature(cls)) if signature_of(cls).plain else ""
            if any(word in hints for word in ("Count", "Share", "Annotated", "Literal", "_FROM")):
                num_checked += 1
                open_doors += [] if hasattr(cls.__init__, "__wrapped__") else [target]
    assert num_checked > 15
    assert not open_doors
