"""Options that several commands take: one definition, and the same everywhere."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import subprocess
import sys

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from jaxserve.cli import app, opening
from jaxserve.cli.options import (
    OF_MANY_REQUESTS,
    ProcessOptions,
    SamplingOptions,
    ServiceOptions,
    flat,
)
from jaxserve.core.options import RuntimeOptions
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.runtime import Runtime

pytestmark = pytest.mark.fast

# Commands that open a service, and the groups of options that each takes.
COMMANDS = {
    "generate": (SamplingOptions, ServiceOptions, ProcessOptions),
    "chat": (SamplingOptions, ServiceOptions, ProcessOptions),
    "serve": (ServiceOptions, ProcessOptions),
    "bench": (ServiceOptions, ProcessOptions),
}


def _names(group: type) -> set[str]:
    return {field.name for field in dataclasses.fields(group)}


@functools.cache
def _options(command: str) -> dict[str, tuple]:
    """Return what a command's options are, by name."""
    parameters = get_command(app).commands[command].params
    return {
        each.name: (each.opts, each.default, each.help, each.multiple, each.rich_help_panel)
        for each in parameters
    }


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_agree_on_shared_options(command):
    """Names, default, help and panel of an option are those of `generate`."""
    expected = set().union(*map(_names, COMMANDS[command]))
    if command == "chat":
        expected -= set(OF_MANY_REQUESTS)
    own, first = _options(command), _options("generate")
    assert expected <= own.keys()
    assert {name: own[name] for name in expected} == {name: first[name] for name in expected}
    assert command != "chat" or not own.keys() & set(OF_MANY_REQUESTS)


def test_options_are_arguments_of_a_service():
    """`open_service` knows each field, with the same default where it has one."""
    allowed = _names(RuntimeOptions) | {
        "log_level",  # of the process
        "replicas",
        "roles",
        "quiet",
        "stages",
        "groups",
        "data_parallel",
        "adapter",
    }
    allowed |= inspect.signature(Runtime.from_pretrained).parameters.keys() | {"tensor_parallel"}
    assert _names(ServiceOptions) <= allowed
    for name, parameter in inspect.signature(opening.open_service).parameters.items():
        if name in _names(ServiceOptions) and parameter.default is not inspect.Parameter.empty:
            assert getattr(ServiceOptions(), name) == parameter.default


def test_options_are_sampling_parameters():
    """Without options, the parameters are the defaults; a command's own fields are added."""
    assert SamplingOptions().params() == SamplingParams()
    assert _names(SamplingOptions) <= _names(SamplingParams)
    params = SamplingOptions(stop=["a"], top_k=3).params(max_tokens=2, logprobs=None)
    assert params == SamplingParams(stop=("a",), top_k=3, max_tokens=2)


def _own_app() -> tuple[typer.Typer, list]:
    got: list = []
    own = typer.Typer()

    @own.command()
    @flat(omit=["seed"])
    def command(*, word: str = "none", sampling: SamplingOptions, processes: ProcessOptions):
        got.append((word, sampling, processes))

    return own, got


def test_a_command_gets_groups():
    """Given options, and defaults of the others, arrive as the dataclasses of the groups."""
    own, got = _own_app()
    arguments = ["--word", "a", "--top-k", "4", "--stop", "x", "--stop", "y", "--process-id", "1"]
    done = CliRunner().invoke(own, arguments)
    assert done.exit_code == 0, done.stderr
    sampling = SamplingOptions(top_k=4, stop=["x", "y"])
    assert got == [("a", sampling, ProcessOptions(process_id=1))]


def test_an_omitted_option_is_unknown():
    """The command line does not have an option that its command omits."""
    own, got = _own_app()
    assert (CliRunner().invoke(own, ["--seed", "1"]).exit_code, got) == (2, [])


def test_groups_that_do_not_fit_are_refused():
    """A name to omit that is no field, and one option twice, raise when a command is defined."""
    with pytest.raises(TypeError, match="'sead'"):

        @flat(omit=["sead"])
        def misspelt(*, sampling: SamplingOptions):
            pass

    with pytest.raises(TypeError, match="'seed'"):

        @flat()
        def twice(*, seed: int | None = None, sampling: SamplingOptions):
            pass


_SHOWS_MEMORY = """
import os, sys
from jaxserve.cli import main
sys.argv = ["jaxserve", "--version"]
try:
    main()
finally:
    print(os.environ["XLA_CLIENT_MEM_FRACTION"], "jax" in sys.modules)
"""


def test_the_command_line_lets_jax_use_most_of_a_gpu():
    """Before a command imports JAX, whose devices read the variable as they start."""
    environ = {name: text for name, text in os.environ.items() if "MEM_FRACTION" not in name}
    run = [sys.executable, "-c", _SHOWS_MEMORY]
    shown = subprocess.run(run, env=environ, check=True, capture_output=True, text=True).stdout
    assert shown.splitlines()[-1] == "0.92 False"
