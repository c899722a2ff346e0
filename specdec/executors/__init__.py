"""Executors: asynchronous verification services that run the target model."""

from specdec.executors.answering import Answerer, ModelAnswerer, SyntheticAnswerer
from specdec.executors.local import LocalExecutor
from specdec.executors.pipeline import PipelineExecutor
from specdec.executors.stage import ModelStage, NullStage, Stage

__all__ = [
    "Answerer",
    "LocalExecutor",
    "ModelAnswerer",
    "ModelStage",
    "NullStage",
    "PipelineExecutor",
    "Stage",
    "SyntheticAnswerer",
]
