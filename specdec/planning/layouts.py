from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

_DEGREES = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Which devices run target and draft.

    Attributes:
        degree: devices that share every layer of a stage (tensor parallelism).
        draft_degree: devices that share every layer of the draft.
        replicas: copies of the target.
        own_draft: whether the draft has devices of its own and works beside the target.
        others: devices of further models, one each.
    """

    stages: int = 1
    degree: int = 1
    draft_degree: int = 1
    replicas: int = 1
    own_draft: bool = False
    others: int = 0

    @property
    def target_devices(self) -> int:
        return self.stages * self.degree * self.replicas

    @property
    def devices(self) -> int:
        return self.target_devices + (self.draft_degree if self.own_draft else 0) + self.others

    def told(self) -> str:
        """Returns a text such as ``8 stages + draft``."""
        words = [f"{self.stages} stage{'s' * (self.stages > 1)}"] if self.stages > 1 else []
        words += [f"TP {self.degree}"] if self.degree > 1 else []
        words += [f"{self.replicas} copies"] if self.replicas > 1 else []
        draft = f"draft TP {self.draft_degree}" if self.draft_degree > 1 else "draft"
        told = " x ".join(words or ["1 device"]) + (f" + {draft}" if self.own_draft else "")
        return told + (f" + {self.others} more" if self.others else "")


def layouts(devices: int, *, own_draft: bool, staged: bool, copies: bool) -> Iterator[Layout]:
    """Yields layouts of target and draft on ``devices`` devices in total.

    Tensor-parallel degrees divide all devices of the target into stages. Further layouts run the
    target on one stage, or on pipelines of half, a quarter, ... of the devices. ``staged`` and
    ``copies`` say whether the executor has stages, or copies of the target on one device each.
    """
    seen = set()
    for draft_degree in _DEGREES if own_draft and staged else (1,):
        left = devices - (draft_degree if own_draft else 0)
        if left < 1 or (draft_degree > 1 and draft_degree > left):
            continue
        for layout in _of_target(left, staged, copies):
            kept = Layout(
                stages=layout.stages,
                degree=layout.degree,
                draft_degree=draft_degree,
                replicas=layout.replicas,
                own_draft=own_draft,
            )
            if kept not in seen:
                seen.add(kept)
                yield kept


def _of_target(left: int, staged: bool, copies: bool) -> Iterator[Layout]:
    if copies:
        yield from (Layout(replicas=number) for number in range(2, left + 1))
        return
    yield Layout()
    if not staged:
        return
    for degree in (d for d in _DEGREES if d <= left):
        yield Layout(stages=left // degree, degree=degree)
        yield Layout(degree=degree)
    half = left
    while half > 2:
        half //= 2
        yield Layout(stages=half)
