"""Measured step times of one device group and of two, and their files.

Like ExeGPT's profiles (section 3), a table separates attention, which depends on the positions
attended to, from the rest of a step, which depends only on the compiled size.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import math
import os
import reprlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar, final

import jax
import numpy as np

from jaxserve.core.config import EngineConfig, bucket
from jaxserve.core.errors import InvalidConfigError, InvalidProfileError
from jaxserve.core.host import cpu_name
from jaxserve.execution.step_cost import StepCost, StepWork
from jaxserve.memory.eviction import RecomputeCost
from jaxserve.memory.snapshots import HostStateCopy
from jaxserve.scheduling.plan import StepPlan
from jaxserve.sharding import StagePlan
from jaxserve.steps.slots import ADMISSIONS_A_CALL, MOVES_A_CALL, PAGE_UPDATES_A_CALL

# The fields of a configuration that change a compiled step and its time.
_COMPILED = (
    "page_size",
    "kv_dtype",
    "max_context",
    "token_buckets",
    "slot_buckets",
    "head_buckets",
    "max_decode_iterations",
    "attention",
    "row_kernels",
    "num_proposed",
    "drafts",
    "max_adapters",
)


@final
@dataclass(frozen=True, kw_only=True)
class Origin:
    """The model, device and configuration that step times were measured on.

    Attributes:
      model: the fields of the model's configuration by name, and dtypes and bytes of its weights.
      device: platform, kind and count of devices, processor and cores of the host, and the pipeline
        stages, if there are any.
      config: the sizes that the executables were compiled for.
      versions: versions of the software that compiles the steps.
    """

    model: dict[str, Any]
    device: dict[str, Any]
    config: EngineConfig
    versions: dict[str, str]

    @classmethod
    def of(
        cls,
        model_config: Any,
        params: Any,
        config: EngineConfig,
        stages: StagePlan | None = None,
    ) -> Origin:
        """Return the origin of a model and an engine's configuration.

        Args:
          model_config: the model's configuration, a dataclass.
          params: the parameters on their devices.
          stages: the model's pipeline stages, which have devices of their own.
        """
        leaves = jax.tree.leaves(params)
        devices = set().union(*(leaf.sharding.device_set for leaf in leaves))
        return cls(
            model={
                **asdict(model_config),
                # The configuration does not say whether weights are quantised, which changes times.
                "weight_dtypes": ", ".join(sorted({leaf.dtype.name for leaf in leaves})),
                "weight_bytes": sum(leaf.size * leaf.dtype.itemsize for leaf in leaves),
            },
            device=device_facts([*devices]) | _described(stages),
            config=config,
            versions=compiling_versions(),
        )

    def on(self, num_devices: int) -> Origin:
        return replace(self, device={**self.device, "count": num_devices})

    @classmethod
    def from_json(cls, read: dict[str, Any]) -> Origin:
        """Make an origin from its `dataclasses.asdict` after a round trip through JSON."""
        config: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in read["config"].items()
        }
        read = {**read, "config": EngineConfig(**config)}
        return cls(**read)

    @property
    def identity(self) -> str:
        """Text that is equal for origins without `differences`."""
        return json.dumps(self.compared(), sort_keys=True)

    def compared(self) -> dict[str, Any]:
        """Return the fields of model, device, compiled sizes and versions."""
        model = {f"model.{name}": value for name, value in self.model.items()}
        device = {f"device.{name}": value for name, value in self.device.items()}
        sizes = {name: getattr(self.config, name) for name in _COMPILED}
        versions = {f"version.{name}": value for name, value in self.versions.items()}
        return json.loads(json.dumps({**model, **device, **sizes, **versions}))


def device_facts(devices: Sequence[Any]) -> dict[str, Any]:
    """Return what is known of some equal devices and of their host."""
    return {
        "platform": devices[0].platform,
        "kind": devices[0].device_kind,
        "count": len(devices),
        "host_cpu": cpu_name(),
        "host_cores": len(os.sched_getaffinity(0)),
    }


def compiling_versions() -> dict[str, str]:
    return {name: metadata.version(name) for name in ("jax", "jaxlib", "jaxserve-runtime")}


def _described(stages: StagePlan | None) -> dict[str, Any]:
    if stages is None:
        return {}
    shape = [(len(stage.layers), stage.num_shards) for stage in stages.stages]
    return {
        "count": sum(num_shards for _, num_shards in shape),
        "stages": shape,
        "micro_batches": stages.micro_batches,
    }


@final
@dataclass(frozen=True)
class Curve:
    """Seconds over positions attended to, linear between measured points and beyond them.

    Attributes:
      points: (positions, seconds), positions strictly increasing; at least one.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        at = [position for position, _ in self.points]
        if not at or at != sorted(set(at)):
            raise InvalidProfileError(
                f"positions {at} are not allowed; those of a curve must increase strictly"
            )

    def __call__(self, positions: float) -> float:
        points = self.points
        if len(points) == 1:
            return points[0][1]
        above = bisect.bisect_left(points, (positions,))
        above = min(max(above, 1), len(points) - 1)
        (x0, y0), (x1, y1) = points[above - 1], points[above]
        return max(0.0, y0 + (y1 - y0) * (positions - x0) / (x1 - x0))


