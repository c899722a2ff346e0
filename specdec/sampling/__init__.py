"""Sampling transforms, keyed random draws and the order of candidates."""
