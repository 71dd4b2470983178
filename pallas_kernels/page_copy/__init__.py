"""Copies of pages out of the cache, into the cache, and within it."""

from jaxserve.kernels.page_copy.api import gather_pages, move_pages, scatter_pages

__all__ = ["gather_pages", "move_pages", "scatter_pages"]