Times = TypeVar("Times")

# Far above all measured seconds and positions, and far below an overflow of their sums.
_MAX_NUMBER = 1e18

# The entries of `StepTimes` with curves.
_CURVES = ("decode_s", "prefill_s", "encode_s")


@final
@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """The seconds of each part of a step, as the cost of a simulated executor's steps.

    Attributes:
      decode_s: window size -> an iteration of a decode loop, over the positions its rows attend to.
      loop_s: window size -> a decode loop without its iterations.
      prefill_s: token bucket -> the body of a mixed step, over the positions that its rows of
        several tokens attend to. Rows of one token attend as in the widest decode loop. For an
        encoder-decoder model that is the decoder's part, and a row also attends to its prompt.
      encode_s: token bucket -> the encoder's part of a mixed step, over the positions that the
        tokens of its prompts attend to; empty for a model without an encoder.
      head_s: head bucket -> sampling in a mixed step.
      edit_s, move_s, admit_s: a call that edits slots, compacts them, or admits into them.
      page_out_s, page_in_s: a page's copy to the host, or back; 0 without host memory.
      state_out_s, state_in_s: the same of a state of recurrent layers.
      plan_s, submit_s: the host's planning and submission of a step.
    """

    origin: Origin
    decode_s: dict[int, Curve]
    loop_s: dict[int, float]
    prefill_s: dict[int, Curve]
    encode_s: dict[int, Curve]
    head_s: dict[int, float]
    edit_s: float
    move_s: float
    admit_s: float
    page_out_s: float
    page_in_s: float
    plan_s: float
    submit_s: float
    state_out_s: float = 0.0
    state_in_s: float = 0.0

    def host_s(self, plan: StepPlan) -> float:
        return self.plan_s + self.submit_s

    def device_s(self, work: StepWork) -> float:
        """Return the device's seconds of a step.

        Raises:
          InvalidConfigError: a handover, which needs the costs of several groups.
        """
        plan, config = work.plan, self.origin.config
        if plan.handovers:
            raise InvalidConfigError(
                f"a handover of {plan.num_pages_handed_over} pages has no measured time, because "
                "step times are those of one device group; pass planning.GroupCosts"
            )
        edits_s = self._edits_s(plan)
        if plan.is_decode_loop:
            iteration_s = self.decode_s[plan.window_size]
            return edits_s + self.loop_s[plan.window_size] + sum(map(iteration_s, work.decoded))
        if prompts := [row.num_tokens for row in plan.rows if row.encodes]:
            encoder_s = self.encode_s[bucket(sum(prompts), config.token_buckets)]
            edits_s += encoder_s(sum(num * num for num in prompts))
            if len(prompts) == len(plan.rows):
                return edits_s
        num_sampling = sum(row.samples for row in plan.rows)
        head_s = self.head_s[bucket(num_sampling, config.head_buckets)] if num_sampling else 0.0
        widest_s = self.decode_s[config.slot_buckets[-1]]
        attention_s = max(0.0, widest_s(sum(work.decoded)) - widest_s(0))
        num_tokens = plan.num_tokens - plan.num_encoded
        body_s = self.prefill_s[bucket(max(1, num_tokens), config.token_buckets)]
        return edits_s + body_s(work.prefilled) + attention_s + head_s

    def chunk_cost(self) -> RecomputeCost:
        """Return the cost of computing a page of a prompt in a full step (Pensieve, eq. 3.6)."""
        config = self.origin.config
        num_tokens = config.token_buckets[-1]
        body_s = (self.encode_s or self.prefill_s)[num_tokens]
        other_s = body_s(0) * config.page_size / num_tokens

        def seconds(context: int) -> float:
            return other_s + body_s(config.page_size * context) - body_s(0)

        return RecomputeCost.profiled(seconds, config.max_context)

    def _edits_s(self, plan: StepPlan) -> float:
        num_admits = -(-len(plan.admissions) // ADMISSIONS_A_CALL)
        num_edits = -(-len(plan.page_updates) // PAGE_UPDATES_A_CALL) or bool(plan.releases)
        swaps_s = len(plan.swaps_out) * self.page_out_s + len(plan.swaps_in) * self.page_in_s
        num_out = sum(isinstance(copy, HostStateCopy) and copy.goes_out for copy in plan.saves)
        swaps_s += num_out * self.state_out_s
        swaps_s += (plan.num_states_swapped - num_out) * self.state_in_s
        num_moves = -(-len(plan.moves) // MOVES_A_CALL)
        edits_s = num_admits * self.admit_s + num_edits * self.edit_s + num_moves * self.move_s
        return swaps_s + edits_s

    # ---- merging, saving and loading ----

    @classmethod
    def median(cls, measured: Sequence[StepTimes]) -> StepTimes:
        """Return a table with the median of each entry, of at least one table.

        Raises:
          InvalidProfileError: the tables' origins differ.
        """
        first = measured[0]
        for other in measured[1:]:
            raise_if_foreign(other.origin, first.origin, "a table to be merged")
        return cls._from_table(first.origin, _median([times._table() for times in measured]))

    def save(self, path: str | Path) -> None:
        """Write a JSON file, which `load` reads."""
        write_table(path, self.to_json())

    @classmethod
    def load(cls, path: str | Path, *, expected: Origin | None = None) -> StepTimes:
        """Read a file that `save` wrote.

        Raises:
          InvalidProfileError: the file has no step times, or their origin is not `expected`.
        """
        times = read_table(path, cls.from_json, "step times", "StepTimes.save")
        if expected is not None:
            raise_if_foreign(times.origin, expected, str(path))
        return times

    def to_json(self) -> dict[str, Any]:
        """Return the table and its origin in the types of JSON."""
        return {"origin": asdict(self.origin), **self._table()}

    @classmethod
    def from_json(cls, read: dict[str, Any]) -> Self:
        """Make a table from the result of `to_json`; raise one of `UNREADABLE` for other values."""
        return cls._from_table(Origin.from_json(read.pop("origin")), read)

    def _table(self) -> dict[str, Any]:
        table = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "origin"}
        for name in _CURVES:
            table[name] = {size: curve.points for size, curve in table[name].items()}
        return json.loads(json.dumps(table))

    @classmethod
    def _from_table(cls, origin: Origin, table: dict[str, Any]) -> Self:
        sizes = {
            "decode_s": origin.config.slot_buckets,
            "loop_s": origin.config.slot_buckets,
            "prefill_s": origin.config.token_buckets,
            "encode_s": origin.config.token_buckets if origin.config.has_encoder else (),
            "head_s": origin.config.head_buckets,
        }
        by_size = {
            name: {size: table[name][str(size)] for size in buckets}
            for name, buckets in sizes.items()
        }
        for name in _CURVES:
            by_size[name] = {
                size: Curve(tuple((checked_number(x), checked_number(s)) for x, s in points))
                for size, points in by_size[name].items()
            }
        for name in ("loop_s", "head_s"):
            by_size[name] = {size: checked_number(s) for size, s in by_size[name].items()}
        for size, curve in by_size["decode_s"].items():
            if not any(seconds for _, seconds in curve.points):
                raise InvalidProfileError(
                    f"iterations of {size} rows take 0 seconds, but each takes some; measure again"
                )
        others: dict[str, Any] = {
            name: checked_number(value) for name, value in table.items() if name not in by_size
        }
        return cls(origin=origin, **others, **dict[str, Any](by_size))


# Errors that readers of measured times raise for other contents; `RecursionError` is for too deep
# nesting.
UNREADABLE = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    OverflowError,
    RecursionError,
)


def checked_number(value: Any) -> float:
    """Return a number from a file as a float; raise ValueError outside 0 to `_MAX_NUMBER`."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= _MAX_NUMBER:
        raise ValueError(f"{reprlib.repr(value)} is not a number of 0 to {_MAX_NUMBER:g}")
    return float(value)


def write_table(path: str | Path, table: dict[str, Any]) -> None:
    """Write measured times into a JSON file, and make missing folders."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")


