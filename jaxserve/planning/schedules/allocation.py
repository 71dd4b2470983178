"""How WAA divides devices between encoding and decoding (ExeGPT, section 4.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from jaxserve.planning.schedules.configuration import Layout, Policy
from jaxserve.planning.schedules.costs import Phase
from jaxserve.planning.schedules.lengths import LengthDistribution, TaskLengths
from jaxserve.planning.schedules.timeline import Deployment


@final
@dataclass(frozen=True, kw_only=True)
class Groups:
    """The encode group and the decode group of layouts, in int arrays.

    The encode group is the first devices. So tensor-parallel stages, which are the last of a
    layout, are in the decode group first, where they shorten every iteration.
    """

    num_encode: np.ndarray
    num_decode: np.ndarray
    num_encode_sharded: np.ndarray
    num_decode_sharded: np.ndarray


def encode_shares(
    deployment: Deployment,
    lengths: TaskLengths,
    iterations: LengthDistribution,
    encode_batch: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the encode group's share of computation (WAA-C) and of memory (WAA-M), by batch.

    C_E is an encode phase of B_E sequences on one device, C_D a decode iteration of B_D = B_E S_D;
    the memory is weights, the KV of two encode batches, and that of a decode batch.

    Args:
      iterations: decode iterations of an answer; S_D is their mean.
    """
    model, cost = deployment.model, deployment.cost
    decode_batch = encode_batch * max(iterations.mean, 1.0)
    length = lengths.inputs.mean + iterations.mean_position
    encode_tokens = encode_batch * lengths.inputs.mean
    encode_s = model.num_encode_layers * (
        cost.attention_s(Phase.ENCODE, encode_batch, np.sqrt(lengths.inputs.mean_square), 1)
        + cost.rest_s(Phase.ENCODE, encode_tokens, 1)
    )
    decode_s = model.num_decode_layers * (
        cost.attention_s(Phase.DECODE, decode_batch, length, 1)
        + cost.rest_s(Phase.DECODE, decode_batch, 1)
        + cost.join_s(encode_tokens, 1)
    )
    encode_kv = 2 * encode_tokens * model.kv_bytes_per_token * model.is_decoder_only
    encode_bytes = model.num_encode_layers * (model.encode_layer_bytes + encode_kv)
    decode_kv = decode_batch * length * model.kv_bytes_per_token
    decode_bytes = model.num_decode_layers * (model.decode_layer_bytes + decode_kv)
    return encode_s / (encode_s + decode_s), encode_bytes / (encode_bytes + decode_bytes)


def divide(
    layouts: tuple[Layout, ...],
    num_devices: int,
    shares: tuple[np.ndarray, np.ndarray],
) -> Groups:
    """Return the groups for every layout (rows) and share (columns).

    The number of encode devices is rounded to a boundary between stages. Both groups have at least
    one stage; layouts of a single stage are not allowed.

    Args:
      shares: those of WAA-C and of WAA-M, as `encode_shares` returns them.
    """
    by_memory = np.array([layout.policy is Policy.WAA_M for layout in layouts])[:, None]
    sharded = np.array([layout.num_sharded_devices for layout in layouts])[:, None]
    degree = np.array([layout.degree for layout in layouts])[:, None]
    single = num_devices - sharded
    wanted = num_devices * np.where(by_memory, shares[1][None], shares[0][None])
    beyond = degree * np.rint(np.maximum(wanted - single, 0) / degree).astype(int)
    near = np.clip(np.rint(wanted).astype(int), np.minimum(1, single), single)
    num_encode = np.where(wanted < single, near, single + beyond)
    fewest = np.where(single > 0, 1, degree)
    last = np.where(sharded > 0, degree, 1)
    most = np.maximum(num_devices - last, fewest)
    num_encode = np.clip(num_encode, fewest, most)
    num_encode_sharded = np.maximum(num_encode - single, 0)
    return Groups(
        num_encode=num_encode,
        num_decode=num_devices - num_encode,
        num_encode_sharded=num_encode_sharded,
        num_decode_sharded=sharded - num_encode_sharded,
    )
