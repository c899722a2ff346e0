"""Other CPU runtimes as baselines, each in a separate Python environment."""

from specdec.rivals.endpoint import Endpoint, EndpointOptions
from specdec.rivals.environments import RUNTIMES, Runtime, install
from specdec.rivals.process import RivalOutput, RivalProcess

__all__ = [
    "RUNTIMES",
    "Endpoint",
    "EndpointOptions",
    "RivalOutput",
    "RivalProcess",
    "Runtime",
    "install",
]
