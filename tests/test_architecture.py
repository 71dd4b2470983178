"""The code obeys docs/architecture.md: its imports, writes and checks of objects."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable

import pytest

from tests.architecture import imports, ownership, wiring
from tests.architecture.sources import ROOT, Source, sources_of

# Package -> our packages that it may import.
PACKAGES = {
    "predictor": set(),
    "pallas_kernels": set(),
    "sharding": set(),
    "jaxserve": {"predictor", "pallas_kernels", "sharding"},
}
VISITORS = ("scripts", "benchmarks", "examples", "notebooks", "tests")

# Rooms of jaxserve/, top to bottom; a module imports from its own room and from lower rows.
ROWS = (
    ("__main__",),
    ("testing",),
    ("cli",),
    ("server",),
    ("fleet",),
    ("runtime",),
    ("cells",),
    ("report",),
    ("conversations",),
    ("planning",),
    ("engine",),
    ("execution",),
    ("steps",),
    ("scheduling",),
    ("memory",),
    ("models",),
    ("workload",),
    ("core",),
)

# Modules, and classes of others, that may know a forced length: no policy, except an oracle.
KNOW_FORCED_LENGTHS = {
    "core/request.py",
    "core/sampling_params.py",
    "execution/simulated.py",
    "steps/slots.py",
    "scheduling/admission.py Oracle",
    "scheduling/plan.py",
    "scheduling/scheduler.py",
    "workload/items.py",
    "workload/recorded.py",
}

CORE_DEPENDENCIES = {
    *("jax", "flax", "optax", "orbax", "numpy", "transformers", "safetensors", "tokenizers"),
    *("tqdm", "rich", "typer", "matplotlib", "jaxtyping", "jinja2"),
    *("jaxlib", "ml_dtypes"),  # parts of JAX
}
ARRAY_DEPENDENCIES = {
    *("jax", "flax", "optax", "orbax", "numpy", "jaxlib", "ml_dtypes", "jaxtyping")
}
THIRD_PARTY = {
    "predictor": ARRAY_DEPENDENCIES | {"safetensors", "tokenizers", "tqdm"},
    "pallas_kernels": ARRAY_DEPENDENCIES,
    "sharding": ARRAY_DEPENDENCIES,
    "jaxserve": CORE_DEPENDENCIES,
}
# Room -> packages of its extra, without which no module of the room is imported.
EXTRAS = {
    "server": {
        *("anyio", "fastapi", "prometheus_client", "pydantic", "starlette", "uvicorn"),
        "opentelemetry",  # of `spans`, which is imported with the extra `otel` only
    }
}
JAX_FREE_ROOMS = ("scheduling", "memory", "core", "workload")
JAX_PACKAGES = {"jax", "jaxlib", "flax", "optax", "orbax", "transformers", "pallas_kernels"}

# "path name" -> reason why a file may use this private name of another one.
MAY_REACH = {
    "pallas_kernels/versions.py _lowering": "kept_var_idx is nowhere public",
    "sharding/processes.py _exit": "os._exit, which Python documents under this name",
    "jaxserve/cli/serve.py _exit": "os._exit, too",
    "jaxserve/cli/app.py _exit": "os._exit, too",
}
TESTS_MAY_REACH = {
    "tests/benchmarks/kernels/test_tune.py _entries": "tilings are read once a process",
    "tests/pallas_kernels/test_mosaic.py _src": "JAX's interpreter says there what it supports",
    "tests/runtime/test_waiting.py _exit": "os._exit, which ends a forked child",
}
# "path name" -> reason why a test may replace this name.
TESTS_MAY_PATCH = {
    "tests/benchmarks/http/test_http.py PEERS": "peers that are installed nowhere",
    "tests/benchmarks/http/test_http.py python": "peers that are installed nowhere",
    "tests/benchmarks/http/test_http.py send": "a peer's server that ends answers early",
    "tests/benchmarks/kernels/test_kernels.py paged_attention": "a peer's kernel without its GPU",
    "tests/benchmarks/kernels/test_kernels.py default_backend": "a peer's kernel without its GPU",
    "tests/benchmarks/kernels/test_peers.py chosen": "peers that are installed nowhere",
    "tests/benchmarks/kernels/test_tune.py TUNED": "a file of the test's own",
    "tests/benchmarks/offline/test_peers.py run": "runs of a peer that are made up",
    "tests/cli/test_cli_predictor.py logits_of": "interrupts a training in its middle",
    "tests/docs/pages.py REGISTERED_MODELS": "names of the pages are folders of tiny models",
    "tests/docs/pages.py parse": "what a page uses is compiled, not all that a user might",
    "tests/docs/pages.py OpenAI": "the pages' address is a free port",
    "tests/docs/pages.py parse_args": "a command line is parsed, and not run",
    "tests/docs/pages.py argv": "a command line is parsed, and not run",
    "tests/models/test_registry.py copyfileobj": "a disk that is full in the middle of a download",
    "tests/runtime/test_regroup.py placed": "devices without room in the middle of a move",
    "tests/models/test_store.py save": "an entry that fails to be written",
}
# Class -> tests that write its attributes.
TESTS_MAY_ASSIGN = {
    # The test interrupts a training in its middle.
    "LengthPredictor": {"tests/predictor/test_training.py"},
    # The test says what is in flight of sequences that no engine runs.
    "Sequence": {"tests/scheduling/test_waiting_pool.py"},
    # The test runs a step, which donates the buffers.
    "DevicePages": {"tests/execution/test_pages.py"},
    # The test puts another base weight under the same adapters.
    "AdaptedWeight": {"tests/models/test_linear.py"},
}

pytestmark = pytest.mark.fast


@pytest.fixture(scope="module")
def house() -> list[Source]:
    """Return the sources of the four packages."""
    return sources_of(*PACKAGES)


@pytest.fixture(scope="module")
def stores(house: list[Source]) -> list[ownership.Store]:
    """Return the writes to attributes of other modules' objects."""
    return ownership.foreign_stores(house, ownership.classes_of(house), {})


