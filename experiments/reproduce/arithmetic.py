"""Claims that are decided by arithmetic on stated figures, from an item's config.

``computed``: claim -> [expression, description]; an expression has numbers, + - * / **,
comparisons, min(...) and max(...). ``tables`` (title, columns, rows) are printed beside it.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from experiments.reproduce.findings import Findings, Measure
from experiments.reproduce.items import Item
from experiments.reproduce.lab import Lab
from specdec.errors import UserError

_OPERATORS: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
}
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {"min": min, "max": max}


def arithmetic(item: Item, lab: Lab) -> Findings:
    """An item without runs. Keys: ``computed``, ``tables``."""
    findings = Findings(measures=computed(item.config))
    for table in item.config.get("tables", ()):
        rows = tuple(tuple(row) for row in table["rows"])
        findings.table(table["title"], tuple(table["columns"]), rows)
    return findings


def computed(config: Mapping[str, Any]) -> list[Measure]:
    """The measures of ``computed``."""
    return [
        Measure(
            claim=claim,
            value=evaluate(str(text)),
            origin="formula",
            conditions=f"{how}: {text}",
            kind="formula",
        )
        for claim, (text, how) in config.get("computed", {}).items()
    ]


def evaluate(text: str) -> float | bool:
    """The value of an expression.

    Raises:
        UserError: the expression has anything else than arithmetic on numbers.
    """
    value = _value(ast.parse(text, mode="eval").body, text)
    return value if isinstance(value, bool) else float(value)


def _value(node: ast.expr, text: str) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, text)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _value(node.left, text), _value(node.right, text)
        return _OPERATORS[type(node.op)](left, right)
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _OPERATORS:
        left, right = _value(node.left, text), _value(node.comparators[0], text)
        return _OPERATORS[type(node.ops[0])](left, right)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        function = _FUNCTIONS.get(node.func.id)
        if function is not None and not node.keywords:
            return function(*(_value(a, text) for a in node.args))
    raise UserError(f"computed: {text!r} is not arithmetic on numbers")
