from specdec.tree.tree import TokenTree
