"""Imports, checks and constructs the classes that a configuration names."""
