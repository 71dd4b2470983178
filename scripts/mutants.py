"""Apply the faults of `mutants.toml` to copies of the last commit; print which faults tests catch.

A test that fails catches a mutant, and so do tests that crash, time out or cannot be imported.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import final

from rich.console import Console
from rich.table import Table

from jaxserve.core.assets import CACHE_VARIABLE, cache_folder

ROOT = Path(__file__).parents[1]
_PYTEST = ("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider")
# The tests of a run: those of `make test`, the rest of `make test-all`, or both.
_MARKERS = {"test": ("-m", "not release"), "release": ("-m", "release"), "all": ()}
_RUNS = {"test": ("test",), "all": ("all",), "both": ("test", "release")}
# Exit codes of pytest, and of tests that crash.
_PASSED, _FAILED, _STOPPED, _USAGE, _NO_TESTS = 0, 1, 2, 4, 5
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
_OUT_HELP = (
    "file of JSON lines; what it has of this commit is not run again, and the tests that caught "
    "mutants of earlier commits run first"
)
# Caches that mutants may share, because their names depend on their contents: C++ libraries, and
# executables under a key of all sources or of the lowered program.
_NAMED_BY_CONTENT = ("assets", "executables", "kernels", "test-xla")


@final
@dataclass(frozen=True)
class Mutant:
    """A fault: `old`, which occurs once in the file at `path` ("" for no fault), becomes `new`.

    `tests` are the files and folders that should catch it; `what` says what is wrong.
    """

    name: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]
    what: str

    def applied(self, source: str) -> str:
        """Return the source with the fault; raises ValueError unless `old` occurs exactly once."""
        if source.count(self.old) != 1:
            raise ValueError(
                f"{self.name}: {self.old!r} occurs {source.count(self.old)} times in {self.path}; "
                "it must occur once"
            )
        return source.replace(self.old, self.new)


@final
@dataclass(frozen=True)
class Outcome:
    """Whether the tests caught a mutant.

    Attributes:
      by_test, by_all: whether `make test` and `make test-all` do; None where that is not known.
      seconds: of all its runs.
      first: the test that failed first, or what else ended the run.
      error: why its tests could not be run; "" if they ran.
    """

    mutant: str
    commit: str
    tier: str
    by_test: bool | None
    by_all: bool | None
    seconds: float
    first: str
    error: str

    @property
    def is_caught(self) -> bool:
        return bool(self.by_test or self.by_all)


def read_mutants() -> list[Mutant]:
    given = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return [Mutant(**each | {"tests": tuple(each["tests"])}) for each in given["mutant"]]


def verdict_of(returncode: int, output: str) -> tuple[bool, str]:
    """Return whether a run of pytest caught a fault, and which test did.

    Raises:
      RuntimeError: the run gives no verdict.
    """
    first = re.search(r"^(?:FAILED|ERROR) (\S+)|^ImportError while loading conftest", output, re.M)
    if returncode in (_PASSED, _NO_TESTS):
        return False, ""
    if returncode == _FAILED or (returncode in (_STOPPED, _USAGE) and first):
        return True, (first and first.group(1)) or "at import"
    if -returncode in _CRASHES:
        return True, f"killed by {signal.Signals(-returncode).name}"
    raise RuntimeError(f"pytest ended with {returncode}: {output.strip()[-300:]}")


@final
class Workplace:
    """A copy of the last commit in which pytest runs, with its own cache folder.

    Args:
      folder: empty; its creator removes it.
      timeout_s: time limit of a run; one that times out catches the mutant.
    """

    def __init__(self, folder: Path, timeout_s: float):
        self._copy, self._cache, self._scratch = (folder / n for n in ("copy", "cache", "tmp"))
        self._timeout_s = timeout_s
        # Bytecode is made again only if the second of a change, or the size, differs.
        self._changed_s = itertools.count(int(time.time()))
        self._process: subprocess.Popen[str] | None = None
        self._is_closed = False
        command = ["git", "archive", "--format=tar", "HEAD"]
        archive = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(self._copy, filter="data")
        self._cache.mkdir(mode=0o700)
        for name in ("assets", "kernels", "test-xla"):
            (cache_folder() / name).mkdir(exist_ok=True, mode=0o700)
            (self._cache / name).symlink_to(cache_folder() / name)
        with suppress(FileNotFoundError):  # its files are replaced, and never written to
            executables = cache_folder() / "executables"
            shutil.copytree(executables, self._cache / "executables", copy_function=os.link)
        self._environment = os.environ | {
            "PYTHONPATH": str(self._copy),
            "TMPDIR": str(self._scratch),
            CACHE_VARIABLE: str(self._cache),
        }

    def judge(self, mutant: Mutant, tier: str, commit: str, caught_by: str) -> Outcome:
        """Run tests with the fault, `caught_by` first if it is not ""."""
        begin_s, found, first, error = time.monotonic(), dict[str, bool](), "", ""
        path = self._copy / mutant.path
        source = path.read_text(encoding="utf-8") if mutant.path else ""
        try:
            if mutant.path:
                self._write(path, mutant.applied(source))
            for run in _RUNS[tier]:
                if caught_by and not any(found.values()):
                    with suppress(RuntimeError):  # there is no such test any longer
                        found[run], first = self._run([caught_by], _MARKERS[run])
            for run in _RUNS[tier]:
                if not any(found.values()):
                    found[run], first = self._run(mutant.tests, _MARKERS[run])
        except (RuntimeError, ValueError) as reason:
            error = str(reason)
        if mutant.path:
            self._write(path, source)
        for kept in self._cache.iterdir():
            if kept.name not in _NAMED_BY_CONTENT:
                shutil.rmtree(kept, ignore_errors=True)
        by_test = found.get("test")
        by_all = found.get("all", by_test or found.get("release"))
        seconds = round(time.monotonic() - begin_s, 1)
        return Outcome(mutant.name, commit, tier, by_test, by_all, seconds, first, error)

    def check_imports(self) -> None:
        """Check that processes in other folders import the copy too, and no installed package."""
        command = [sys.executable, "-c", "import jaxserve; print(jaxserve.__file__)"]
        file = subprocess.check_output(command, cwd="/", env=self._environment, text=True).strip()
        if not Path(file).is_relative_to(self._copy):
            raise RuntimeError(f"tests would import {file}, and not the copy in {self._copy}")

    def close(self) -> None:
        """End the run and start no other; any thread may call it."""
        self._is_closed = True
        if self._process is not None:
            _kill(self._process)

    def _run(self, tests: Sequence[str], markers: Sequence[str]) -> tuple[bool, str]:
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._scratch.mkdir()
        process = self._process = subprocess.Popen(
            [sys.executable, *_PYTEST, *markers, *tests],
            cwd=self._copy,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        if self._is_closed:  # meanwhile
            _kill(process)
        try:
            output, _ = process.communicate(timeout=self._timeout_s)
        except subprocess.TimeoutExpired:
            return True, f"not over after {self._timeout_s:g} s"
        finally:
            _kill(process)  # and what its tests left
            process.wait()
        return verdict_of(process.returncode, output)

    def _write(self, path: Path, source: str) -> None:
        path.write_text(source, encoding="utf-8")
        second = next(self._changed_s)
        os.utime(path, (second, second))


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a process that leads a session, and all of its group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def judged(
    mutants: Sequence[Mutant],
    tier: str,
    commit: str,
    caught_by: Mapping[str, str],
    num_jobs: int,
    timeout_s: float,
) -> Generator[Outcome, None, None]:
    """Yield the outcome of each mutant as it ends; no process or folder remains afterwards.

    `caught_by` names the test that caught a mutant before, which runs first.
    """
    places: queue.SimpleQueue[Workplace] = queue.SimpleQueue()

    def judge(mutant: Mutant) -> Outcome:
        place = places.get()
        try:
            return place.judge(mutant, tier, commit, caught_by.get(mutant.name, ""))
        finally:
            places.put(place)

    cache_folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix=".mutants-", dir=cache_folder(), ignore_cleanup_errors=True
    ) as folder:
        every = []
        for job in range(min(num_jobs, len(mutants))):
            own = Path(folder, str(job))
            own.mkdir()
            every.append(Workplace(own, timeout_s))
            every[-1].check_imports()
            places.put(every[-1])
        pool = ThreadPoolExecutor(num_jobs)
        try:
            for done in as_completed([pool.submit(judge, mutant) for mutant in mutants]):
                yield done.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for place in every:
                place.close()
            pool.shutdown()


def print_table(outcomes: Sequence[Outcome]) -> None:
    table = Table("mutant", "make test", "make test-all", "seconds", "first failing test")
    said = {True: "caught", False: "-", None: ""}
    for each in outcomes:
        last = f"error: {each.error}" if each.error else each.first
        columns = said[each.by_test], said[each.by_all], f"{each.seconds:.0f}", last
        table.add_row(each.mutant, *columns)
    console = Console(width=None if sys.stdout.isatty() else 180, highlight=False)
    console.print(table)
    by_test, by_all = sum(bool(o.by_test) for o in outcomes), sum(bool(o.by_all) for o in outcomes)
    num_neither = sum(not (o.is_caught or o.error) for o in outcomes)
    console.print(
        f"{len(outcomes)} mutants: make test catches {by_test}, make test-all {by_all}, neither "
        f"{num_neither}; {sum(bool(o.error) for o in outcomes)} could not be judged"
    )


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m scripts.mutants", description=__doc__)
    add = parser.add_argument
    add("--only", metavar="PATTERN", default="*", help="mutants with such a name or path")
    add("--tier", choices=tuple(_RUNS), default="both", help="tests that are run")
    add("--jobs", type=int, default=1, help="mutants at a time, each in a copy of the sources")
    add("--out", type=Path, help=_OUT_HELP)
    add("--again", action="store_true", help="run also what --out has")
    add("--timeout", type=float, default=1800.0, help="seconds of one run of pytest")
    add("--check", action="store_true", help="run the tests without a fault, each set once")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Judge mutants, and print a table; return 0 if all are caught, or with --check none."""
    options = build_parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    command = ["git", "rev-parse", "HEAD"]
    commit = subprocess.check_output(command, cwd=ROOT, text=True).strip()
    mutants = [m for m in read_mutants() if any(fnmatch(s, options.only) for s in (m.name, m.path))]
    if options.check:
        sets = dict.fromkeys(each.tests for each in mutants)
        mutants = [Mutant(" ".join(each), "", "", "", each, "no fault") for each in sets]
    known: dict[str, Outcome] = {}
    caught_by: dict[str, str] = {}
    out: Path | None = options.out
    if out is not None and out.exists():
        for line in out.read_text(encoding="utf-8").splitlines():
            each = Outcome(**json.loads(line))
            if each.is_caught and each.first.startswith("tests/"):
                caught_by[each.mutant] = each.first
            is_same = (each.commit, each.tier, each.error) == (commit, options.tier, "")
            if is_same and not options.again:
                known[each.mutant] = each
    todo = [each for each in mutants if each.name not in known]
    num_left = len(todo)
    outcomes = judged(todo, options.tier, commit, caught_by, options.jobs, options.timeout)
    try:
        for each in outcomes:
            known[each.mutant], num_left = each, num_left - 1
            said = f"{each.error or each.first or 'not caught'} ({each.seconds:.0f} s)"
            print(f"{each.mutant}: {said}; {num_left} left", file=sys.stderr, flush=True)
            if out is not None:
                with out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(each)) + "\n")
    except KeyboardInterrupt:
        print("interrupted; --out, if given, has what was judged so far", file=sys.stderr)
        return 130
    finally:
        outcomes.close()
    of_all = [known[each.name] for each in mutants]
    print_table(of_all)
    return int(any(each.error or each.is_caught == options.check for each in of_all))


if __name__ == "__main__":
    sys.exit(main())
