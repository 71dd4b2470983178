"""Lengths of the sentences of the Penn treebank, from a published wheel."""
