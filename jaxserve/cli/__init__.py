"""The command line, `jaxserve`."""

from jaxserve.cli.app import app, main

__all__ = ["app", "main"]
