"""Tests of jaxserve.planning.layers."""
