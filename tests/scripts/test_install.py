"""The installation with uv: what it takes over from pip's configuration, and when pip installs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.fast

SCRIPT = Path(__file__).parents[2] / "scripts/install.sh"
# A Python whose pip has a configuration. It prints the runs of pip and uv that install packages.
PYTHON = r"""#!/bin/sh
case "$*" in
*"config list") cat <<'END'
global.extra-index-url='\nfile:///one/simple\nfile:///two/simple'
global.find-links='/wheels /more'
global.index-url='https://mirror/simple'
install.index-url='https://other/simple'
END
    ;;
"-m pip install --quiet --only-binary=uv uv") exit "$UV_IS_MISSING" ;;
"-m uv pip"*) echo "$UV_DEFAULT_INDEX|$UV_INDEX|$UV_FIND_LINKS|$*"; exit "$UV_FAILS" ;;
*) echo "$*" ;;
esac
"""


def _install(folder: Path, **variables: str) -> tuple[list[str], str]:
    """Return the lines of what ran, and what was said about it."""
    python = folder / "python"
    python.write_text(PYTHON, encoding="utf-8")
    python.chmod(0o755)
    own = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "UV_"))}
    env = {**own, "UV_IS_MISSING": "0", "UV_FAILS": "0", **variables}
    command = [str(SCRIPT), str(python), "-e", ".[test]"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return done.stdout.replace(str(python), "PYTHON").splitlines(), done.stderr


def test_uv_has_the_settings_of_pip(tmp_path: Path):
    """Several values, sections of their own and line breaks are read; nothing is said."""
    indexes = "https://other/simple|file:///one/simple file:///two/simple"
    ran = f"{indexes}|/wheels,/more|-m uv pip install --python PYTHON -e .[test]"
    assert _install(tmp_path) == ([ran], "")


def test_the_environment_comes_first(tmp_path: Path):
    """uv's own variables come before those of pip, and these before pip's files."""
    (ran,), _ = _install(tmp_path, PIP_FIND_LINKS="/a /b", PIP_INDEX_URL="u", UV_DEFAULT_INDEX="v")
    assert ran.startswith("v|file:///one/simple file:///two/simple|/a,/b|")


@pytest.mark.parametrize("reason", ["UV_IS_MISSING", "UV_FAILS"])
def test_without_uv_pip_installs(tmp_path: Path, reason: str):
    """pip installs the same, and one line says so."""
    ran, said = _install(tmp_path, **{reason: "1"})
    assert ran[-1] == "-m pip install -e .[test]"
    assert said.startswith("install: uv does not work here; pip") and said.count("\n") == 1
