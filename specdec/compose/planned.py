"""The two phases of making an executor: its plan, then the object."""

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
    """An executor class with its plan.

    Attributes:
        cls: the class, a ``Executor``.
        plan: the result of its ``plan``.
    """

    cls: type[Executor]
    plan: ExecutorPlan

    def build(self, needs: Needs, runtime: Mapping[str, Callable[[], Any]]) -> Executor:
        """Second phase.

        Args:
            needs: of source and verifier.
            runtime: name -> factory of the object that ``build`` may request by that name.

        Raises:
            UserError: ``build`` requests an object that does not exist.
        """
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
    """First phase: the plan of an executor.

        executor = planned(PipelineExecutor, pair, stages=8)

    Args:
        cls: the executor's class, a ``Executor``.
        pair: target and draft.
        keys: configuration keys of the executor.

    Raises:
        UserError: keys that do not fit together or do not fit the models.
    """
    return Planned(cls, cls.plan(pair, **keys))
