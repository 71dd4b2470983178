"""Measured seconds of the parts of a layer, saved after every point."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, final

from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.options import RuntimeOptions
from jaxserve.execution.sizes import platform_defaults
from jaxserve.models.config import DecoderConfig
from jaxserve.planning.step_times import (
    checked_number,
    compiling_versions,
    device_facts,
    raise_if_foreign,
    read_table,
)

# The longest length measured by default; attention over longer ones is extrapolated.
_MAX_LENGTH = 2048


@final
@dataclass(frozen=True, kw_only=True)
class LayerSizes:
    """The largest sizes to measure; costs of larger ones are extrapolated.

    Attributes:
      max_tokens: tokens of a pass that encodes.
      max_batch: sequences of a pass that decodes.
      max_length: tokens of a sequence.
      page_size: tokens per page of the KV cache.
      kv_dtype: dtype of the KV cache; None for the model's.
      quantize: format of the layers' weights, "int8" or "int4"; None for dense weights.
      quantize_embeddings: format of the head if `quantize` is given, see `RuntimeOptions`.
    """

    max_tokens: int
    max_batch: int
    max_length: int
    page_size: int = 16
    kv_dtype: str | None = None
    quantize: str | None = None
    quantize_embeddings: str | None = None

    def __post_init__(self) -> None:
        if self.quantize == "keep":
            raise InvalidConfigError(
                "quantize='keep' is not allowed for layers with random weights, which have no "
                "blocks of a checkpoint to keep; pass 'int8' or 'int4'"
            )
        RuntimeOptions.parse(self.weights)  # raises for unknown formats
        for name in ("max_tokens", "max_batch", "max_length", "page_size"):
            if getattr(self, name) < 1:
                raise InvalidConfigError(
                    f"{name}={getattr(self, name)} is not allowed; pass at least 1"
                )

    @property
    def weights(self) -> dict[str, Any]:
        return {"quantize": self.quantize, "quantize_embeddings": self.quantize_embeddings}

    @classmethod
    def of(
        cls, config: DecoderConfig, *, max_length: int | None = None, kv_dtype: str | None = None
    ) -> LayerSizes:
        """Return an engine's default sizes on this platform, with lengths of up to 2048 tokens."""
        defaults = platform_defaults()
        return cls(
            max_tokens=defaults.max_step_tokens,
            max_batch=defaults.max_slots,
            max_length=min(max_length or _MAX_LENGTH, config.max_position_embeddings),
            kv_dtype=kv_dtype,
        )


@final
@dataclass(frozen=True, kw_only=True)
class LayerOrigin:
    """The model, devices, sizes and versions that layers were measured with; all are compared."""

    model: dict[str, Any]
    device: dict[str, Any]
    sizes: dict[str, Any]
    versions: dict[str, str]

    @classmethod
    def of(cls, config: DecoderConfig, devices: Sequence[Any], sizes: LayerSizes) -> LayerOrigin:
        """Return the origin of measurements on these devices, in the types of JSON."""
        own = cls(
            model=asdict(config),
            device=device_facts(devices),
            sizes=asdict(sizes),
            versions=compiling_versions(),
        )
        return cls(**json.loads(json.dumps(asdict(own))))

    def compared(self) -> dict[str, Any]:
        return {
            f"{part}.{name}": value
            for part, values in asdict(self).items()
            for name, value in values.items()
        }


# Curves of a degree over the unit in brackets, as ExeGPT's profiler measures them (section 3).
LAUNCH = "launch"  # an empty pass [1]
REST = "rest"  # a decoder layer without its attention, with its sums over shards [tokens]
SUMS = "sums"  # the sums over shards alone [tokens]
PROMPT = "prompt"  # attention of one prompt [its tokens]
PROMPTS = "prompts"  # attention of a pass full of prompts [tokens of each]
DECODE = "decode"  # attention of a batch at the longest length [sequences]
HEAD = "head"  # logits and sampling [sequences]
# Further curves of an encoder-decoder model; its attention of prompts is the encoder's.
ENCODE = "encode"  # an encoder layer without its attention, with its sums over shards [tokens]
JOIN = "join"  # keys and values of encoder outputs, for one decoder layer [tokens]
CROSS = "cross"  # cross attention of a batch to prompts of the longest length [sequences]
# Curves of degree 1 that need two devices.
HANDOFF = "handoff"  # activations to the next stage [tokens]
HANDOVER = "handover"  # KV of one layer to another group [tokens]
BUSY = "busy"  # a layer of the largest pass, on several devices at a time [devices]


