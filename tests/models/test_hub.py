"""Models by their names on the Hub, against a server of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers.pre_tokenizers import ByteLevel

from jaxserve.core.errors import UnknownModelError
from jaxserve.models.hub import HubModel
from jaxserve.models.registry import at_revision, resolve
from jaxserve.testing import write_chat_model
from tests.common.hub_server import COMMIT, HubServer, serving

# Prints what each name becomes: a path, or the error.
PROGRAM = """
import sys
from jaxserve.core.errors import JaxserveError
from jaxserve.models import registry
for name in sys.argv[1:]:
    try:
        print(registry.pull(name))
    except JaxserveError as error:
        print(type(error).__name__, error)
"""


@pytest.mark.fast
@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("Qwen/Qwen3-0.6B", HubModel("Qwen/Qwen3-0.6B")),
        ("a/b@refs/pr/1", HubModel("a/b", "refs/pr/1")),
        ("a/b:Q4_K_M", HubModel("a/b", None, "Q4_K_M")),
        ("a/b@v1:x/m-Q8_0.gguf", HubModel("a/b", "v1", "x/m-Q8_0.gguf")),
    ],
)
def test_names_of_the_hub_are_read(name: str, model: HubModel):
    """A name may have a revision and a GGUF file, and is written as it was read."""
    assert HubModel.of(name) == model and str(model) == name
    assert resolve(name).source == model and resolve(name).name == name
    assert resolve(name).kind == ("gguf" if model.file else "folder")


@pytest.mark.fast
@pytest.mark.parametrize("name", ["gpt2", "a/b/c", "a/", "../a", "a/b@", "a/b:", "a b/c", "./a/b"])
def test_other_names_are_refused_with_what_is_allowed(name: str):
    """The error names the forms that a name may have, before anything is asked for."""
    with pytest.raises(UnknownModelError, match=r"org/name:Q4_K_M"):
        resolve(name)


@pytest.mark.fast
def test_a_folder_of_that_name_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A path that exists is not a name of the Hub, and has no revision."""
    folder = tmp_path / "org" / "name"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert resolve("org/name").source == Path("org/name")
    with pytest.raises(UnknownModelError, match=r"revision='v1' belongs to a model of the Hugging"):
        at_revision("org/name", "v1")
    assert at_revision("org/other", "v1") == at_revision("org/other@v1", "v1") == "org/other@v1"
    with pytest.raises(UnknownModelError, match=r"a/b@v1 names a revision"):
        at_revision("a/b@v1", "v2")


# A tokenizer without tokenizer.json, as GPT-2 has it: the bytes, "ab", and an added token.
_VOCABULARY = [*sorted(ByteLevel.alphabet()), "ab"]
_OBJECTS = {
    "config.json": {"model_type": "gpt2"},
    "vocab.json": {token: i for i, token in enumerate(_VOCABULARY)},
    "added_tokens.json": {"<end>": len(_VOCABULARY)},
    "special_tokens_map.json": {name: "<end>" for name in ("bos_token", "eos_token", "unk_token")},
}
SLOW = {name: json.dumps(given).encode() for name, given in _OBJECTS.items()}
SLOW["merges.txt"] = b"#version: 0.2\na b\n"


