"""Claims that are decided by arithmetic on stated figures, from an item's config.

``computed``: claim -> [expression, description]; an expression has numbers, + - * / **,
comparisons, min(...) and max(...). ``tables`` (title, columns, rows) are printed beside it.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from experiments.reproduce.findings import Findings, Measure
from experiments.reproduce.items import Item
from experiments.reproduce.lab import Lab
from specdec.errors import UserError

_NODES = (
    *(ast.Expression, ast.Constant, ast.BinOp, ast.UnaryOp, ast.Compare, ast.Call, ast.Name),
    *(ast.Load, ast.operator, ast.unaryop, ast.cmpop),
)
_FUNCTIONS = {"min": min, "max": max}


def arithmetic(item: Item, lab: Lab) -> Findings:
    """An item without runs. Keys: ``computed``, ``tables``."""
    findings = Findings(measures=computed(item.config))
    for table in item.config.get("tables", ()):
        findings.table(table["title"], table["columns"], table["rows"])
    return findings


def computed(config: Mapping[str, Any]) -> list[Measure]:
    found = Findings()
    for claim, (text, how) in config.get("computed", {}).items():
        found.add(claim, evaluate(str(text)), "formula", f"{how}: {text}")
    return found.measures


def evaluate(text: str) -> float | bool:
    """The value of an expression.

    Raises:
        UserError: the expression has anything else than arithmetic on numbers.
    """
    tree = ast.parse(text, mode="eval")
    nodes = list(ast.walk(tree))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    if not all(isinstance(node, _NODES) for node in nodes) or not names <= _FUNCTIONS.keys():
        raise UserError(f"computed: {text!r} is not arithmetic on numbers")
    value = eval(compile(tree, text, "eval"), {"__builtins__": {}, **_FUNCTIONS})
    return value if isinstance(value, bool) else float(value)
