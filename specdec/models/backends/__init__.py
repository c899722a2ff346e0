"""What computes the passes of a slice of a model in PyTorch, and the choice of it."""