def read_table(
    path: str | Path, read: Callable[[dict[str, Any]], Times], what: str, writer: str
) -> Times:
    """Read a JSON file and convert it with `read`; raise InvalidProfileError for other contents."""
    try:
        return read(json.loads(Path(path).read_text(encoding="utf-8")))
    except UNREADABLE as error:
        raise InvalidProfileError(
            f"{path} does not hold {what} ({type(error).__name__}: {error}); pass a file "
            f"that {writer} wrote, or measure again"
        ) from error


def _median(trees: Sequence[Any]) -> Any:
    """Return the median of each number of equally nested dictionaries and lists."""
    first = trees[0]
    if isinstance(first, dict):
        return {key: _median([tree[key] for tree in trees]) for key in first}
    if isinstance(first, list):
        return [_median(items) for items in zip(*trees, strict=True)]
    return float(np.median(trees))


class ComparedOrigin(Protocol):
    def compared(self) -> dict[str, Any]:
        """Return what decides whether times of one origin hold for another."""
        ...


def differences(given: ComparedOrigin, expected: ComparedOrigin) -> list[str]:
    found, wanted = given.compared(), expected.compared()
    return [
        f"{name} is {found.get(name)!r}, not {wanted.get(name)!r}"
        for name in sorted({*found, *wanted})
        if found.get(name) != wanted.get(name)
    ]


