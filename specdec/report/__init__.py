"""Result files, tables, plots, HTML pages and provenance."""

from typing import TYPE_CHECKING

from specdec.lazy import lazy_exports

if TYPE_CHECKING:
    from specdec.report.provenance import config_hash
    from specdec.report.results import RequestWriter, read_requests
    from specdec.report.tables import best_row, markdown_table, print_table

__getattr__, __dir__ = lazy_exports(__name__)
