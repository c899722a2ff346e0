"""An executor is planned before models are loaded or processes started, and built afterwards."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specdec.errors import UserError
from specdec.interfaces import Executor
from specdec.types import ExecutorPlan, Needs

if TYPE_CHECKING:
    from specdec.pairs import ModelPair


@dataclass(frozen=True, slots=True)
class Planned:
    cls: type[Executor]
    plan: ExecutorPlan

    def build(self, needs: Needs, runtime: Mapping[str, Callable[[], Any]]) -> Executor:
        """Builds the executor; ``runtime`` has a factory for each object that it may request."""
        requested = [
            parameter
            for parameter in inspect.signature(self.cls.build).parameters.values()
            if parameter.kind is parameter.KEYWORD_ONLY
        ]
        objects = {p.name: runtime[p.name]() for p in requested if p.name in runtime}
        for parameter in requested:
            if parameter.name not in objects and parameter.default is parameter.empty:
                raise UserError(
                    f"{self.cls.__name__}.build requests {parameter.name!r}, which no run has:"
                    f" request some of {', '.join(runtime)}, or give it a default"
                )
        return self.cls.build(self.plan, needs, **objects)


def planned(cls: type[Executor], pair: ModelPair, **keys: Any) -> Planned:
    """Plans an executor, for ``Workbench.parts``.

        executor = planned(PipelineExecutor, pair, stages=8)

    The keys are those of the executor's configuration.
    """
    return Planned(cls, cls.plan(pair, **keys))
