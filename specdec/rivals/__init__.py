"""Other CPU runtimes as rows of our tables, each in a Python environment of its own."""

from specdec.rivals.environments import RUNTIMES, Runtime, install
from specdec.rivals.process import Generation, RivalProcess

__all__ = ["RUNTIMES", "Generation", "RivalProcess", "Runtime", "install"]
