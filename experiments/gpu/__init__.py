"""Measurements on one GPU: passes, kernels and whole strategies."""
