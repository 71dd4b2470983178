"""The part of a runtime that loads adapters."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxserve.runtime.maintenance import Maintenance
from jaxserve.runtime.trained import Trained


class Adapted(Trained):
    """The methods of `Runtime` for low-rank adapters; docs/adapters.md says what is served."""

    @abc.abstractmethod
    def __init__(self, maintenance: Maintenance):
        super().__init__(maintenance)

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the loaded adapters, which `SamplingParams.adapter` may have."""
        return self._maintenance.adapters.names

    def load_adapter(
        self, name: str, source: str | Path | Mapping[str, Any], *, scale: float | None = None
    ) -> None:
        """Load an adapter (LoRA) beside the weights, for requests that name it.

        Requests run meanwhile. No step is compiled.

        Args:
          source: a folder of PEFT, with `adapter_config.json` and `adapter_model.safetensors`; or
            arrays by PEFT's names, `...lora_A.weight` [rank, in] and `...lora_B.weight`
            [out, rank].
          scale: factor of B @ A, for arrays; a folder has its own.

        Raises:
          InvalidParamsError: the adapter does not fit the model or `max_adapter_rank`, has NaN or
            infinite numbers, or is of a kind that is not served. Nothing has changed.
          InvalidConfigError: the name is taken, or `max_adapters` adapters are loaded.
          EngineBusyError: the memory was given back; see `sleep`.
          DeviceMemoryError: there is no room for an eighth of the adapters' memory beside the
            present ones, all of which go on serving.
          RuntimeClosedError, EngineFailedError
        """
        self._maintenance.adapters.load(name, source, scale)

    def adapter_shapes(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Return names and shapes of the arrays of an adapter that changes all that it may.

        An adapter may have some of them only. Empty for a runtime without adapters.
        """
        return self._maintenance.adapters.shapes(rank)

    def drop_adapter(self, name: str) -> None:
        """Drop an adapter; another one may have its name and its place afterwards.

        It may be dropped while the memory is given back, too; see `sleep`.

        Raises:
          UnknownAdapterError: no adapter has this name.
          EngineBusyError: requests with this adapter have not ended; it stays.
          RuntimeClosedError, EngineFailedError
        """
        self._maintenance.adapters.drop(name)
