"""A Ray of the tests' own, and the model that fleets serve on it."""

from __future__ import annotations

import json
import logging
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


@pytest.fixture(scope="module")
def ray() -> Iterator[None]:
    """A running Ray, which fleets use and do not stop."""
    ray = pytest.importorskip("ray")
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        logging_level=logging.ERROR,
        object_store_memory=OBJECT_STORE_BYTES,
    )
    yield
    assert ray.is_initialized()
    ray.shutdown()
