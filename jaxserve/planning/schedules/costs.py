"""The costs that a timeline is made of: what ExeGPT's profiler measures (section 3)."""

from __future__ import annotations

from enum import Enum
from typing import Protocol, TypeAlias, final

import numpy as np

# A number, or an array that broadcasts with the other arguments of a call.
Numbers: TypeAlias = np.ndarray | float


@final
class Phase(Enum):
    """What a layer computes: whole inputs, or one token per sequence."""

    ENCODE = "encode"
    DECODE = "decode"


class LayerCost(Protocol):
    """Seconds of a layer and of its communication. Arguments broadcast.

    No result falls when a batch, a number of tokens or a length rises; the bounds of the search
    rest on that, and `schedules.search` finds the best schedule only if it holds. Batches and
    numbers of tokens are expected values, so they may be fractions.

    Attributes:
      launch_s: seconds that a stage needs for a pass, besides its layers.
      batching_pays: whether no result rises faster than a batch or a number of tokens, so that
        seconds per sequence or token never rise. The search then needs fewer evaluations. Measured
        times of padded batches do not have this property.
    """

    @property
    def batching_pays(self) -> bool: ...

    @property
    def launch_s(self) -> float: ...

    def attention_s(
        self, phase: Phase, batch: Numbers, length: Numbers, degree: Numbers
    ) -> np.ndarray:
        """Return the seconds of a layer's attention on one of `degree` shards.

        Args:
          batch: sequences.
          length: tokens of each sequence to encode; positions that each token to decode attends to,
            those of cross attention included.
        """
        ...

    def rest_s(self, phase: Phase, num_tokens: Numbers, degree: Numbers) -> np.ndarray:
        """Return the seconds of a layer without its attention, on one of `degree` shards."""
        ...

    def sync_s(self, phase: Phase, num_tokens: Numbers, degree: Numbers) -> np.ndarray:
        """Return the seconds of a layer's sums over shards; 0 for one shard."""
        ...

    def join_s(self, num_tokens: Numbers, degree: Numbers) -> np.ndarray:
        """Return the seconds to project `num_tokens` encoder outputs for one decoder layer.

        0 for decoder-only models.
        """
        ...

    def head_s(self, num_tokens: Numbers, degree: Numbers) -> np.ndarray:
        """Return the seconds from the last layer's activations to sampled tokens."""
        ...

    def handoff_s(self, num_tokens: Numbers, *, is_across: bool) -> np.ndarray:
        """Return the seconds to hand activations to the next stage.

        Args:
          is_across: whether the next stage is on another machine.
        """
        ...

    def handover_s(self, num_tokens: Numbers, num_devices: Numbers) -> np.ndarray:
        """Return the seconds to hand encoded inputs to the decode group of WAA.

        That is the KV of all layers, or the outputs of the encoder.

        Args:
          num_tokens: input tokens.
          num_devices: devices that send or receive, whichever are fewer.
        """
        ...
