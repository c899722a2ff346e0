"""Bounds of arguments: what is read from an annotation's text, and what a constructor refuses."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Literal

import pytest

from specdec.config.options import options, own_values
from specdec.parts.fields import Annotation, Bound, Count, Share, validated
from specdec.parts.signatures import parameters

NAN = float("nan")


@pytest.mark.parametrize(
    ("text", "good", "bad", "said"),
    [
        ("Count", [1, 7], [0, -1, 1.5, True, "3", None], "a whole number of at least 1"),
        ("Count | None", [1, None], [0], "a whole number of at least 1 or null"),
        ("Share", [0, 0.5, 1], [-0.1, 1.1, NAN, True], "a number of at least 0 and at most 1"),
        ("PositiveShare", [0.1, 1], [0, 2], "a number above 0 and at most 1"),
        ("Annotated[float, Bound(above=-1)]", [0, 5.5], [-1, NAN], "a number above -1"),
        ("Sequence[Count]", [[1], (1, 2), []], [[1, 0], 3, "113"], "a list of whole numbers"),
        ("Count | Literal['soon']", [2, "soon"], [0, "late"], "whole number .* or one of soon"),
        ("typing.Annotated[int, specdec.parts.fields.Bound(at_most=3)]", [-5, 3], [4], "at most 3"),
        ("Optional[int]", [0, None], ["a"], "a whole number or null"),
        ("typing.Union[Count, str]", [1, "a"], [0, None], "at least 1 or a text"),
        ("int | str", [0, "a"], [1.5, None], "a whole number or a text"),
        ("Mapping[str, int]", [{}], [3], "a mapping"),
    ],
)
def test_an_annotation_is_read_from_its_text(
    text: str, good: list[object], bad: list[object], said: str
) -> None:
    annotation = Annotation(text)
    assert annotation.plain
    assert [value for value in good if not annotation.accepts(value)] == []
    assert [value for value in bad if annotation.accepts(value)] == []
    assert Annotation(f"{text} | Chain").plain is False, "an object is none of YAML's"
    with pytest.raises(ValueError, match=said):
        raise ValueError(annotation.refusal)


class Part:
    @validated
    def __init__(
        self,
        size: Count,
        *,
        shares: Sequence[Share] = (),
        low: Annotated[float, Bound(at_least=2, remedy="or leave it out")] | None = None,
        word: Literal["a", "b"] = "a",
        inner: Part | None = None,
    ) -> None:
        self.given = (size, shares, low, inner)


def test_a_constructor_keeps_to_its_signature() -> None:
    assert Part(2, low=None).given == (2, (), None, None)
    assert Part(size=3, shares=[0.5], inner=Part(1)).given[:2] == (3, [0.5])
    assert list(inspect.signature(Part).parameters) == ["size", "shares", "low", "word", "inner"]
    for make, words in [
        (lambda: Part(0), "size=0 cannot be used: it must be a whole number of at least 1"),
        (lambda: Part(1, shares=[0.5, 2.0]), r"shares=\[0.5, 2.0\]"),
        (lambda: Part(1, word="c"), "word='c' cannot be used: it must be one of a, b"),  # type: ignore[arg-type]
        (lambda: Part(1, low=1), "of at least 2 or null; or leave it out"),
    ]:
        with pytest.raises(ValueError, match=words):
            make()
    with pytest.raises(TypeError, match="size"):
        Part()  # type: ignore[call-arg]


def test_evaluated_annotations_are_read_alike() -> None:
    """A module without ``from __future__ import annotations`` has objects in place of texts."""
    scope: dict[str, object] = {"Annotated": Annotated, "Bound": Bound, "Count": Count}
    source = "def make(self, *, a: Count, b: Annotated[float, Bound(above=0)] | None = None): pass"
    exec(compile(source, "<own>", "exec", dont_inherit=True), scope)
    make = validated(scope["make"])  # type: ignore[arg-type]
    make(None, a=1, b=0.5)
    for wrong in ({"a": 0}, {"a": 1, "b": 0.0}):
        with pytest.raises(ValueError, match="cannot be used"):
            make(None, **wrong)


def test_every_part_that_states_bounds_also_keeps_them() -> None:
    """A signature read by the command line alone would let Python in by the back door."""
    found, open_doors = 0, []
    for group in ("source", "policy", "verifier"):
        for path in options(group, ()).values():
            target = own_values(path).get("_target_")
            if target is None:
                continue
            stated = [p for p in parameters(target).values() if p.annotation]
            if any(Annotation(p.annotation).validated for p in stated):
                found += 1
                module, _, name = target.rpartition(".")
                made = getattr(import_module(module), name).__init__
                open_doors += [] if hasattr(made, "__wrapped__") else [target]
    assert found > 15
    assert not open_doors
