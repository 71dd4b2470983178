"""A JAX-native inference runtime for generative language models.

    from jaxserve import Runtime, SamplingParams

    with Runtime.from_pretrained("smollm2-135m") as rt:
        print(rt.generate("Why is the sky blue?", SamplingParams(max_tokens=64)).text)

Names are imported on first use, so that `jaxserve.scheduling`, `jaxserve.memory` and the command
line's help do without JAX.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxserve.core import errors as errors
    from jaxserve.core.errors import JaxserveError as JaxserveError
    from jaxserve.core.options import JournalLimits as JournalLimits
    from jaxserve.core.request import Completion as Completion
    from jaxserve.core.request import Request as Request
    from jaxserve.core.request import Sample as Sample
    from jaxserve.core.sampling_params import SamplingParams as SamplingParams
    from jaxserve.fleet import Fleet as Fleet
    from jaxserve.models.families import register_family as register_family
    from jaxserve.models.function import FunctionDecoder as FunctionDecoder
    from jaxserve.models.merging import merge_adapter as merge_adapter
    from jaxserve.runtime import Runtime as Runtime

__version__ = "0.1.0"

_HOMES = {
    "FunctionDecoder": "jaxserve.models.function",
    "Completion": "jaxserve.core.request",
    "Fleet": "jaxserve.fleet",
    "JaxserveError": "jaxserve.core.errors",
    "JournalLimits": "jaxserve.core.options",
    "Request": "jaxserve.core.request",
    "Runtime": "jaxserve.runtime",
    "Sample": "jaxserve.core.request",
    "SamplingParams": "jaxserve.core.sampling_params",
    "merge_adapter": "jaxserve.models.merging",
    "register_family": "jaxserve.models.families",
}

__all__ = [
    "Completion",
    "Fleet",
    "FunctionDecoder",
    "JaxserveError",
    "JournalLimits",
    "Request",
    "Runtime",
    "Sample",
    "SamplingParams",
    "errors",
    "merge_adapter",
    "register_family",
]


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module("jaxserve.core.errors")
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxserve' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
