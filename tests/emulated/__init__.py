"""A CUDA device made of the CPU's memory, and what runs on it."""
