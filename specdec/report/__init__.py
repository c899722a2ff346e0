"""Result files, tables, plots, HTML pages and provenance."""

from specdec.report.folders import write_comparison, write_run
from specdec.report.provenance import config_hash, provenance
from specdec.report.requests import RequestWriter, finished, read_requests
from specdec.report.tables import best_row, markdown_table, print_table

__all__ = [
    "RequestWriter",
    "best_row",
    "config_hash",
    "finished",
    "markdown_table",
    "print_table",
    "provenance",
    "read_requests",
    "write_comparison",
    "write_run",
]