def raise_if_foreign(given: ComparedOrigin, expected: ComparedOrigin, name: str) -> None:
    """Raise InvalidProfileError if the origins have `differences`; `name` is for the message."""
    if found := differences(given, expected):
        raise InvalidProfileError(
            f"{name} was measured on something else: {'; '.join(found)}; measure again"
        )


@final
@dataclass(frozen=True)
class GroupCosts:
    """The costs of each group's steps and of the KV handovers between groups.

    The link carries one handover at a time, while the groups compute.

    Attributes:
      groups: the costs of each device group, by its number in `StepPlan.group`.
      page_bytes: bytes of a page, in all layers.
      link_bytes_per_s: bandwidth of all links between two groups together. Through host memory, as
        in ExeGPT's runner (section 3), a page crosses two links in turn, at half the bandwidth.
      handover_s: fixed seconds of a handover, without its bytes.
      beside: how many times as long a step of each group takes while the other group computes; see
        `GroupTimes`.
      copies_follow_steps: whether a handover begins only after its source has run the steps that
        were submitted before it, as on devices.
    """

    groups: tuple[StepCost, ...]
    page_bytes: float
    link_bytes_per_s: float
    handover_s: float = 0.0
    beside: tuple[float, ...] = (1.0, 1.0)
    copies_follow_steps: bool = False

    def host_s(self, plan: StepPlan) -> float:
        return self.groups[0 if plan.handovers else plan.group].host_s(plan)

    def device_s(self, work: StepWork) -> float:
        plan = work.plan
        if not plan.handovers:
            slower = self.beside[plan.group] if work.is_beside else 1.0
            return slower * self.groups[plan.group].device_s(work)
        num_bytes = plan.num_pages_handed_over * self.page_bytes
        before_s = work.source_s if self.copies_follow_steps else 0.0
        return before_s + self.handover_s + num_bytes / self.link_bytes_per_s


@final
@dataclass(frozen=True, kw_only=True)
class GroupTimes:
    """Step times of two device groups, each measured while the other is idle.

    Attributes:
      groups: step times of the encode group and of the decode group.
      handover_s: seconds of a handover without its pages, from submission to arrival.
      page_s: seconds of each page of a handover.
      beside: how many times as long a step of each group takes while the other group computes,
        pages are handed over, and the host plans; above 1 where the groups share something, as host
        devices share cores.
    """

    groups: tuple[StepTimes, ...]
    handover_s: float
    page_s: float
    beside: tuple[float, ...] = (1.0, 1.0)

    def save(self, path: str | Path) -> None:
        """Write a JSON file, which `load` reads."""
        groups = [times.to_json() for times in self.groups]
        rest = {name: getattr(self, name) for name in ("handover_s", "page_s", "beside")}
        write_table(path, {"groups": groups, **rest})

    @classmethod
    def load(cls, path: str | Path, *, expected: Sequence[Origin] | None = None) -> GroupTimes:
        """Read a file that `save` wrote.

        Args:
          expected: the origin of each group.

        Raises:
          InvalidProfileError: the file has no times of two groups, or an origin is not as expected.
        """
        times = read_table(path, cls._from_json, "times of two groups", "GroupTimes.save")
        for group, origin in enumerate(expected or ()):
            name = ("encode", "decode")[group]
            raise_if_foreign(times.groups[group].origin, origin, f"the {name} group of {path}")
        return times

    @classmethod
    def _from_json(cls, read: dict[str, Any]) -> GroupTimes:
        encode, decode = map(StepTimes.from_json, read["groups"])
        of_encode, of_decode = map(checked_number, read["beside"])
        if min(of_encode, of_decode) < 1:
            raise ValueError(f"beside={read['beside']}: a step beside another takes no less time")
        return cls(
            groups=(encode, decode),
            handover_s=checked_number(read["handover_s"]),
            page_s=checked_number(read["page_s"]),
            beside=(of_encode, of_decode),
        )

    def costs(self) -> GroupCosts:
        # The unit of bytes is a page, because the seconds of a page are measured.
        return GroupCosts(
            self.groups,
            page_bytes=1.0,
            link_bytes_per_s=1.0 / max(self.page_s, 1e-12),
            handover_s=self.handover_s,
            beside=self.beside,
            copies_follow_steps=True,
        )


