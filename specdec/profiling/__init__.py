"""``specdec profile``: measures a latency profile and proposes a tree and a device split.

This file imports nothing, so that the processes that measure transfers start without transformers.
"""
