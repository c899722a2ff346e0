"""Tests of the token sources."""
