"""Parts of single papers: token sources, tree policies and verifiers that only their preset needs.

A preset is a YAML of ``conf/strategy``; ``specdec.build`` makes its parts in Python.
"""
