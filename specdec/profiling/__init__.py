"""``specdec profile``: measures a latency profile.

This file imports nothing, so that the processes that measure transfers start without transformers.
"""
