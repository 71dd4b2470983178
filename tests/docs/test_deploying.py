"""The Dockerfile, and the unit of systemd and the manifest of Kubernetes in docs/deploying.md."""

from __future__ import annotations

import configparser
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from jaxserve.cli import app
from jaxserve.server import ServerOptions
from jaxserve.server.app import make_app
from jaxserve.server.backend import Backend

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "deploying.md").read_text(encoding="utf-8")
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")


def _units() -> list[configparser.ConfigParser]:
    units = []
    for block in re.findall(r"```ini\n(.*?)```", TEXT, re.DOTALL):
        units.append(configparser.ConfigParser(interpolation=None))
        units[-1].read_string(block)
    return units


def _manifests() -> dict[str, Any]:
    (block,) = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    return {each["kind"]: each for each in yaml.safe_load_all(block)}


def _list(instruction: str) -> list[str]:
    """Return the list of an instruction of the Dockerfile."""
    (found,) = re.findall(rf"^\s*{instruction} (\[.*\])$", DOCKERFILE, re.MULTILINE)
    return yaml.safe_load(found)


def _options(words: list[str]) -> dict[str, Any]:
    """Return the options of a command line of `jaxserve serve`, which must have all of them."""
    serve = get_command(app).commands["serve"]
    context = serve.make_context("serve", words[2:])
    assert words[:2] == ["jaxserve", "serve"]
    return context.params


def test_the_unit_lets_open_answers_end():
    """Only the server gets SIGTERM, and the time to stop is longer than that to drain."""
    service = _units()[0]["Service"]
    options = _options(service["ExecStart"].replace("/opt/jaxserve/bin/", "").split())
    assert service["KillMode"] == "mixed"
    assert float(service["TimeoutStopSec"]) > options["drain_timeout"] > 0


def test_a_failed_engine_is_restarted():
    """The timer's service restarts the one that /health says has failed, and no other."""
    _, health, timer = _units()
    assert "/health" in health["Service"]["ExecStart"]
    assert health["Service"]["ExecStart"].endswith("!= 500 || systemctl restart jaxserve'")
    assert timer["Timer"]["OnUnitActiveSec"]


def test_the_manifest_has_a_service_of_its_pods():
    """The Service leads to the container's port, and clients name the model without its path."""
    manifests = _manifests()
    template = manifests["Deployment"]["spec"]["template"]
    (container,) = template["spec"]["containers"]
    (port,) = manifests["Service"]["spec"]["ports"]
    assert manifests["Service"]["spec"]["selector"] == template["metadata"]["labels"]
    assert port["targetPort"] == container["ports"][0]["containerPort"]
    options = _options([*_list("ENTRYPOINT"), *container["args"]])
    assert options["host"] == "0.0.0.0"
    assert "/" not in options["served_name"]
    assert template["spec"]["terminationGracePeriodSeconds"] > options["drain_timeout"] > 0


def test_the_image_has_what_is_installed():
    """What is copied exists and is not ignored, and so does what the package's links name."""
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    copied = [
        name
        for line in re.findall(r"^COPY (.*)$", DOCKERFILE, re.MULTILINE)
        for name in line.split()[:-1]
    ]
    assert copied and all((ROOT / name).exists() for name in copied)
    assert sorted(line[1:] for line in ignored if line.startswith("!")) == sorted(copied)
    linked = {path.resolve().name for path in (ROOT / "jaxserve").iterdir() if path.is_symlink()}
    assert linked == {"pallas_kernels", "predictor", "sharding"} and linked <= set(copied)


def test_the_image_installs_extras_that_exist():
    """So do those that its arguments may add."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (installed,) = re.findall(r'"\.\[(\w+)\$', DOCKERFILE)
    offered = re.findall(r"EXTRA=(\w+)", DOCKERFILE + TEXT) + re.findall(r"`(cuda\d+)`", TEXT)
    assert {installed, *offered} <= project["optional-dependencies"].keys()
    assert {"cuda12", "cuda13"} <= set(offered)


@pytest.mark.release
def test_the_image_serves_what_its_commands_name():
    """Entry point, default and the page's commands are options of `serve`; /health is probed."""
    assert 'CMD ["smollm2-135m"]' in DOCKERFILE
    commands = re.findall(r"`docker run (.*)`", TEXT)
    assert len(commands) == 2
    for command in commands:
        (volume,) = re.findall(r"-v jaxserve:(\S+)", command)
        assert f"VOLUME {volume}\n" in DOCKERFILE and "-p 8000:8000" in command
        words = command.rpartition(f"{volume} jaxserve ")[2].split()
        assert _options([*_list("ENTRYPOINT"), *words])["port"] == 8000
    probed = re.search(r"http://127.0.0.1:8000(/\w+)", DOCKERFILE)
    paths = make_app(Backend(ServerOptions(model_name="model"))).openapi()["paths"]
    assert probed and probed[1] in paths
