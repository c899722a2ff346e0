"""``specdec profile`` measures a latency profile: milliseconds per kind of work and row count.

This file imports nothing, so that the processes that measure transfers start without transformers.
"""
