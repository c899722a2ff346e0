"""What a copy of the target in another process is told, and when."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from specdec.clocks import MeasuredClock
from specdec.executors.replicas import TargetCopy
from specdec.types import Batch, Commit, Output
from tests.states import new_commit


class _Process:
    """An executor whose process learns of requests with a batch, as ``DistributedExecutor``'s."""

    def __init__(self) -> None:
        self.known: set[int] = set()
        self.commits: list[tuple[int, int]] = []  # request, step
        self._opens: list[int] = []
        self._closes: list[int] = []
        self._in_step = False

    def open(self, request: Any) -> None:
        self._opens.append(request.id)

    def close(self, request_id: int) -> None:
        self._closes.append(request_id)

    def submit(self, batch: Batch) -> None:
        assert not self._in_step
        self._in_step = True
        self.known = (self.known | {*self._opens}) - {*self._closes}
        self._opens, self._closes = [], []

    def collect(self) -> Output:
        return Output(step=0)

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        assert self._in_step
        self._in_step = False
        for commit in commits:
            assert commit.request in self.known, "the process has not heard of the request"
            self.commits.append((commit.request, commit.step))


def _copy() -> tuple[TargetCopy, _Process]:
    process = _Process()
    return TargetCopy(process, MeasuredClock(), None), process


def _commit(request: int, step: int) -> Commit:
    return new_commit(request, step, retired=(step,), kept=(step + 1,), prefix_len=step)


def _request(request_id: int) -> Any:
    return SimpleNamespace(id=request_id)


def test_commits_wait_until_the_process_knows_their_request() -> None:
    """A request that opens while the copy is busy reaches its process with the next batch."""
    copy, process = _copy()
    copy.open(_request(1))
    copy.start(Batch(step=1))
    copy.open(_request(2))
    copy.commit([_commit(1, 1), _commit(2, 1)])
    copy.commit([_commit(2, 2)])
    copy.finish()
    assert process.commits == [(1, 1)]
    copy.commit([_commit(1, 3)])
    copy.start(Batch(step=4))
    assert process.commits == [(1, 1), (2, 1), (2, 2), (1, 3)], "all, in their order"
    copy.commit([_commit(2, 4)])
    copy.finish()
    assert process.commits[-1] == (2, 4)
