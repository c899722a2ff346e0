"""What the GPU path is worth: passes, kernels and whole strategies on one device."""