@pytest.fixture
def hub(tmp_path: Path) -> HubServer:
    """A repository with a model in several formats, one with GGUF files, and a gated one."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    write_chat_model(folder)
    tiny = {path.name: path.read_bytes() for path in folder.iterdir()}
    tiny |= {name: name.encode() * 1000 for name in ("model.safetensors", "pytorch_model.bin")}
    tiny |= {name: b"?" for name in ("README.md", "onnx/model.onnx", "consolidated.safetensors")}
    files = {f"m-{kind}.gguf": kind.encode() for kind in ("Q4_K_M", "q8_0", "Q4_K_S")}
    repos = {"org/tiny": tiny, "org/files": files, "org/gated": tiny, "org/slow": SLOW}
    return HubServer(repos, ("org/gated",))


def _run(hub: HubServer, home: Path, *arguments: str, **variables: str) -> str:
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(home), **variables}
    done = subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "%|" not in done.stderr, "a bar within two seconds"
    return done.stdout.strip()


def test_what_is_needed_is_downloaded_once(hub: HubServer, tmp_path: Path):
    """A folder gets one format of the weights; GGUF files come alone; later starts need no network.

    Without a network, what is not in the cache is an error that says so.
    """
    home = tmp_path / "home"
    names = ("org/tiny", "org/files:Q4_K_M", "org/files@v1:m-q8_0.gguf", "org/gated", "org/none")
    odd = ("org/files", "org/files:Q5_0", "org/tiny@old")
    with serving(hub):
        pulled = _run(hub, home, "-c", PROGRAM, *names, *odd, "org/slow").splitlines()
        wanted = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
        files = {*wanted, "m-Q4_K_M.gguf", "m-q8_0.gguf", *SLOW}
        assert set(hub.files_read()) == files
        assert {path.name for path in Path(pulled[0]).iterdir()} == wanted
        assert Path(pulled[1]).read_bytes() == b"Q4_K_M"
        assert Path(pulled[2]).read_bytes() == b"q8_0"
        assert f"org/gated is gated; accept its terms at {hub.url}/org/gated" in pulled[3]
        assert "UnknownModelError the Hub has no repository 'org/none', or it is" in pulled[4]
        assert "org/files has no config.json; pass" in pulled[5]
        assert "org/files has no GGUF file that ends in 'Q5_0'" in pulled[6]
        assert "org/tiny has no revision 'old'; pass a branch" in pulled[7]
        assert {path.name for path in Path(pulled[8]).iterdir()} == set(SLOW)
        token = _run(hub, home, "-c", PROGRAM, "org/gated", HF_TOKEN="hf_x")
        assert Path(token).is_dir()
        assert hub.requests[-1][2] == "Bearer hf_x"
    again = _run(hub, home, "-c", PROGRAM, *names).splitlines()
    assert again[:3] == pulled[:3] and again[3] == token
    assert (
        f"DownloadError org/none is not in the cache {home}/hub, and {hub.url} cannot" in again[4]
    )
    offline = _run(hub, home, "-c", PROGRAM, *names, HF_HUB_OFFLINE="1").splitlines()
    assert offline[:4] == again[:4] and "HF_HUB_OFFLINE forbids a download" in offline[4]
    assert COMMIT in offline[0]


@pytest.mark.release
def test_an_interrupted_download_goes_on(hub: HubServer, tmp_path: Path):
    """A half of a file that a killed process left is asked for from its end on."""
    home = tmp_path / "home"
    with serving(hub):
        _run(hub, home, "-c", PROGRAM, "org/tiny")
        [weights] = (home / "hub").rglob("snapshots/*/model.safetensors")
        blob = weights.resolve()
        content = blob.read_bytes()
        weights.unlink()
        blob.rename(blob.with_name(f"{blob.name}.incomplete"))
        os.truncate(blob.with_name(f"{blob.name}.incomplete"), 500)
        _run(hub, home, "-c", PROGRAM, "org/tiny")
        assert weights.read_bytes() == content


@pytest.mark.release
def test_a_tokenizer_of_several_files_is_downloaded(hub: HubServer, tmp_path: Path):
    """Without a tokenizer.json, what transformers converts is there: vocabulary, merges, tokens."""
    program = (
        "from jaxserve.models.tokenizer import Tokenizer\n"
        "read = Tokenizer.of_model('org/slow')\n"
        "print(read.encode('ab<end>'), read.eos_token_ids)"
    )
    with serving(hub):
        assert _run(hub, tmp_path / "home", "-c", program) == "[256, 257] (257,)"
    assert set(hub.files_read()) == set(SLOW)


@pytest.mark.release
def test_the_command_line_serves_a_name(hub: HubServer, tmp_path: Path):
    """`jaxserve generate --model org/name` answers; with random weights it reads no others."""
    command = ("-m", "jaxserve", "generate", "--model", "org/tiny", "--load", "random")
    options = ("--revision", "v1", "--max-tokens", "3", "--ignore-eos", "--quiet", "hi")
    with serving(hub):
        answer = _run(hub, tmp_path / "home", *command, *options)
    assert '"finish_reason": "length"' in answer or '"finish_reason":"length"' in answer
    assert "model.safetensors" not in hub.files_read()
