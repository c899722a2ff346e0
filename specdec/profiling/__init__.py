"""``specdec profile``: what work costs on this hardware, and which tree that recommends.

Nothing is imported here: the processes that measure transfers import a submodule of this package,
and what the others need (transformers) takes longer to import than they take to measure.
"""
