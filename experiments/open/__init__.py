"""Experiments that the papers leave open."""
