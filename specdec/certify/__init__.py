"""Checks whether a configuration is lossless: ``specdec verify`` and ``specdec.testing``."""

from specdec.certify.certify import CHECKS, DEPTHS, certify
from specdec.certify.report import Check, Report, print_report, write_report
from specdec.certify.subject import refuse

__all__ = [
    "CHECKS",
    "DEPTHS",
    "Check",
    "Report",
    "certify",
    "print_report",
    "refuse",
    "write_report",
]
