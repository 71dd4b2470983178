"""The command line: `jaxserve generate | chat | bench | models`."""

from jaxserve.cli.app import app, main

__all__ = ["app", "main"]
