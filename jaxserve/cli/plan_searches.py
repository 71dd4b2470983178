"""What `jaxserve plan` searches: the schedules of a cluster, of this machine, or of an engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.core.errors import InvalidConfigError

if TYPE_CHECKING:
    from jaxserve.planning.schedules import TaskLengths
    from jaxserve.planning.schedules.frontier import ScheduleSearch


def on_cluster(
    model: str,
    name: str,
    num_devices: int | None,
    lengths: TaskLengths,
    families: tuple[str, ...] | None,
) -> tuple[ScheduleSearch, str]:
    """Return the schedules of a model on a simulated cluster."""
    from jaxserve.planning.schedules import CLUSTERS, MODELS, roofline_deployment
    from jaxserve.planning.schedules.frontier import ClusterSearch
    from jaxserve.planning.schedules.search import CLUSTER_FAMILIES

    if name not in CLUSTERS:
        raise InvalidConfigError(
            f"--cluster {name!r} is unknown; pass one of {', '.join(CLUSTERS)}"
        )
    if model not in MODELS:
        raise InvalidConfigError(
            f"--model {model!r} has no shape for --cluster; pass one of {', '.join(MODELS)}"
        )
    shape, cluster = MODELS[model], CLUSTERS[name]
    if num_devices is not None:
        cluster = cluster.of(num_devices)
    deployment = roofline_deployment(shape, cluster)
    schedules = ClusterSearch(deployment, lengths, families or CLUSTER_FAMILIES)
    return schedules, f"{cluster.num_devices} {name} (rooflines)"


def on_layers(
    lengths: TaskLengths,
    families: tuple[str, ...] | None,
    profile: Path | None,
    **settings: Any,
) -> tuple[ScheduleSearch, str]:
    """Return the schedules of this machine's devices, by measured layers."""
    import jax

    from jaxserve.cli.profiles import layer_deployment
    from jaxserve.core.host import cpu_name
    from jaxserve.planning.schedules.configuration import check_families
    from jaxserve.planning.schedules.frontier import ClusterSearch
    from jaxserve.planning.schedules.search import CLUSTER_FAMILIES

    families = families or CLUSTER_FAMILIES
    check_families(families, CLUSTER_FAMILIES)
    deployment = layer_deployment(profile, lengths, **settings)
    where = f"{deployment.cluster.num_devices} {jax.devices()[0].device_kind} ({cpu_name()})"
    return ClusterSearch(deployment, lengths, families), f"{where}, by layers"


def on_engine(
    lengths: TaskLengths,
    families: tuple[str, ...] | None,
    profile: Path | None,
    **settings: Any,
) -> tuple[ScheduleSearch, str]:
    """Return the schedules of one engine on this machine, under policy `auto`."""
    from jaxserve.cli.profiles import step_times
    from jaxserve.planning.schedules.configuration import check_families
    from jaxserve.planning.schedules.families import FAMILIES
    from jaxserve.planning.schedules.frontier import FamiliesSearch

    families = FAMILIES if families is None else tuple(families)
    check_families(families, FAMILIES)
    times, config = step_times(profile, lengths, **settings)
    device = times.origin.device
    where = f"{device['count']} {device['kind']} ({device['host_cpu']})"
    return FamiliesSearch(times, config, lengths, families=families), where


def on_groups(
    lengths: TaskLengths,
    families: tuple[str, ...] | None,
    profile: Path | None,
    **settings: Any,
) -> tuple[ScheduleSearch, str]:
    """Return the schedules of two groups of this machine's devices."""
    from jaxserve.cli.profiles import group_times
    from jaxserve.planning.schedules.configuration import check_families
    from jaxserve.planning.schedules.frontier import GroupsSearch

    check_families(families or ("waa",), ("waa",))
    times, config = group_times(profile, lengths, **settings)
    device = times.groups[0].origin.device
    where = f"{settings['groups']} {device['kind']} ({device['host_cpu']})"
    return GroupsSearch(times, config, lengths), where
