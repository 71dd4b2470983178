"""Two checkouts compared: every command exists, and its committed result has the figures."""

from __future__ import annotations

import json
from importlib import import_module

import pytest

from benchmarks import baseline
from benchmarks.common.environment import ROOT

pytestmark = pytest.mark.fast

RESULTS = {
    "float32": "offline_smollm2_cpu",
    "int8": "offline_smollm2_cpu",
    "start": "startup_smollm2_cpu",
    "planning": "planning_cpu",
    "plans": "exegpt_simulated_a40_a100",
    "cells": "cells_host_cpu",
}


@pytest.mark.parametrize("name", baseline.MEASUREMENTS)
def test_a_measurement_is_a_command_and_figures_of_its_result(name):
    """The command's options are those of the benchmark, and all figures are numbers above 0."""
    measurement = baseline.MEASUREMENTS[name]
    module, *arguments = measurement.command.split()
    folder = ROOT / "benchmarks" / module.replace(".", "/")
    main = f"benchmarks.{module}.__main__" if folder.is_dir() else f"benchmarks.{module}"
    import_module(main).main.parser().parse_args(arguments)
    result = json.loads((ROOT / f"benchmarks/results/{RESULTS[name]}.json").read_text("utf-8"))
    figures = measurement.figures(result)
    assert figures and all(figure > 0 for figure in figures.values())


def test_a_checkout_is_needed(tmp_path, capsys):
    """A folder without the project, or an unknown measurement, is refused in a sentence."""
    assert baseline.main([str(tmp_path)]) == 2
    assert "has no jaxserve" in capsys.readouterr().err
    assert baseline.main([str(ROOT), "--only", "speed"]) == 2
    assert "['speed']" in capsys.readouterr().err
