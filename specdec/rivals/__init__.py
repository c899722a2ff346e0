"""Other runtimes as baselines, each in a separate Python environment or behind HTTP."""
