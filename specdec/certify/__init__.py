"""Checks whether a configuration is lossless: ``specdec verify`` and ``specdec.testing``."""

from typing import TYPE_CHECKING

from specdec.lazy import lazy_exports

if TYPE_CHECKING:
    from specdec.certify.certify import CHECKS
    from specdec.certify.report import Check, Report, print_report
    from specdec.certify.subject import refuse

__getattr__, __dir__ = lazy_exports(__name__)
