"""Parts of single papers: token sources, tree policies and verifiers that only their preset needs.

A preset is a YAML file of ``conf/strategy``; ``specdec.build`` creates its parts in Python.
"""
