"""Backends compute the passes of a model slice; ``specdec.models.runner.make_backend`` chooses."""
