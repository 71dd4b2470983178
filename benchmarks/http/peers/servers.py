"""Servers of other engines, which `--compare` starts next to ours and ends again."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from benchmarks.common.processes import SHOWN_LINES, PeerError, chosen, group
from benchmarks.offline.peers.answering import free_address, wait_for
from benchmarks.offline.peers.compare import PEERS as OFFLINE
from benchmarks.offline.peers.compare import SCRIPTS as OFFLINE_SCRIPTS
from benchmarks.offline.peers.compare import Environment
from benchmarks.offline.peers.job import write_job, write_models
from jaxserve.models.gguf import GGUFSource
from jaxserve.models.tokenizer_files import read_gguf_tokenizer
from jaxserve.workload import WorkloadItem

SCRIPTS = Path(__file__).parent
STARTUP_LIMIT_S = 900.0  # vLLM compiles when it starts


@final
@dataclass(frozen=True)
class PeerServer:
    """Another engine's server.

    Attributes:
      script: becomes the server of a job's model: `python SCRIPT JOB.json PORT`.
      fields: additional fields of its requests.
    """

    script: str
    environment: Environment
    fields: Mapping[str, Any] = field(default_factory=dict)


@final
@dataclass
class Started:
    """The servers that answer, and the reasons of those that do not, by name.

    Attributes:
      startup_s: seconds from the start of the process to its first answer.
      failed: reasons.
    """

    urls: dict[str, str] = field(default_factory=dict)
    startup_s: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


PEERS = {
    "vllm": PeerServer("vllm_http.py", OFFLINE["vllm"].environment),
    "llamacpp": PeerServer(
        "llamacpp_http.py",
        # A wheel, unlike the package with the command `llama-server`, which pip compiles.
        Environment(("xllamacpp==2026.10.11549",)),
        # Otherwise it sorts the vocabulary for samplers that a temperature of 0 does not use.
        {"samplers": ["temperature"]},
    ),
}


def named(names: str) -> dict[str, PeerServer]:
    """Return the servers of `--compare`."""
    return chosen(names or None, PEERS)


@contextmanager
def started(
    peers: Mapping[str, PeerServer],
    source: Path,
    items: Sequence[WorkloadItem],
    *,
    batch_size: int,
    limit_s: float = STARTUP_LIMIT_S,
) -> Iterator[Started]:
    """Serve a GGUF model by other engines within the block; their servers start in turn.

    If a server does not answer, the last lines of its log are printed on stderr.

    Args:
      items: requests that a server must have room for.
      batch_size: most sequences at once.
      limit_s: seconds within which a server must answer.
    """
    found = Started()
    with tempfile.TemporaryDirectory(prefix="jaxserve-servers-") as text, ExitStack() as servers:
        folder = Path(text)
        job = folder / "job.json"
        if peers:
            models = write_models(source, folder)
            _write_tokenizer(Path(models["F16"]), Path(models["safetensors"]))
            write_job(job, models, items, batch_size=batch_size, settings={})
        for name, peer in peers.items():
            print(f"starting {name}", file=sys.stderr)
            try:
                python = peer.environment.python()
                begin_s = time.perf_counter()
                serving = _serving(
                    [str(python), str(SCRIPTS / peer.script), str(job)],
                    folder / f"{name}.log",
                    limit_s,
                )
                found.urls[name] = servers.enter_context(serving)
                found.startup_s[name] = time.perf_counter() - begin_s
            except PeerError as error:
                found.failed[name] = str(error)
        yield found


@contextmanager
def _serving(command: Sequence[str], log: Path, limit_s: float) -> Iterator[str]:
    """Run a server within the block, and yield its address when it answers.

    Raises:
      PeerError: it ended, or did not answer in time.
    """
    url = free_address()
    variables = {**os.environ, "PYTHONPATH": str(OFFLINE_SCRIPTS)}
    with (
        log.open("wb") as output,
        group([*command, url.rpartition(":")[2]], output, output, variables) as process,
    ):
        try:
            wait_for(process, url, limit_s)
        except RuntimeError as error:
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
            print(*lines[-SHOWN_LINES:], sep="\n", file=sys.stderr)
            raise PeerError(str(error)) from error
        yield url


def _write_tokenizer(source: Path, folder: Path) -> None:
    """Write a GGUF file's tokenizer for transformers, with which vLLM turns tokens into text."""
    made = read_gguf_tokenizer(GGUFSource(source).file.metadata, str(source))
    made.backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
