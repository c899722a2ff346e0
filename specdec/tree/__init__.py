from typing import TYPE_CHECKING

from specdec.lazy import lazy_exports

if TYPE_CHECKING:
    from specdec.tree.tree import TokenTree

__getattr__, __dir__ = lazy_exports(__name__)
