"""Backends compute the passes of a slice of a model; ``factory`` chooses one."""
