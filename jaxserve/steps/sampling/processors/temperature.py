"""Temperature: flattens or sharpens the distribution that a token is drawn from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import final

import numpy as np
import numpy.typing as npt

from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.steps.sampling.choice import RandomChoice
from jaxserve.steps.sampling.processors.processor import Arrays, ChoiceProcessor, RowArray, Rows

# Devices take smaller numbers for zero.
_COLDEST = float(np.finfo(np.float32).tiny)


@final
class Temperature(ChoiceProcessor):
    """Divides every gap by the temperature."""

    name = "temperature"
    slot_arrays = {"temperature": RowArray(np.float32, 1)}

    def is_needed(self, params: SamplingParams) -> bool:
        """See `Processor`."""
        return not params.is_greedy

    def pack(self, request: Request) -> Mapping[str, npt.ArrayLike]:
        """See `Processor`."""
        return {"temperature": max(request.params.temperature, _COLDEST)}

    def apply(self, choice: RandomChoice, arrays: Arrays, rows: Rows) -> RandomChoice:
        """See `ChoiceProcessor`."""
        return replace(choice, gap=choice.gap / arrays["temperature"][:, None])
