"""Rehearsals at real sizes on a CPU: random checkpoints, memory, messages and host time."""
