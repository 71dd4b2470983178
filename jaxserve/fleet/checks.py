"""What a fleet's arguments must be, and what its cluster and its replicas must have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.options import RuntimeOptions
from jaxserve.fleet.replica import Started
from jaxserve.scheduling.presets import get_policy


def numbers_of(replicas: int | None, roles: Mapping[str, int] | None) -> tuple[int, int]:
    """Return the numbers of replicas that only prefill, and of those that answer.

    Raises:
      InvalidConfigError: `roles` has other names, or both are given.
    """
    if roles is None:
        return 0, 2 if replicas is None else replicas
    if set(roles) != {"prefill", "decode"} or replicas is not None:
        raise InvalidConfigError(
            f"roles={dict(roles)!r} with replicas={replicas} is not allowed; pass roles={{'prefill'"
            ": 1, 'decode': 1}, or other numbers of both, without replicas"
        )
    return roles["prefill"], roles["decode"]


def check_sends_kv(options: RuntimeOptions) -> None:
    """Raise InvalidConfigError if replicas with these options cannot send KV."""
    policy = get_policy(options.policy)
    keeps = policy.retention.keeps_pages and policy.retention.uses_host
    if policy.is_planned or not keeps or options.host_memory == 0:
        raise InvalidConfigError(
            f"policy={policy.name!r} with host_memory={options.host_memory!r} keeps no pages of "
            "prompts on the host, from where replicas with roles send them, or plans by itself; "
            'pass policy="auto" or "pensieve", with host memory'
        )
    if options.learns:
        raise InvalidConfigError(
            "learns=True is not allowed with roles, because prefill replicas see answers of one "
            "token; omit one or the other"
        )


def check_resources(has: dict[str, float], replicas: int, each: dict[str, float]) -> None:
    """Raise InvalidConfigError if a resource is less than `replicas` times `each`.

    Args:
      has: amounts of the resources that Ray has, by name.
      each: amounts that one replica needs, by name.
    """
    for name, wanted in each.items():
        if wanted * replicas > has.get(name, 0):
            raise InvalidConfigError(
                f"{replicas} replicas with {wanted:g} {name}s each need {wanted * replicas:g}, but "
                f"Ray has {has.get(name, 0):g}; lower replicas or num_{name.lower()}s, or connect "
                "to a larger cluster first (ray.init)"
            )


def check_host_pages(prefilling: Sequence[Started], decoding: Sequence[Started]) -> None:
    """Raise InvalidConfigError if no KV can go from replicas that prefill to those that decode."""
    for role, started in {"prefill": prefilling, "decode": decoding}.items():
        if not any(each.num_host_pages for each in started):
            raise InvalidConfigError(
                f"no {role!r} replica has pages of host memory, through which KV goes from one to "
                "another, so every prompt would be computed twice; models with recurrent layers "
                "have none, so omit roles for them, and pass a larger host_memory for others"
            )
