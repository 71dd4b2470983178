"""A Ray of the tests' own, and the model that fleets serve on it."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.fleet.tiny_model import CONFIG

OBJECT_STORE_BYTES = 80 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A folder with only a configuration; its weights are random."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder)


_SERVE_RAY = """
import logging, sys, ray
context = ray.init(
    num_cpus=4,
    include_dashboard=False,
    logging_level=logging.ERROR,
    object_store_memory=int(sys.argv[1]),
)
print(context.address_info["address"], flush=True)
sys.stdin.read()
ray.shutdown()
"""


@pytest.fixture(scope="module")
def ray() -> Iterator[None]:
    """A running Ray, which fleets use and do not stop.

    A process of its own starts it: Ray forks, which Linux refuses to a process with more address
    space in one piece than there is memory, as tests of states that do not fit have.
    """
    ray = pytest.importorskip("ray")
    command = [sys.executable, "-c", _SERVE_RAY, str(OBJECT_STORE_BYTES)]
    environment = os.environ | {"RAY_AUTH_MODE": "disabled"}  # a token would be its starter's alone
    server = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert server.stdin is not None and server.stdout is not None
    with server:
        ray.init(address=server.stdout.readline().strip(), logging_level=logging.ERROR)
        yield
        assert ray.is_initialized()
        ray.shutdown()
        server.stdin.close()