@pytest.fixture(scope="module")
def tests() -> list[Source]:
    return sources_of("tests")


def _none(found: Iterable[object]) -> None:
    """Fail with one line per finding."""
    lines = [str(one) for one in found]
    if lines:
        pytest.fail("\n".join(lines), pytrace=False)


def test_packages_import_only_along_the_arrows(house: list[Source]):
    """Each top-level package imports only those of ours to which its arrow points."""
    arrows = PACKAGES | {visitor: set() for visitor in VISITORS}
    _none(imports.off_the_arrows(house, arrows))


def test_rooms_import_only_from_rows_below(house: list[Source]):
    """A module of jaxserve imports only from its own room and from lower rooms."""
    _none(imports.upward(house, ROWS))


def test_no_modules_import_each_other(house: list[Source]):
    """There is no cycle of imports at run time, in a function, or for type checkers."""
    _none(imports.circles(house))


def test_every_room_has_its_row(house: list[Source]):
    """Every folder and module of jaxserve/ is in the map of rooms."""
    rooms = {source.room for source in house} - {None}
    assert rooms <= {room for rooms in ROWS for room in rooms}


def test_rooms_do_not_write_each_others_objects(stores: list[ownership.Store]):
    """An attribute is assigned in the room of its class; other rooms call a method."""
    _none(ownership.across_rooms(stores))


def test_a_sequence_has_one_writer(stores: list[ownership.Store]):
    """Only methods of `Sequence` assign its attributes, except those of its KV state."""
    _none(
        store
        for store in stores
        if store.owners == {"jaxserve/scheduling/sequence.py"}
        if store.what.split(".")[-2] != "kv"
    )


def test_objects_say_what_they_can(house: list[Source]):
    """No code checks the class of an executor or service, or the attributes of an object."""
    _none(wiring.probes(house))


def test_private_names_are_used_by_their_own(house: list[Source]):
    """No module uses a private name of another module or of another class's object."""
    _none(wiring.private_reaches(house, MAY_REACH))


def test_tests_use_public_names(tests: list[Source]):
    """Tests use public names, except those listed here."""
    _none(wiring.private_reaches(tests, TESTS_MAY_REACH))


def test_tests_replace_nothing(house: list[Source], tests: list[Source]):
    """Slow, faulty and watched parts are arguments, not patches; see `jaxserve.testing`."""
    _none(wiring.patches(tests, TESTS_MAY_PATCH))
    _none(
        ownership.foreign_stores(
            tests, ownership.classes_of(house, with_methods=True), TESTS_MAY_ASSIGN
        )
    )


def test_forced_lengths_are_hidden_from_policies(house: list[Source]):
    """Only code that carries out or checks an answer's end names its forced length."""
    for source in house:
        path = source.path.removeprefix("jaxserve/")
        if source.package != "jaxserve" or source.room == "testing" or path in KNOW_FORCED_LENGTHS:
            continue
        text = source.text
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef) and f"{path} {node.name}" in KNOW_FORCED_LENGTHS:
                text = text.replace(ast.get_source_segment(source.text, node) or "", "")
        assert "forced_length" not in text and "end_length" not in text, source.path


@pytest.mark.parametrize("package", PACKAGES)
def test_third_party_imports_are_core_dependencies(package: str, house: list[Source]):
    """Module-level imports are core dependencies or the room's extra; others are at their use."""
    allowed = THIRD_PARTY[package] | set(PACKAGES) | set(sys.stdlib_module_names)
    _none(
        f"{found.where} imports {found.name}"
        for source in house
        for found in source.imports
        if source.package == package and found.at_module_level and not found.for_type_checkers
        if found.top not in allowed | EXTRAS.get(source.room or "", set())
    )


@pytest.mark.parametrize("room", JAX_FREE_ROOMS)
def test_bookkeeping_names_no_jax(room: str, house: list[Source]):
    """The rooms without JAX import no package that imports JAX."""
    _none(
        f"{found.where} imports {found.name}"
        for source in house
        for found in source.imports
        if source.room == room and found.top in JAX_PACKAGES and not found.for_type_checkers
    )


def test_bookkeeping_loads_no_jax(house: list[Source]):
    """After importing every module of the JAX-free rooms, JAX is not in the process."""
    modules = [source.module for source in house if source.room in JAX_FREE_ROOMS]
    program = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        f"sys.exit(', '.join(sorted({JAX_PACKAGES!r} & set(sys.modules))) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"loaded: {done.stderr}"
