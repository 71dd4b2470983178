"""Ways to look at what a runtime did: figures, tables, traces, pictures."""

from jaxserve.report.report import Report

__all__ = ["Report"]
