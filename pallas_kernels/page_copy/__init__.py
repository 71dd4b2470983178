"""Copying pages: into a buffer of their own, back from one, and within the cache."""

from pallas_kernels.page_copy.api import gather_pages, move_pages, scatter_pages

__all__ = ["gather_pages", "move_pages", "scatter_pages"]