@final
@dataclass(frozen=True)
class Range:
    """A curve to measure: its name, and the whole numbers at its ends."""

    name: str
    low: int
    high: int


def curve(part: str, degree: int) -> str:
    return f"{part}@{degree}"


def batch_curve(part: str, batch: int, degree: int) -> str:
    """Return the name of a decoding batch's curve over lengths, of a part in `batch_parts`."""
    return curve(f"{part} {batch}", degree)


def batch_parts(*, has_encoder: bool) -> tuple[str, ...]:
    """Return the parts that depend on both the number and the lengths of decoding sequences."""
    return (DECODE, CROSS) if has_encoder else (DECODE,)


def ranges_of(
    sizes: LayerSizes, degree: int, num_devices: int, *, has_encoder: bool
) -> list[Range]:
    """Return the curves of a degree, except those over lengths of decoding batches."""
    most = {
        REST: sizes.max_tokens,
        PROMPT: sizes.max_length,
        PROMPTS: max(1, min(sizes.max_tokens // 2, sizes.max_length)),
        DECODE: sizes.max_batch,
        HEAD: sizes.max_batch,
        LAUNCH: 1,
    }
    if has_encoder:
        most |= {ENCODE: sizes.max_tokens, JOIN: sizes.max_tokens, CROSS: sizes.max_batch}
    if degree > 1:
        most[SUMS] = sizes.max_tokens
    elif num_devices > 1:
        most |= {HANDOFF: sizes.max_tokens, HANDOVER: sizes.max_tokens, BUSY: num_devices}
    return [Range(curve(part, degree), 1, high) for part, high in most.items()]


@final
@dataclass
class LayerProfile:
    """Seconds by curve and point, where they were measured, and whether the measurement ended.

    Attributes:
      path: the file to write after every point; None for no file.
    """

    origin: LayerOrigin
    path: Path | None = None
    seconds: dict[str, dict[int, float]] = field(default_factory=dict)
    is_complete: bool = False

    @property
    def sizes(self) -> LayerSizes:
        return LayerSizes(**self.origin.sizes)

    @property
    def has_encoder(self) -> bool:
        return self.origin.model.get("decoder_start_token_id") is not None

    @property
    def degrees(self) -> tuple[int, ...]:
        """The tensor-parallel degrees whose curves all have their ends."""
        begun = {int(name.rpartition("@")[2]) for name in self.seconds}
        return tuple(sorted(degree for degree in begun if self._has_ends(degree)))

    def _has_ends(self, degree: int) -> bool:
        has_encoder, sizes = self.has_encoder, self.sizes
        count = self.origin.device["count"]
        ranges = ranges_of(sizes, degree, count, has_encoder=has_encoder)
        for part in batch_parts(has_encoder=has_encoder):
            for batch in self.seconds.get(curve(part, degree), {}):
                ranges.append(Range(batch_curve(part, batch, degree), 1, sizes.max_length))
        return all(
            {each.low, each.high} <= self.seconds.get(each.name, {}).keys() for each in ranges
        )

    @property
    def num_points(self) -> int:
        return sum(len(points) for points in self.seconds.values())

    def has(self, degree: int) -> bool:
        return any(name.endswith(f"@{degree}") for name in self.seconds)

    def add(self, name: str, at: int, seconds: float) -> None:
        """Record a point, and save the profile."""
        self.seconds.setdefault(name, {})[at] = seconds
        self.save()

    def end(self) -> None:
        self.is_complete = True
        self.save()

    def save(self) -> None:
        """Write the file, if there is one, atomically."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        whole = {
            "origin": asdict(self.origin),
            "seconds": self.seconds,
            "is_complete": self.is_complete,
        }
        temporary = self.path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(whole) + "\n", encoding="utf-8")
        os.replace(temporary, self.path)

    @classmethod
    def load(cls, path: Path, *, expected: LayerOrigin | None = None) -> LayerProfile:
        """Read a file that `save` wrote.

        Raises:
          InvalidProfileError: the file has no layer profile, or its origin is not `expected`.
        """
        profile = read_table(path, cls._from_json, "measured layers", "jaxserve plan --layers")
        profile.path = path
        if expected is not None:
            raise_if_foreign(profile.origin, expected, str(path))
        return profile

    @classmethod
    def _from_json(cls, read: dict[str, Any]) -> LayerProfile:
        profile = cls(
            origin=LayerOrigin(**read["origin"]),
            seconds={
                name: {int(at): checked_number(s) for at, s in points.items()}
                for name, points in read["seconds"].items()
            },
            is_complete=bool(read["is_complete"]),
        )
        profile.degrees  # noqa: B018 - raises for invalid sizes and names of curves
        return profile
