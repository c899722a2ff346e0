"""Benchmarks, and the papers' tables and figures."""
