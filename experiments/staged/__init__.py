"""Staged speculative decoding's tables and figures, on the bundled pair."""
