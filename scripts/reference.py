"""Write docs/reference.md from the sources: `python -m scripts.reference [--check]`.

Options and sampling parameters come from the docstrings of their classes, methods from `Runtime`,
and names of other engines from the tables that answer unknown names.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxserve import Runtime
from jaxserve.core import options
from jaxserve.core.options import RuntimeOptions
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.core.suggestions import OPTIONS_ELSEWHERE, PARAMS_ELSEWHERE

PAGE = Path(__file__).parents[1] / "docs" / "reference.md"
_ENVIRONMENT = {
    "JAXSERVE_CACHE": "folder of downloads, converted weights and executables; `~/.cache/jaxserve`",
    "JAXSERVE_API_KEY": "a key of the server, in addition to those of `--api-key-file`",
    "JAXSERVE_COORDINATOR, JAXSERVE_NUM_PROCESSES, JAXSERVE_PROCESS_ID": "the processes of a job "
    "([several processes](several_processes.md))",
    "JAXSERVE_START_TIMEOUT, JAXSERVE_HEARTBEAT_TIMEOUT, JAXSERVE_STEP_TIMEOUT": "seconds until "
    "all processes of a job have started, 120; until JAX gives a silent one up, 25; until a step "
    "of theirs counts as hung, 600",
    "HF_HOME, HF_TOKEN, HF_HUB_OFFLINE, HF_ENDPOINT": "as everywhere for the Hugging Face Hub",
    "XLA_FLAGS, CUDA_VISIBLE_DEVICES, JAX_PLATFORMS": "as everywhere for JAX",
    "JAXSERVE_GRAPH_LOOPS": "1 to record decode loops in CUDA graphs, 0 to leave them out; by "
    "default a test decides ([GPUs](gpus.md#loops-in-cuda-graphs))",
    "XLA_CLIENT_MEM_FRACTION": "fraction of a GPU's memory that JAX may use; 0.75, and on the "
    "command line 0.92 ([GPUs](gpus.md))",
    "CXX": "the C++ compiler of the kernels for CPUs; by default `c++`, `g++` or `clang++`",
    "PALLAS_KERNELS_CACHE": "folder of compiled kernels for CPUs; `$JAXSERVE_CACHE/kernels`",
    "JAXSERVE_JOURNAL": "file of `--journal`, which keeps conversations",
    "XDG_DATA_HOME": "`jaxserve/conversations.sqlite` in it is the journal without "
    "`JAXSERVE_JOURNAL`; `~/.local/share`",
    "XDG_STATE_HOME": "`jaxserve/chat_history` in it has the lines of `jaxserve chat`; "
    "`~/.local/state`",
}


def page() -> str:
    """Return the whole page."""
    return "\n".join(
        [
            "# Reference",
            "",
            "Written by `python -m scripts.reference` from the sources. `jaxserve COMMAND --help` "
            "has the options of the command line.",
            "",
            "## Methods of Runtime",
            "",
            "`Fleet` has those of `Service`, too. An editor shows arguments and errors.",
            "",
            *_table(("method", "what it does"), _methods(Runtime)),
            "",
            "## Options of Runtime",
            "",
            "Keyword arguments of `Runtime` and `Runtime.from_pretrained`.",
            "",
            *_table(("option", "default", "meaning"), _fields(RuntimeOptions)),
            "",
            "## Sampling parameters",
            "",
            *_table(("parameter", "default", "meaning"), _fields(SamplingParams)),
            "",
            "## Environment variables",
            "",
            *_table(("variable", "meaning"), ((f"`{k}`", v) for k, v in _ENVIRONMENT.items())),
            "",
            "## Names in vLLM, SGLang and transformers",
            "",
            *_table(("there", "here"), _elsewhere({**OPTIONS_ELSEWHERE, **PARAMS_ELSEWHERE})),
            "",
        ]
    )


def _table(titles: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> Iterator[str]:
    for row in (titles, ("---",) * len(titles), *rows):
        cells = (cell.replace("|", r"\|") for cell in row)
        yield f"| {' | '.join(cells)} |"


def _methods(kind: type) -> Iterator[tuple[str, str]]:
    members = {
        name: each for base in reversed(kind.__mro__[:-1]) for name, each in vars(base).items()
    }
    for name, member in members.items():
        function = getattr(member, "__func__", member)
        if name.startswith("_") or not (
            inspect.isfunction(function) or isinstance(member, property)
        ):
            continue
        summary = " ".join((inspect.getdoc(getattr(kind, name)) or "").split("\n\n")[0].split())
        arguments = ""
        if inspect.isfunction(function):
            given = list(inspect.signature(function).parameters.values())[1:]
            arguments = f"({', '.join(_shown(each) for each in given)})"
        yield f"`{name}{arguments}`", summary


def _shown(parameter: inspect.Parameter) -> str:
    stars: dict[Any, str] = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
    return stars.get(parameter.kind, "") + parameter.name


def _fields(kind: type) -> Iterator[tuple[str, str, str]]:
    meanings = _attributes(inspect.getdoc(kind) or "")
    for field in dataclasses.fields(kind):
        yield f"`{field.name}`", f"`{_default(field.default)}`", meanings[field.name]


def _default(value: Any) -> str:
    return repr(value) if not dataclasses.is_dataclass(value) else f"{type(value).__name__}()"


def _attributes(doc: str) -> dict[str, str]:
    """Return the entries of a docstring's "Attributes:" by name; one entry may have several."""
    section = doc.split("Attributes:\n", 1)[1].split("\n\n")[0]
    found: dict[str, str] = {}
    for entry in re.split(r"\n  (?=\w)", "\n" + section)[1:]:
        names, _, text = entry.partition(":")
        text = re.sub(r"`([A-Z_]+)`", _values, " ".join(text.split()))
        found |= dict.fromkeys(names.split(", "), text)
    return found


def _values(found: re.Match[str]) -> str:
    """Return the values of a constant of the options' module instead of its name."""
    return ", ".join(
        f'"{each}"' if isinstance(each, str) else str(each) for each in vars(options)[found[1]]
    )


def _elsewhere(names: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    return ((f"`{there}`", here) for there, here in sorted(names.items()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether the page is current")
    if parser.parse_args().check:
        return int(PAGE.read_text("utf-8") != page())
    PAGE.write_text(page(), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
