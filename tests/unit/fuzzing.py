"""Generators of bad input, and what must become of it: it is used, or refused in one line."""

from __future__ import annotations

import json
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from specdec.cli.main import BAD_INPUT, _explain

CASES = int(os.environ.get("SPECDEC_FUZZ", "200"))
"""Number of cases over all tests; with the variable set they differ from run to run."""

CPU_LIMIT_S, WALL_LIMIT_S = 20.0, 300.0
LONGEST_LINE = 1200

T = TypeVar("T")


def share(fraction: float) -> Callable[[T], T]:
    """Decorator: this fraction of the cases."""
    return settings(
        max_examples=max(1, round(CASES * fraction)),
        derandomize="SPECDEC_FUZZ" not in os.environ,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )


class TooLong(BaseException):
    """A case that does not end."""


@contextmanager
def time_limit() -> Iterator[None]:
    """Ends a case that takes ``CPU_LIMIT_S`` of CPU time, or waits for ``WALL_LIMIT_S``."""

    def end(_number: int, _frame: object) -> None:
        raise TooLong

    timers = (
        (signal.SIGPROF, signal.ITIMER_PROF, CPU_LIMIT_S),
        (signal.SIGALRM, signal.ITIMER_REAL, WALL_LIMIT_S),
    )
    before = [signal.signal(number, end) for number, _, _ in timers]
    for _, timer, seconds in timers:
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for (number, timer, _), handler in zip(timers, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)


def used_or_refused(work: Callable[[], object]) -> int:
    """Runs a case as the command line does; returns its exit status.

    Raises:
        AssertionError: it raises something without a message for users, or takes too long.
    """
    try:
        with time_limit():
            work()
    except TooLong as error:
        raise AssertionError("a case does not end:\n" + traceback.format_exc()) from error
    except Exception as error:
        message, status = _explain(error)
        assert message, f"a traceback:\n{traceback.format_exc()}"
        assert status == BAD_INPUT or message.startswith("memory is used up"), message
        assert len(message) <= LONGEST_LINE, f"{len(message)} characters: {message}"
        assert "\n" not in message
        message.encode()
        return status
    return 0


# ---------------------------------------------------------------------- values

NUMBERS = st.sampled_from(
    [0, -1, 1, 3, 2**31, 2**62, 2**63, -(2**63), 2**64, 10**30, 10**400]
    + [0.0, -0.0, 0.5, 1.5, 1e-320, 1e308, float("inf"), float("-inf"), float("nan")]
)
TEXTS = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        [*("", " ", "a" * 5000, "null", "nan", "\0", "\ud800", "\U0001f600", "\u202e", "a\nb")]
        + [*("${oc.env:HOME}", "${x}", "${", "{}", "[", "'", '"', "../..", "/", "~", "*", "-1")]
        + [*("%s%n", "<script>", "{{ x }}", "a/b/c", ".", "specdec.policies.Chain", "1e9999")]
    ),
)
SCALARS = st.one_of(NUMBERS, TEXTS, st.booleans(), st.none())
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)


def deep(opening: str, closing: str) -> st.SearchStrategy[str]:
    """Text nested from a few to a hundred thousand levels."""
    return st.sampled_from([3, 60, 500, 100_000]).map(lambda n: opening * n + closing * n)


def as_json(value: object) -> str:
    """JSON as other programs write it: with NaN, half characters and huge numbers."""
    return json.dumps(value)


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """Content of a file with up to four bytes or pieces changed, lost or repeated."""
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        kind = draw(st.sampled_from(["byte", "cut", "lose", "repeat", "insert"]))
        if kind == "byte" and data:
            data[at] = draw(st.integers(0, 255))
        elif kind == "cut":
            del data[at:]
        elif kind == "lose":
            del data[at : at + draw(st.integers(1, 30))]
        elif kind == "repeat":
            data[at:at] = data[at : at + 40] * draw(st.integers(1, 5))
        else:
            data[at:at] = draw(st.sampled_from([b"\0", b"\t", b"\xff", b"[" * 200, b"9" * 5000]))
    return bytes(data)


def edited(content: dict[str, Any], extra: tuple[str, ...] = ()) -> st.SearchStrategy[Any]:
    """A mapping with some values replaced and some keys lost."""
    keys = st.sampled_from([*content, *extra])
    changes = st.dictionaries(keys, VALUES, max_size=3)
    lost = st.sets(keys, max_size=2)
    return st.builds(
        lambda new, gone: {k: v for k, v in {**content, **new}.items() if k not in gone},
        changes,
        lost,
    )


def write(path: Path, content: str | bytes) -> Path:
    """Writes a file; half characters as they are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
    path.write_bytes(data)
    return path
