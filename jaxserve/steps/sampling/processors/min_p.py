"""Min-p: only tokens that are likely enough beside the likeliest one can be drawn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import numpy as np
import numpy.typing as npt

from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.steps.sampling.choice import RandomChoice
from jaxserve.steps.sampling.processors.processor import Arrays, ChoiceProcessor, RowArray, Rows


@final
class MinP(ChoiceProcessor):
    """Keeps the tokens of at least `ratio` times the probability of the likeliest one."""

    name = "min_p"
    slot_arrays = {"ratio": RowArray(np.float32, 0)}

    def is_needed(self, params: SamplingParams) -> bool:
        """See `Processor`."""
        return params.min_p > 0

    def pack(self, request: Request) -> Mapping[str, npt.ArrayLike]:
        """See `Processor`."""
        return {"ratio": request.params.min_p}

    def apply(self, choice: RandomChoice, arrays: Arrays, rows: Rows) -> RandomChoice:
        """See `ChoiceProcessor`."""
        return choice.at_least(arrays["ratio"])
