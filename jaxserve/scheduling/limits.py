"""Limits of answers and retries, and the errors of sequences that cannot continue."""

from __future__ import annotations

from typing import Any

from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import (
    HandoverError,
    InvalidConfigError,
    NumericalError,
    PromptTooLongError,
)
from jaxserve.core.request import FinishReason, Request
from jaxserve.scheduling.policy import IterationShape, Policy
from jaxserve.scheduling.sequence import Sequence

# Handovers in a row of a sequence whose pages may be lost before its request fails.
MAX_LOST_HANDOVERS = 3


def max_length(request: Request, config: EngineConfig) -> int:
    """Return the tokens of prompt and output at which an answer is cut."""
    if request.params.max_tokens is None:
        return config.max_length
    return min(config.max_length, len(request.prompt) + request.params.max_tokens)


def end_of(sequence: Sequence, *, has_new: bool) -> FinishReason | None:
    """Return why a sequence ends with its newest token (new if `has_new`); None if it continues."""
    request = sequence.request
    if has_new and sequence.output[-1] in request.stop_token_ids:
        return "stop"
    end = request.end_length(sequence.max_length, sequence.sample_index)
    return "length" if sequence.num_known >= end else None


def too_long(sequence: Sequence, config: EngineConfig) -> PromptTooLongError:
    return PromptTooLongError(
        f"request {sequence.request.id}: {sequence.prompt_length} prompt tokens and "
        f"{len(sequence.output)} of the answer leave no room for another in the page pool, which "
        f"was resized and holds {config.max_length} tokens of one request; give it more memory "
        "(Runtime.resize_kv) and submit it again"
    )


def not_finite(sequence: Sequence) -> NumericalError:
    said = f"request {sequence.request.id}: the model's logits were NaN or infinite, or "
    after = f" left no token to choose, after {len(sequence.output)} output tokens. Check "
    others = "the weights, or load the model with dtype='float32'"
    if sequence.request.awaits_tokens:
        return NumericalError(
            f"{said}grammar, bias and penalties{after}that logit_bias allows a token that the "
            f"grammar does, and {others}"
        )
    return NumericalError(f"{said}bias and penalties{after}{others}")


def not_handed_over(sequence: Sequence) -> HandoverError:
    return HandoverError(
        f"request {sequence.request.id}: its KV did not arrive at the devices that compute answers "
        f"in {MAX_LOST_HANDOVERS} attempts. Check the links between the device groups, and create "
        "a new runtime, on one group if they stay broken"
    )


def check_groups(iteration: IterationShape[Any], policy: Policy) -> None:
    """Raise InvalidConfigError if an iteration shape plans for another number of device groups."""
    if iteration.num_device_groups != policy.num_device_groups:
        raise InvalidConfigError(
            f"{iteration} plans for {iteration.num_device_groups} device groups, and policy "
            f"{policy.name!r} has {policy.num_device_groups}; adopt a shape for as many groups, or "
            "create an engine with another policy"
        )


def check_has_groups(policy: Policy, num_device_groups: int) -> None:
    """Raise InvalidConfigError if an executor has fewer device groups than a policy plans for."""
    if policy.num_device_groups > num_device_groups:
        raise InvalidConfigError(
            f"policy {policy.name!r} plans for {policy.num_device_groups} device groups, and this "
            f"executor has {num_device_groups}; pass an executor with as many, as a runtime on "
            'sharding.DeviceGroups has it, or a policy for one group, such as "exegpt_rra"'
        )
