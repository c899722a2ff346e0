"""The token tree of one request."""

from specdec.tree.tree import TokenTree

__all__ = ["TokenTree"]
