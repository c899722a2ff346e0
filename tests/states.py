"""Requests, states whose requests are live, commits and results, for tests of single parts."""

from collections.abc import Sequence

import numpy as np

from specdec.clocks import Clock, MeasuredClock
from specdec.clocks.meter import Meter
from specdec.metrics import RequestResult
from specdec.metrics.counters import RequestCounters
from specdec.sampling.keyed_draws import KeyedDraws
from specdec.sampling.transform import SamplingParams
from specdec.state import DecodeState, RequestState, StopRules
from specdec.types import Commit, CommitKind, IntArray


def new_request(
    request_id: int,
    prompt: Sequence[int] | IntArray = (1, 2, 3),
    max_new_tokens: int = 40,
    sampling: SamplingParams | None = None,
    *,
    stop: StopRules | None = None,
    arrival_s: float = 0.0,
) -> RequestState:
    return RequestState(
        request_id=request_id,
        prompt=np.asarray(prompt, np.int64),
        stop=stop or StopRules(max_new_tokens=max_new_tokens),
        sampling=sampling or SamplingParams(),
        arrival_s=arrival_s,
    )


def new_state(*requests: RequestState, seed: int = 0, clock: Clock | None = None) -> DecodeState:
    """The prompts of the requests have been sent to the target."""
    state = DecodeState(draws=KeyedDraws(seed=seed), clock=clock or MeasuredClock(), meter=Meter())
    for request in requests:
        request.prefill_sent = request.num_prefill
        state.requests[request.id] = request
    return state


def new_commit(
    request: int = 0,
    step: int = 0,
    *,
    retired: Sequence[int] = (0,),
    kept: Sequence[int] = (1,),
    prefix_len: int = 9,
) -> Commit:
    """The first of the kept nodes is the new root; tokens of retired nodes are their ids."""
    retired_ids = np.array(retired, np.int64)
    return Commit(
        request=request,
        step=step,
        kind=CommitKind.HIT,
        retired_ids=retired_ids,
        retired_tokens=retired_ids,
        next_token=1,
        root_id=kept[0],
        prefix_len=prefix_len,
        kept_ids=np.array(kept, np.int64),
    )


def new_result(
    request_id: int, counters: RequestCounters, origins: Sequence[int] = ()
) -> RequestResult:
    """A finished request of one prompt token, one token per origin."""
    return RequestResult(
        id=request_id,
        num_prompt=1,
        output=(5,) * len(origins),
        origins=tuple(origins),
        finish_reason="length",
        text="",
        emitted_s=(0.0,) * len(origins),
        arrival_s=0.0,
        admitted_s=0.0,
        counters=counters,
    )
