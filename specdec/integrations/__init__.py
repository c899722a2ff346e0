"""Strategies of this library inside other libraries: ``specdec.integrations.transformers``."""
