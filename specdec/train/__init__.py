"""Trains drafters of a target that stays as it is: ``specdec train``, see docs/training.md."""
