"""Builds the parts that a configuration names and refuses combinations that cannot work."""
