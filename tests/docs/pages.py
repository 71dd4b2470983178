"""The code blocks of README.md and docs/, and a process that runs those of one page.

`python -m tests.docs.pages docs/rollouts.md` runs them in the working directory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import runpy
import shlex
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/**/*.md")))

_FENCED = re.compile(
    r"(?:^|(?<=^```))(?P<before>[^\n]*)\n(?:<!-- not run: (?P<reason>[^\n]+) -->\n|\n)?"
    r"```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
# Blocks that are files, or changes to files: tests of these guides build a package of them.
_NAMES_A_FILE = re.compile(r"`[\w/]+\.py`:$")
_BEGINS_WITH_A_FILE = re.compile(r"# [\w/]+\.py\n")


@dataclass(frozen=True)
class Fenced:
    """A code block.

    Attributes:
      page: the file, below the root of the sources.
      line: the number of lines of the page before the first one of `text`.
      kind: "python", a part of the page's session; "commands"; "file"; or "other".
      reason: why it is not run, or None.
    """

    page: str
    line: int
    kind: str
    reason: str | None
    text: str

    def commands(self) -> Iterator[list[str]]:
        """Yield the words of each command, without comments."""
        for line in self.text.replace("\\\n", " ").splitlines():
            if words := shlex.split(line, comments=True):
                yield words


def fenced(page: str) -> list[Fenced]:
    """Return the code blocks of a page, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = []
    for match in _FENCED.finditer(text):
        line = text.count("\n", 0, match.start("text"))
        kind = _kind(match)
        found.append(Fenced(page, line, kind, match["reason"], match["text"]))
    num_lines = sum(line.startswith("```") for line in text.splitlines())
    assert num_lines == 2 * len(found), f"{page} has a code block that is not understood"
    return found


def _kind(match: re.Match[str]) -> str:
    if match["language"] == "python":
        is_file = _NAMES_A_FILE.search(match["before"]) or _BEGINS_WITH_A_FILE.match(match["text"])
        return "file" if is_file else "python"
    return {"": "commands", "diff": "file"}.get(match["language"], "other")


def session(page: str) -> list[Fenced]:
    """Return the Python blocks of a page that run, one after the other with the same names."""
    return [each for each in fenced(page) if each.kind == "python" and each.reason is None]


def run(page: str) -> None:
    """Run the Python blocks of a page, with the stand-ins of the working directory."""
    from jaxserve.core.options import RuntimeOptions
    from jaxserve.models import registry

    parse = RuntimeOptions.parse
    names: dict[str, Any] = {"__name__": "__main__"}
    blocks = session(page)
    with (
        mock.patch.object(registry, "REGISTERED_MODELS", ()),  # the folder of such a name is found
        # Only what is used is compiled.
        mock.patch.object(RuntimeOptions, "parse", lambda given: parse({"warmup": False} | given)),
        _server(blocks),
    ):
        for block in blocks:
            # Tracebacks name the page and its line.
            exec(compile("\n" * block.line + block.text, str(ROOT / page), "exec"), names)


@contextmanager
def _server(blocks: list[Fenced]) -> Iterator[None]:
    """Serve the model that clients of port 8000 name, on a free port that they get instead."""
    text = "".join(block.text for block in blocks)
    if "127.0.0.1:8000" not in text:
        yield
        return
    import openai

    from jaxserve import Runtime
    from jaxserve.server import ServerOptions, running

    name = re.findall(r'model="([^"]+)"', text)[0]
    client = openai.OpenAI
    with (
        Runtime.from_pretrained(name) as rt,
        running(rt, ServerOptions(model_name=name, port=0)) as url,
        mock.patch.object(
            openai,
            "OpenAI",
            lambda base_url, api_key: client(base_url=f"{url}/v1", api_key=api_key),
        ),
    ):
        yield


def check_command(words: list[str]) -> None:
    """Check a command line without running it: the program parses its options.

    Raises:
      AssertionError: the program or the target is unknown, or its parser refuses the options.
    """
    while re.match(r"\w+=", words[0]):
        words = words[1:]
    words = [word for word in words if word != "&"]
    if "jaxserve" in words:
        _parse_by_typer(words[words.index("jaxserve") + 1 :])
    elif words[:2] == ["python", "-m"]:
        _parse_by_argparse(words[2], words[3:])
    elif words[:2] == ["python", "-c"]:
        compile(words[2], "-c", "exec")
    elif words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), words
    elif words[0] == "curl":
        for body in (words[i + 1] for i, word in enumerate(words) if word == "-d"):
            json.loads(body)
    else:
        assert words[:2] in (["pip", "install"], ["git", "worktree"]), f"unknown: {words}"


@cache
def _commands() -> Any:
    from typer.main import get_command

    from jaxserve.cli import app

    return get_command(app)


def _parse_by_typer(words: list[str]) -> None:
    from jaxserve.cli.arena import ArenaGroup

    command = _commands()
    while hasattr(command, "commands"):
        words = command.completed(words) if isinstance(command, ArenaGroup) else words
        assert words and words[0] in command.commands, words
        command = command.commands[words[0]]
        words = words[1:]
    command.make_context(command.name, words)


class _Parsed(BaseException):
    pass


def _parse_by_argparse(module: str, words: list[str]) -> None:
    """Run a module until it has parsed its options."""
    parse = argparse.ArgumentParser.parse_args

    def parse_only(parser: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        parse(parser, args, namespace)
        raise _Parsed

    with (
        mock.patch.object(argparse.ArgumentParser, "parse_args", parse_only),
        mock.patch.object(sys, "argv", [module, *words]),
        contextlib.suppress(_Parsed),
        warnings.catch_warnings(),
    ):
        # Other tests may have imported the module; here it only parses.
        warnings.filterwarnings("ignore", ".* found in sys.modules", RuntimeWarning)
        try:
            runpy.run_module(module, run_name="__main__")
        except SystemExit as end:
            assert not end.code, f"{module} refuses {words}"


if __name__ == "__main__":
    run(sys.argv[1])
