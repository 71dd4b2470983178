"""The unit of systemd and the manifest of Kubernetes in docs/deploying.md."""

from __future__ import annotations

import configparser
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from jaxserve.cli import app

pytestmark = pytest.mark.fast

TEXT = (Path(__file__).parents[2] / "docs" / "deploying.md").read_text(encoding="utf-8")


def _units() -> list[configparser.ConfigParser]:
    units = []
    for block in re.findall(r"```ini\n(.*?)```", TEXT, re.DOTALL):
        units.append(configparser.ConfigParser(interpolation=None))
        units[-1].read_string(block)
    return units


def _manifests() -> dict[str, Any]:
    (block,) = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    return {each["kind"]: each for each in yaml.safe_load_all(block)}


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
    options = _options(container["args"])
    assert "/" not in options["served_name"]
    assert template["spec"]["terminationGracePeriodSeconds"] > options["drain_timeout"] > 0
