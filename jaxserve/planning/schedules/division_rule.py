"""The division of devices that ExeGPT's WAA-C and WAA-M give (section 4.1 of the paper)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from jaxserve.planning.group_times import GroupTimes
from jaxserve.planning.schedules.configuration import Division, Policy
from jaxserve.planning.schedules.lengths import TaskLengths
from jaxserve.planning.schedules.measured_waa import encode_s, iteration_s


@final
@dataclass(frozen=True, kw_only=True)
class DivisionRule:
    """Gives the encode group its share of what each encode batch takes, for groups that exist.

    WAA-C shares out the computation: an encode phase of B_E sequences, and the decode iterations
    that B_E answers of S_D iterations take. One iteration of B_D = B_E S_D sequences is enough, as
    in the paper; with fewer slots, as many more are needed. WAA-M shares out the memory: the
    weights, of which each group has a copy, the KV of two encode batches, and that of B_D
    sequences.

    Attributes:
      policy: `Policy.WAA_C` or `Policy.WAA_M`.
      weights_bytes: of one copy.
      token_bytes: KV of a token in all layers.
    """

    policy: Policy
    weights_bytes: int
    token_bytes: float

    def divisions(
        self,
        options: Sequence[Division],
        times: GroupTimes,
        lengths: TaskLengths,
        max_slots: int,
    ) -> list[Division]:
        """Return the division for a B_E of 1, 2, ... `max_slots`.

        It is the one whose fullest device has the least; of two, that with more devices.

        Args:
          options: the divisions to choose from, at least one.
          times: step times of the groups of the first one.
        """
        batch = np.arange(1, max_slots + 1, dtype=np.float64)
        iterations = lengths.outputs.less_one()
        num_decoding = np.minimum(batch * max(iterations.mean, 1.0), max_slots)
        length = lengths.inputs.mean + iterations.mean_position
        if self.policy is Policy.WAA_C:
            encode = encode_s(times, lengths, batch) * options[0].encode
            by_number = iteration_s(times, lengths, [1], max_slots)[0]
            num_iterations = batch * max(iterations.mean, 1.0) / num_decoding
            iteration = np.interp(num_decoding, batch, by_number)
            decode = num_iterations * iteration * options[0].decode
        else:
            encode_tokens = 2 * batch * lengths.inputs.mean
            encode = self.weights_bytes + encode_tokens * self.token_bytes
            decode = self.weights_bytes + num_decoding * length * self.token_bytes
        share = encode / (encode + decode)
        order = sorted(options, key=lambda each: -(each.encode + each.decode))
        sizes = np.array([[each.encode, each.decode] for each in order])
        parts = np.stack([share, 1 - share], axis=1)
        most = (parts[:, None] / sizes[None]).max(axis=2)
        return [order[index] for index in most.argmin(axis=1)]
