"""Arrival times of requests: all at once, a Poisson process, or read from a file."""

import math
from pathlib import Path

import numpy as np

from specdec.data.files import read_text
from specdec.errors import UserError
from specdec.types import FloatArray

AT_ONCE = "at_once"
POISSON = "poisson"


def arrival_times(
    arrivals: str, num: int, *, rate_per_s: float | None = None, seed: int = 0
) -> FloatArray:
    """Returns float64[num]: arrival times in seconds since the start of the run, not decreasing.
    ``arrivals`` is at_once, poisson (with ``rate_per_s``), or a text file with one time per line.
    """
    if (arrivals == POISSON) != (rate_per_s is not None):
        rate = "null" if rate_per_s is None else rate_per_s
        raise UserError(
            f"serving.arrivals={arrivals} with serving.rate_per_s={rate}: serving.arrivals=poisson"
            " needs a rate, and other arrivals take none"
        )
    if arrivals == AT_ONCE:
        return np.zeros(num)
    if rate_per_s is not None:
        gaps = np.random.default_rng(seed).exponential(1.0 / rate_per_s, num)
        times: FloatArray = np.cumsum(gaps)
        return times
    times = _read(Path(arrivals).expanduser())
    if len(times) < num:
        raise UserError(
            f"serving.arrivals={arrivals} has {len(times)} arrivals for {num} requests: lower"
            f" data.limit to {len(times)}, or give a longer file"
        )
    return times[:num]


def _read(path: Path) -> FloatArray:
    if not path.is_file():
        raise UserError(
            f"serving.arrivals={path} is neither {AT_ONCE} nor {POISSON} nor a file of arrival"
            " times, one in seconds per line"
        )
    times: list[float] = []
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            at = float(line)
        except ValueError:
            at = math.nan
        if not (math.isfinite(at) and at >= 0):
            raise UserError(
                f"serving.arrivals={path} line {number} is {line.strip()[:40]!r}: give seconds of"
                " at least 0, one number per line"
            )
        times.append(at)
    return np.sort(np.array(times))
