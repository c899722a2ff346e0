"""The command line: composes with Hydra, checks, and hands a plain dict to the engine."""
