"""Executors run the target model; a batch may be answered some steps after its submission."""

from typing import TYPE_CHECKING

from specdec.lazy import lazy_exports

if TYPE_CHECKING:
    from specdec.executors.early_exit import EarlyExitExecutor, FirstStage
    from specdec.executors.exits import ExitStage, NormHead
    from specdec.executors.local import LocalExecutor
    from specdec.executors.pipeline import PipelineExecutor
    from specdec.executors.replicas import ReplicasExecutor
    from specdec.executors.stage import Answerer, ExitReader, ModelAnswerer, ModelStage, Stage

__getattr__, __dir__ = lazy_exports(__name__)
