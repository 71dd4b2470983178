"""A small head that predicts an answer's remaining length from the served model's activations.

The residual stream after a middle layer holds information about the remaining length (TRAIL,
arXiv:2410.01035). It is on the device already, so a reading costs one small product per token and
no forward pass.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float32
from safetensors.numpy import load_file, save_file

from jaxserve.predictor.buckets import LengthBuckets
from jaxserve.predictor.calibration import Calibration, softmax
from jaxserve.predictor.distribution import LengthDistributions
from jaxserve.predictor.refinement import Refinement

DESCRIPTION, PARAMS = "probe.json", "probe.safetensors"

# Name -> float32 array.
Params = dict[str, Any]


@final
@dataclass(frozen=True, kw_only=True)
class ProbeConfig:
    """The position and size of a probe.

    Attributes:
      layer: number of the model's layers before the residual stream that the probe reads.
      hidden_size: units of the hidden layer; 0 for a linear head.
    """

    layer: int
    width: int
    hidden_size: int = 256

    def __post_init__(self) -> None:
        if self.layer < 1 or self.width < 1 or self.hidden_size < 0:
            raise ValueError(
                f"layer={self.layer}, width={self.width} and hidden_size={self.hidden_size} are "
                "not allowed; layer and width must be 1 or more, hidden_size 0 or more"
            )


@final
class ProbeHead(nnx.Module):
    """A map from activations to logits of remaining length.

    Attributes:
      mean, scale: float32 [width]; they standardise the activations and are not trained.
    """

    def __init__(self, config: ProbeConfig, num_buckets: int, *, rngs: nnx.Rngs):
        self.mean = nnx.Variable(jnp.zeros(config.width))
        self.scale = nnx.Variable(jnp.ones(config.width))
        inner = config.hidden_size or config.width
        self.up = nnx.Linear(config.width, inner, rngs=rngs) if config.hidden_size else None
        self.out = nnx.Linear(inner, num_buckets, rngs=rngs)

    def __call__(self, x: Float[Array, "rows width"]) -> Float32[Array, "rows buckets"]:
        """Compute in float32, for activations of any type."""
        x = (x.astype(jnp.float32) - self.mean[...]) * self.scale[...]
        if self.up is not None:
            x = jax.nn.gelu(self.up(x))
        return self.out(x)


@final
class LengthProbe:
    """A probe's head with its parameters and the refinement that weighs its readings.

    Args:
      head: its parameters are taken; the module itself is not kept.
      refinement: updates remaining-length distributions by readings; its buckets are the head's.
      calibration: the calibration of single readings, if there is one.
    """

    def __init__(
        self,
        config: ProbeConfig,
        head: ProbeHead,
        refinement: Refinement,
        calibration: Calibration | None = None,
    ):
        self.config = config
        self.refinement = refinement
        self.calibration = calibration
        self._graphdef, self._state = nnx.split(head)
        self.params: Params = {
            ".".join(map(str, path)): value[...] for path, value in nnx.to_flat_state(self._state)
        }
        self._logits = jax.jit(self.apply)

    @property
    def layer(self) -> int:
        return self.config.layer

    @property
    def width(self) -> int:
        return self.config.width

    @property
    def buckets(self) -> LengthBuckets:
        return self.refinement.buckets

    def apply(
        self, params: Params, activations: Float[Array, "rows width"]
    ) -> Float32[Array, "rows buckets"]:
        flat = [
            (path, variable.replace(params[".".join(map(str, path))]))
            for path, variable in nnx.to_flat_state(self._state)
        ]
        return nnx.merge(self._graphdef, nnx.from_flat_state(flat))(activations)

    def logits(
        self, activations: Float[np.ndarray, "rows width"]
    ) -> Float32[np.ndarray, "rows buckets"]:
        """Return logits before calibration."""
        return np.asarray(self._logits(self.params, activations))

    def predict(self, activations: Float[np.ndarray, "rows width"]) -> LengthDistributions:
        """Return the distributions of remaining length given single readings."""
        logits = self.logits(activations) / self.refinement.temperature
        return LengthDistributions(self.buckets, softmax(logits))

    def save(self, folder: str | Path) -> None:
        """Write everything that `load` needs, and overwrite a probe in the folder."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        save_file({k: np.asarray(v) for k, v in self.params.items()}, folder / PARAMS)
        refinement = {**vars(self.refinement), "marginal": self.refinement.marginal.tolist()}
        description = {
            "config": vars(self.config),
            "refinement": {**refinement, "buckets": self.buckets.edges},
            "levels": None if self.calibration is None else self.calibration.levels.tolist(),
        }
        (folder / DESCRIPTION).write_text(json.dumps(description) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: str | Path) -> LengthProbe:
        """Load what `save` wrote.

        Raises:
          ValueError: the folder has no probe, or its files do not belong together.
        """
        folder = Path(folder)
        if not (folder / DESCRIPTION).is_file() or not (folder / PARAMS).is_file():
            raise ValueError(
                f"{folder} holds no probe; train one with `jaxserve predictor probe train`"
            )
        given = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
        refinement = Refinement(
            **given["refinement"]
            | {
                "buckets": LengthBuckets(tuple(given["refinement"]["buckets"])),
                "marginal": np.asarray(given["refinement"]["marginal"]),
            }
        )
        config = ProbeConfig(**given["config"])
        head = ProbeHead(config, refinement.buckets.num, rngs=nnx.Rngs(0))
        levels, calibration = given["levels"], None
        if levels is not None:
            calibration = Calibration(refinement.temperature, np.asarray(levels))
        probe = cls(config, head, refinement, calibration)
        params = load_file(folder / PARAMS)
        if {k: v.shape for k, v in params.items()} != {k: v.shape for k, v in probe.params.items()}:
            raise ValueError(
                f"{folder}: {PARAMS} does not belong to the probe in {DESCRIPTION}; save the probe "
                "again"
            )
        probe.params = {name: jnp.asarray(value) for name, value in params.items()}
        return probe
