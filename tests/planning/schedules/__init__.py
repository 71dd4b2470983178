"""Tests of jaxserve.planning.schedules."""