# Times that depend on the number of devices in a group.
_DIVIDED = ("decode_s", "prefill_s", "encode_s")


@final
class GroupSizes:
    """Step times by group size, measured or derived; times of one group also serve the other."""

    def __init__(self, measured: GroupTimes):
        self._measured: dict[int, StepTimes] = {}
        self._present = measured
        self.learn(measured)

    def learn(self, measured: GroupTimes) -> None:
        self._present = measured
        for times in measured.groups:
            self.add(times)

    def add(self, times: StepTimes) -> None:
        """Add the times of a group of `times.origin.device["count"]` devices."""
        self._measured[times.origin.device["count"]] = times

    def is_measured(self, *sizes: int) -> bool:
        return all(size in self._measured for size in sizes)

    def times(self, encode: int, decode: int) -> GroupTimes:
        """Return the times of groups of these sizes; handovers keep their measured times."""
        groups = tuple(map(self._of_size, (encode, decode)))
        return replace(self._present, groups=groups)

    def _of_size(self, size: int) -> StepTimes:
        if size in self._measured:
            return self._measured[size]
        near = sorted(self._measured, key=lambda each: abs(math.log(each / size)))
        nearest = self._measured[near[0]]
        other = self._measured[near[1]] if near[1:] else None
        return derived(nearest, size, other)


def derived(times: StepTimes, size: int, other: StepTimes | None = None) -> StepTimes:
    """Return the times of a group of `size` devices, derived from `times` (the nearest size).

    A step on k devices takes s + p / k seconds (Amdahl's law). The median ratio to `other`, another
    measured size, gives s and p. Without one s is 0, which overrates larger groups and underrates
    smaller ones. The host's times do not change.
    """
    count = times.origin.device["count"]
    parallel = 1.0
    if other is not None:
        share = count / other.origin.device["count"]
        ratio = statistics.median(_ratios(times, other))
        # Of a step on `count` devices; ratio = (1 - parallel) + parallel * share.
        parallel = min(1.0, max(0.0, (ratio - 1) / (share - 1)))
    factor = (1 - parallel) + parallel * count / size
    divided: dict[str, Any] = {
        name: {
            key: Curve(tuple((position, factor * s) for position, s in curve.points))
            for key, curve in getattr(times, name).items()
        }
        for name in _DIVIDED
    }
    origin = replace(times.origin, device={**times.origin.device, "count": size})
    return replace(times, origin=origin, **divided)


def _ratios(times: StepTimes, other: StepTimes) -> Iterator[float]:
    for name in _DIVIDED:
        mine, others = getattr(times, name), getattr(other, name)
        for key, curve in mine.items():
            positions = curve.points[-1][0]
            if key in others and curve(positions) > 0:
                yield others[key](positions) / curve(positions)


_Times = TypeVar("_Times", StepTimes, GroupTimes)
# The beginnings of the names of files.
_FILES = {StepTimes: "steps", GroupTimes: "groups"}


def find_times(kind: type[_Times], folder: Path, expected: Any) -> _Times | None:
    """Return the newest times in a folder that `kind.load` accepts as expected, if there are any.

    Damaged files and those of another model, device or configuration are skipped.
    """
    try:
        paths = sorted(
            folder.glob(f"{_FILES[kind]}-*.json"), key=lambda path: -path.stat().st_mtime
        )
    except OSError:
        return None
    for path in paths:
        try:
            found: Any = kind.load(path, expected=expected)
        except InvalidProfileError:
            continue
        return found
    return None


def keep_times(folder: Path, times: StepTimes | GroupTimes) -> Path:
    """Save times in a folder, replacing those of the same origins, and return the file.

    Raises:
      OSError: the file cannot be written.
    """
    groups = times.groups if isinstance(times, GroupTimes) else (times,)
    identity = "".join(each.origin.identity for each in groups)
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    path = folder / f"{_FILES[type(times)]}-{digest}.json"
    partial_path = path.with_suffix(".partial")
    times.save(partial_path)
    partial_path.replace(path)
    return path
