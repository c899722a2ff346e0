"""The strategies of the papers and the baselines, composed in Python.

One file each: ``build(bench, ...)`` puts core parts together with the paper's values as defaults
and says which part is which section of the paper. The presets of ``conf/strategy`` are the
same combinations for the command line; ``tests/unit/test_strategies.py`` holds one against the
other.
"""
