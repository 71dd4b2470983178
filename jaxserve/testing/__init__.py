"""Tools for tests of jaxserve, and of what is built on it.

A tiny model and tokenizers that answer in milliseconds, executors that are slow, faulty or
recorded, and random traces that check a scheduling policy without a device:

    from jaxserve import Runtime
    from jaxserve.testing import SlowExecutor, check_policy, tiny_llama

    check_policy(my_policy, num_traces=200)
    with Runtime(tiny_llama(), wrap_executor=lambda executor: SlowExecutor(executor, 0.02)) as rt:
        ...

It needs neither PyTorch nor pytest nor the network. Names are imported on first use, so that
policies are checked without JAX. `docs/testing.md` shows each part in use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxserve.testing.executors import ExecutorWrapper as ExecutorWrapper
    from jaxserve.testing.executors import FaultyExecutor as FaultyExecutor
    from jaxserve.testing.executors import FreeCopiesExecutor as FreeCopiesExecutor
    from jaxserve.testing.executors import RecordingExecutor as RecordingExecutor
    from jaxserve.testing.executors import SlowExecutor as SlowExecutor
    from jaxserve.testing.executors import WrapAll as WrapAll
    from jaxserve.testing.policies import PolicyCheck as PolicyCheck
    from jaxserve.testing.policies import check_policy as check_policy
    from jaxserve.testing.tiny import MAX_CONTEXT as MAX_CONTEXT
    from jaxserve.testing.tiny import OPTIONS as OPTIONS
    from jaxserve.testing.tiny import VOCAB_SIZE as VOCAB_SIZE
    from jaxserve.testing.tiny import letter_tokenizer as letter_tokenizer
    from jaxserve.testing.tiny import random_prompts as random_prompts
    from jaxserve.testing.tiny import tiny_llama as tiny_llama
    from jaxserve.testing.tiny import tiny_t5 as tiny_t5
    from jaxserve.testing.tiny import write_chat_model as write_chat_model
    from jaxserve.testing.traces import Outcome as Outcome
    from jaxserve.testing.traces import Trace as Trace

_HOMES = {
    "ExecutorWrapper": "executors",
    "FaultyExecutor": "executors",
    "FreeCopiesExecutor": "executors",
    "MAX_CONTEXT": "tiny",
    "OPTIONS": "tiny",
    "Outcome": "traces",
    "PolicyCheck": "policies",
    "RecordingExecutor": "executors",
    "SlowExecutor": "executors",
    "Trace": "traces",
    "VOCAB_SIZE": "tiny",
    "WrapAll": "executors",
    "check_policy": "policies",
    "letter_tokenizer": "tiny",
    "random_prompts": "tiny",
    "tiny_llama": "tiny",
    "tiny_t5": "tiny",
    "write_chat_model": "tiny",
}

__all__ = [
    "MAX_CONTEXT",
    "OPTIONS",
    "VOCAB_SIZE",
    "ExecutorWrapper",
    "FaultyExecutor",
    "FreeCopiesExecutor",
    "Outcome",
    "PolicyCheck",
    "RecordingExecutor",
    "SlowExecutor",
    "Trace",
    "WrapAll",
    "check_policy",
    "letter_tokenizer",
    "random_prompts",
    "tiny_llama",
    "tiny_t5",
    "write_chat_model",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxserve.testing' has no attribute {name!r}")
    value = getattr(import_module(f"jaxserve.testing.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
