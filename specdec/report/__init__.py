"""Result files, tables, plots, HTML pages and provenance."""

from typing import TYPE_CHECKING

from specdec.lazy import lazy_exports

if TYPE_CHECKING:
    from specdec.report.results import read_requests

__getattr__, __dir__ = lazy_exports(__name__)
