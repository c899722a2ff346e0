"""Timings of single operations on one core."""
