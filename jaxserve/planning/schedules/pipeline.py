"""Pipelines of single devices and tensor-parallel stages: seconds of a pass, and memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import final

import numpy as np

from jaxserve.planning.schedules.models import TransformerShape
from jaxserve.planning.schedules.timeline import LayerCost, Numbers, Phase


@final
@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Stages that together hold a number of layers, for many layouts: int arrays of one shape.

    Attributes:
      first_device: index of the first device; machines begin at multiples of their size.
      num_single: stages of one device, which come first.
      num_sharded: stages of `degree` devices, which follow.
      num_across: boundaries between stages that are also boundaries between machines.
    """

    num_single: np.ndarray
    num_sharded: np.ndarray
    degree: np.ndarray
    num_across: np.ndarray

    @classmethod
    def of(
        cls,
        num_devices: np.ndarray,
        num_sharded_devices: np.ndarray,
        degree: np.ndarray,
        *,
        first_device: np.ndarray | int,
        devices_per_machine: int,
    ) -> Pipeline:
        last_device = first_device + num_devices - 1
        num_across = last_device // devices_per_machine - first_device // devices_per_machine
        return cls(
            num_single=num_devices - num_sharded_devices,
            num_sharded=num_sharded_devices // degree,
            degree=degree,
            num_across=np.asarray(num_across),
        )

    def __getitem__(self, which: object) -> Pipeline:
        return Pipeline(**{f.name: getattr(self, f.name)[which] for f in fields(self)})

    @property
    def num_stages(self) -> np.ndarray:
        return self.num_single + self.num_sharded

    @property
    def num_devices(self) -> np.ndarray:
        return self.num_single + self.num_sharded * self.degree

    def most_layers(self, num_layers: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the most layers of a single device, and of a sharded stage; 0 without stages."""
        num = self.num_devices
        single = -(-num_layers // num) * (self.num_single > 0)
        sharded = -(-num_layers * self.degree // num) * (self.num_sharded > 0)
        return single, sharded

    def pass_s(
        self,
        cost: LayerCost,
        phase: Phase,
        num_layers: int,
        *,
        batch: np.ndarray,
        length: Numbers,
        num_tokens: np.ndarray,
        num_head_tokens: np.ndarray | None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the seconds of a pass in the slowest stage, and through all; see `LayerCost`."""

        def layer_s(degree: Numbers) -> np.ndarray:
            return (
                cost.attention_s(phase, batch, length, degree)
                + cost.rest_s(phase, num_tokens, degree)
                + cost.sync_s(phase, num_tokens, degree)
            )

        in_single, in_sharded, through_s = self._layers_s(num_layers, layer_s)
        if num_head_tokens is not None:
            head_s = cost.head_s(num_head_tokens, np.where(self.num_sharded > 0, self.degree, 1))
            in_sharded = in_sharded + head_s * (self.num_sharded > 0)
            in_single = in_single + head_s * (self.num_sharded == 0)
            through_s = through_s + head_s
        num_near = np.maximum(self.num_stages - 1 - self.num_across, 0)
        through_s = (
            through_s
            + self.num_stages * cost.launch_s
            + num_near * cost.handoff_s(num_tokens, is_across=False)
            + self.num_across * cost.handoff_s(num_tokens, is_across=True)
        )
        return np.maximum(in_single, in_sharded) + cost.launch_s, through_s

    def join_s(
        self, cost: LayerCost, num_layers: int, num_tokens: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the seconds to project encoder outputs in all layers, as `pass_s` does."""
        in_single, in_sharded, through_s = self._layers_s(
            num_layers, lambda degree: cost.join_s(num_tokens, degree)
        )
        return np.maximum(in_single, in_sharded), through_s

    def _layers_s(
        self, num_layers: int, layer_s: Callable[[Numbers], np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the seconds in the fullest single and sharded stage, and through all stages."""
        single_s = layer_s(1)
        # Without sharded stages their seconds do not count.
        sharded_s = layer_s(self.degree) if self.num_sharded.any() else single_s
        most_single, most_sharded = self.most_layers(num_layers)
        all_s = self.num_single * single_s + self.num_sharded * self.degree * sharded_s
        return (
            most_single * single_s,
            most_sharded * sharded_s,
            num_layers / self.num_devices * all_s,
        )

    def memory_bytes(
        self,
        model: TransformerShape,
        *,
        num_encode_layers: int,
        num_decode_layers: int,
        kv_tokens: Numbers,
    ) -> np.ndarray:
        """Return the bytes of weights and KV on the fullest device.

        `Cluster.memory_share` leaves room for activations, which are small. Pass 0 encode layers if
        these are the decode layers.
        """

        def most(num_layers: int) -> np.ndarray:
            single, sharded = self.most_layers(num_layers)
            return np.maximum(single, sharded / self.degree)

        decode_bytes = model.decode_layer_bytes + np.multiply(kv_tokens, model.kv_bytes_per_token)
        embedding = model.num_embedding_params * model.bytes_each
        return (
            most(num_encode_layers) * model.encode_layer_bytes
            + most(num_decode_layers) * decode_bytes
            + embedding / np.where(self.num_single > 0, 1, self.degree)
        )


def shared_out(num_layers: int, devices: list[int]) -> list[int]:
    """Return the layers of each stage, in proportion to its devices and rounded."""
    ends = np.cumsum([0, *devices]) * num_layers
    return np.diff(-(-ends // sum(devices))).tolist()
