"""The processors: one file each, and the order in which they are applied.

To add one, see docs/adding_a_processor.md.
"""

from __future__ import annotations

from jaxserve.steps.sampling.processors.allowed_tokens import AllowedTokens
from jaxserve.steps.sampling.processors.logit_bias import LogitBias
from jaxserve.steps.sampling.processors.min_p import MinP
from jaxserve.steps.sampling.processors.min_tokens import MinTokens
from jaxserve.steps.sampling.processors.penalties import Penalties
from jaxserve.steps.sampling.processors.processor import Processor
from jaxserve.steps.sampling.processors.temperature import Temperature
from jaxserve.steps.sampling.processors.top_k import TopK
from jaxserve.steps.sampling.processors.top_p import TopP

# In the order of application, which `SamplingParams` promises; those that change logits come
# before those that change the random choice.
PROCESSORS: tuple[Processor, ...] = (
    AllowedTokens(),
    Penalties(),
    LogitBias(),
    MinTokens(),
    Temperature(),
    TopK(),
    TopP(),
    MinP(),
)
