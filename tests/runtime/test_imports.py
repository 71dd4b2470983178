"""An answer imports what it needs, since every start of the command line waits for imports."""

from __future__ import annotations

import subprocess
import sys

import pytest

from jaxserve.models.families import FAMILIES

pytestmark = pytest.mark.fast

# Modules, and all below them, that answering with a Llama on a CPU does without. Flax imports
# optax, rich and a part of Pallas itself.
_UNUSED = (
    *("fastapi", "httpx", "huggingface_hub", "matplotlib", "orbax", "ray", "requests"),
    *("starlette", "torch", "transformers", "uvicorn", "llguidance"),
    *("jax._src.pallas.triton", "jax._src.pallas.mosaic_gpu.lowering"),
    *("jaxserve.cells", "jaxserve.fleet", "jaxserve.server"),
    *("jaxserve.cli.arena", "jaxserve.cli.bench", "jaxserve.cli.plan", "jaxserve.cli.serve"),
    *("jaxserve.engine.gbnf", "jaxserve.execution.grouped", "jaxserve.execution.staged"),
    *("jaxserve.execution.processes", "jaxserve.execution.transport", "jaxserve.models.gguf"),
    *("jaxserve.models.kept_weights", "jaxserve.models.quantised_folders"),
    *("jaxserve.planning.profiler", "jaxserve.planning.simulator", "jaxserve.runtime.regrouper"),
    *("jaxserve.planning.schedules.layer_cost", "jaxserve.planning.schedules.search"),
)
# The command, its runtime, and the family of the model; no array is made.
_PROGRAM = f"""
import sys
from typer.main import get_command
from jaxserve.cli import app
import jaxserve.runtime
from jaxserve.models.families import config_from_hf, family_of
from jaxserve.models.store import load_model

get_command(app).commands["generate"]

family_of(config_from_hf({{"model_type": "mistral"}}))
families = "jaxserve.models.families."
for name in sorted(sys.modules):
    parts = name.split(".")
    above = {{".".join(parts[:n]) for n in range(1, len(parts) + 1)}}
    if above & set({_UNUSED!r}) or name.startswith(families) and name != families + "llama":
        print(name)
"""


def test_an_answer_imports_nothing_that_it_does_without():
    """None of the listed modules, and no family but the model's own."""
    command = [sys.executable, "-c", _PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stdout, f"imported, and not needed: {done.stdout.split()}"


# Looks up types of models, and prints the file of another family if that was imported, too.
_LOOK_UP = """
import sys
from jaxserve.models.families import FAMILIES

found = [FAMILIES[kind].fields[kind] for kind in sys.argv[1:]]
print(*{"jaxserve.models.families.apertus"} & set(sys.modules))
"""


@pytest.mark.release
def test_each_type_of_model_is_found_without_importing_all_families():
    """The table of files by type is complete: a type that is missing imports every file."""
    kinds = [kind for kind in FAMILIES if kind != "apertus"]
    command = [sys.executable, "-c", _LOOK_UP, *kinds]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stdout.strip()
