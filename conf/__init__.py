"""The Hydra tree: one folder per config group, installed as ``specdec.conf``."""
