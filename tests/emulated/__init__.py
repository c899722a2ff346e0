"""An emulated CUDA device in CPU memory, and tests that run on it."""
