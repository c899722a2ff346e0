"""Bundled models and their data; see tiny/README.md and smollm2/README.md."""
