"""Groups of options that several commands take, each defined once.

A field is an option of every command that takes its group, see `flat`; its default is the option's.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from jaxserve.cli import options as opt
from jaxserve.cli.adapters import adapters_of
from jaxserve.cli.opening import open_service
from jaxserve.core.errors import InvalidConfigError, ProcessGroupError
from jaxserve.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxserve.runtime import Service

# Options of many requests at once, which one conversation in a terminal does not have.
OF_MANY_REQUESTS = ("max_slots", "data_parallel", "replicas", "roles")


@final
@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Options of how tokens are chosen; fields of `SamplingParams`."""

    min_tokens: opt.MinTokens = 0
    temperature: opt.Temperature = 0.0
    top_k: opt.TopK = 0
    top_p: opt.TopP = 1.0
    min_p: opt.MinP = 0.0
    repetition_penalty: opt.RepetitionPenalty = 1.0
    presence_penalty: opt.PresencePenalty = 0.0
    frequency_penalty: opt.FrequencyPenalty = 0.0
    seed: opt.Seed = None
    stop: opt.Stop = None
    ignore_eos: opt.IgnoreEos = False

    def params(self, **more: Any) -> SamplingParams:
        """Return the sampling parameters, with more fields that the command has itself.

        Raises:
          InvalidSamplingParamsError: a field has a value that is not allowed.
        """
        fields: dict[str, Any] = {**vars(self), "stop": tuple(self.stop or ()), **more}
        return SamplingParams(
            **{name: value for name, value in fields.items() if value is not None}
        )


@final
@dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """Options of the service that a command opens; arguments of `open_service`."""

    policy: opt.Policy = "auto"
    latency_bound: opt.LatencyBound = None
    first_token_bound: opt.FirstTokenBound = None
    token_bound: opt.TokenBound = None
    revision: opt.Revision = None
    load: opt.Load = "auto"
    dtype: opt.DType = None
    kv_memory: opt.KvMemory = None
    kv_dtype: opt.KvDType = None
    quantize: opt.Quantize = None
    quantize_embeddings: opt.QuantizeEmbeddings = None
    speculation: opt.Speculation = None
    draft_model: opt.DraftModel = None
    deterministic: opt.Deterministic = False
    end_tokens: opt.EndTokens = None
    adapter: opt.Adapter = None
    adapter_dtype: opt.AdapterDType = None
    host_memory: opt.HostMemory = None
    disk_memory: opt.DiskMemory = None
    disk_folder: opt.DiskFolder = None
    predictor: opt.Predictor = None
    probe: opt.Probe = None
    max_slots: opt.MaxSlots = None
    max_context: opt.MaxContext = None
    tensor_parallel: opt.TensorParallel = 1
    stages: opt.Stages = None
    groups: opt.Groups = None
    data_parallel: opt.DataParallel = 1
    replicas: opt.Replicas = 1
    roles: opt.Roles = None
    record: opt.Record = None
    quiet: opt.Quiet = False

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters."""
        return tuple(adapters_of(self.adapter or ()))

    @property
    def only_adapter(self) -> str | None:
        """Name of the adapter, if there is exactly one."""
        return self.adapters[0] if len(self.adapters) == 1 else None

    @property
    def is_fleet(self) -> bool:
        """Whether the service is a `Fleet`, and not a `Runtime`."""
        return self.replicas != 1 or self.roles is not None

    def open(self, model: str, *, conversations: Path | None = None, **more: Any) -> Service:
        """Open the service; a process that does not lead serves the leader, and then exits.

        Args:
          conversations: the journal of conversations; None for none.
          more: values that the command sets itself, in place of its options.

        Raises:
          InvalidConfigError: an option is not allowed, or a fleet does not have it.
        """
        settings: dict[str, Any] = {**vars(self), "conversations": conversations, **more}
        return open_service(model, **settings)


@final
@dataclass(frozen=True, kw_only=True)
class ProcessOptions:
    """Options of a command that several processes run together."""

    coordinator: opt.Coordinator = None
    num_processes: opt.NumProcesses = None
    process_id: opt.ProcessId = None

    def join(self) -> bool:
        """Connect the processes, if there are several; return whether this process leads.

        Raises:
          InvalidConfigError, ProcessGroupError
        """
        import sharding

        try:
            group = sharding.join(self.coordinator, self.num_processes, self.process_id)
        except ValueError as error:
            raise InvalidConfigError(str(error)) from error
        except sharding.JoinError as error:
            raise ProcessGroupError(str(error)) from error
        return group is None or group.is_leader
