"""``specdec profile`` measures a latency profile: milliseconds of each kind of pass by its rows.

This file imports nothing, so that the processes that measure transfers start without transformers.
"""
