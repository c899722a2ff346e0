"""Turns overrides into one validated configuration."""
