"""Trains drafters for an unchanged target model (``specdec train``, docs/training.md)."""
