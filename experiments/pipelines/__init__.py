"""Pipelined strategies held against their bars and against the papers' formulas."""
