"""Other runtimes as baselines, each in a separate Python environment or behind HTTP."""

from typing import TYPE_CHECKING

from specdec.lazy import lazy_exports

if TYPE_CHECKING:
    from specdec.rivals.endpoint import Endpoint, EndpointOptions
    from specdec.rivals.runtimes import RUNTIMES, RivalOutput, RivalProcess, Runtime, install

__getattr__, __dir__ = lazy_exports(__name__)
