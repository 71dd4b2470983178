"""Operations while loops are paused: new weights, another pool size, sleep."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, final

from flax import nnx

from jaxserve.core.errors import InvalidConfigError, InvalidParamsError, ProcessGroupError
from jaxserve.core.options import RuntimeOptions
from jaxserve.core.sizes import parse_bytes
from jaxserve.engine.device_loop import Running
from jaxserve.engine.versions import Weights
from jaxserve.execution.build import resized
from jaxserve.execution.device_errors import out_of_memory_as
from jaxserve.execution.weights import check_stored, check_usable
from jaxserve.memory.page_cache import Tier
from jaxserve.models.config import DecoderConfig
from jaxserve.models.decoder import LayerLayout
from jaxserve.models.quantisation import Quantiser
from jaxserve.models.saving import save_pretrained
from jaxserve.models.tokenizer import Tokenizer
from jaxserve.runtime.adapters import Adapters
from jaxserve.runtime.replicas import Replicas
from jaxserve.runtime.timings import Timings
from jaxserve.runtime.weight_update import (
    PreparedParams,
    WeightUpdate,
    check_part,
    check_running,
    placing_weights,
    swap,
)
from jaxserve.scheduling.kv.transfer import KVPages
from sharding import split_replicas


@final
class Maintenance:
    """The operations that pause the replicas' loops. `Runtime` documents each.

    `quantiser` is None for dense weights. `placing` is held while weights are placed, so that no
    devices move between groups.
    """

    def __init__(
        self,
        replicas: Replicas,
        timings: Timings,
        options: RuntimeOptions,
        adapters: Adapters,
        quantiser: Quantiser | None = None,
    ):
        self.adapters = adapters
        self.placing = threading.Lock()
        self._states = threading.Lock()  # held while the runtime falls asleep, wakes up or resumes
        self._replicas = replicas
        self._quantiser = quantiser
        self._timings = timings
        self._options = options
        self._has_weights = True

    def dismiss_followers(self) -> None:
        self._replicas.check_leads()
        with self._replicas.paused():
            if self._replicas.group is not None:
                self._replicas.group.dismiss()

    @property
    def weights(self) -> Weights:
        """The weights of the next steps, which change only in pauses."""
        return self._replicas.first.engine.weights

    def update_params(self, params: Any, update: WeightUpdate) -> int:
        update.after(self.weights)  # before any request is cancelled or starts again
        new = params if isinstance(params, PreparedParams) else None
        new = new or self.prepare_params(params, partial=update.partial)
        if new.owner is not self:
            raise InvalidParamsError(
                "parameters that another runtime has prepared are not allowed; call "
                "prepare_params on this one"
            )
        with self._replicas.paused(update.running):
            new.check(self._place, has_weights=self._has_weights)
            fitted = new.fitted
            # Devices may have moved to another group, or another update or adapter may have come.
            if self._place != new.place:
                with placing_weights():
                    fitted = self._fitted(new.params, new.partial)
            weights = update.after(self.weights)
            swap(self._replicas.all, fitted, weights, keeps_kv=update.kv == "keep")
            self._has_weights = True
        return weights.version

    def prepare_params(self, params: Any, *, partial: bool) -> PreparedParams:
        if isinstance(params, nnx.Module):
            params = nnx.state(params, nnx.Param)
        check_usable(params)
        check_part(partial, has_weights=self._has_weights)
        with placing_weights():
            if self._quantiser is not None:
                given, params = params, self._quantiser.params(params, partial=partial)
                check_stored(params, given)
            with self.placing:
                place = self._place  # read before, so that a change in between is noticed
                fitted = self._fitted(params, partial)
                return PreparedParams(self, params, partial, place, fitted)

    @property
    def _place(self) -> object:
        """A value that changes when prepared parameters would have to be placed again."""
        return self._timings.devices, self.weights, self.adapters.generation

    def save_pretrained(
        self,
        folder: str | Path,
        config: DecoderConfig,
        layer_layout: LayerLayout,
        like: str | Path | Mapping[str, Any],
        tokenizer: Tokenizer | None,
    ) -> None:
        executor = self._replicas.first.executor
        if not isinstance(executor.params, nnx.State) or self._replicas.group is not None:
            raise InvalidConfigError(
                "weights in stages, on two groups of devices or on several processes cannot be "
                "saved; load them in one process with a mesh without stages, or none"
            )
        self._check_has_weights("rt.save_pretrained()")
        save_pretrained(
            folder,
            executor.params,
            config,
            like,
            layer_layout=layer_layout,
            tokenizer=tokenizer,
        )

    def _check_has_weights(self, before: str) -> None:
        if not self._has_weights:
            raise InvalidConfigError(
                "this runtime has dropped its weights (rt.sleep); call rt.update_params(params) "
                f"before {before}"
            )

    def _fitted(self, params: Any, partial: bool) -> list[Any]:
        """Return new parameters on the devices of each replica."""
        params = self.adapters.with_adapters(params, partial=partial)
        replicas = self._replicas.all
        parts = split_replicas(params)
        if len(parts) != len(replicas):  # the parameters are on other devices than the replicas
            parts = [params] * len(replicas)
        return [
            replica.executor.fitted(part, partial=partial)
            for replica, part in zip(replicas, parts, strict=True)
        ]

    @property
    def is_paused(self) -> bool:
        return self._replicas.first.loop.is_halted

    def pause(self, running: Running) -> None:
        check_running(running)
        self._replicas.check_leads()
        self._replicas.check_may_wait()
        with ExitStack() as if_one_fails:
            for replica in self._replicas.all:
                if not replica.loop.is_halted:
                    if_one_fails.callback(replica.loop.go_on)
                replica.loop.halt(running)
            if_one_fails.pop_all()

    def resume(self) -> None:
        with self._states:
            self._go_on()

    def _go_on(self) -> None:
        self._replicas.check_awake()
        for replica in self._replicas.all:
            replica.loop.go_on()

    def sleep(self, *, drops_weights: bool) -> None:
        first = self._replicas.first.executor
        if not first.can_resize or first.num_device_groups > 1:
            raise InvalidConfigError(
                "the memory of a model that several processes or two groups of devices serve "
                "cannot be given back; close the runtime, and create another one afterwards"
            )
        with self._states:
            self.pause("keep")
            with self._replicas.paused("keep"):
                self._has_weights = self._has_weights and not drops_weights
                self._replicas.sleep(drops_weights=drops_weights)

    def wake_up(self) -> None:
        self._check_has_weights("rt.wake_up()")
        with self._states:
            with (
                out_of_memory_as("taking memory again", "free memory of the trainer first"),
                self._replicas.paused("keep"),
            ):
                self._replicas.wake_up()
                for replica in self._replicas.all:
                    replica.warm_up(self._options)
            self._go_on()

    def residency(self, token_ids: Sequence[int]) -> list[Tier]:
        found = [r.engine.residency(token_ids) for r in self._replicas.all]
        return min(found, key=lambda tiers: tiers.count("nowhere"))

    def export_kv(self, token_ids: Sequence[int], first: int, *, waits: bool) -> KVPages:
        self._check_is_alone()
        found = [
            replica.loop.ask(partial(replica.engine.export_kv, token_ids, first, waits=waits))
            for replica in self._replicas.all
        ]
        return max(found, key=lambda kv: len(kv.pages))

    def import_kv(self, token_ids: Sequence[int], kv: KVPages) -> int:
        self._check_is_alone()
        return min(
            replica.loop.ask(partial(replica.engine.import_kv, token_ids, kv))
            for replica in self._replicas.all
        )

    def forget_kept_pages(self) -> None:
        self._replicas.check_leads()
        with self._replicas.paused("keep"):
            for replica in self._replicas.all:
                replica.engine.forget_kept_pages(keeps_disk=False)

    def resize_kv(self, size: int | str) -> int:
        kv_bytes = 0 if size == 0 else parse_bytes(size)
        self._replicas.check_leads()
        self._replicas.check_awake()
        if not all(replica.executor.can_resize for replica in self._replicas.all):
            raise InvalidConfigError(
                f"size={size!r}: the page pool of a model that several processes serve cannot be "
                "resized; close the runtime on all of them and create one with another kv_memory"
            )
        with out_of_memory_as("resizing the page pool", "pass a smaller size"):
            for replica in self._replicas.all:
                replica.pool_size.step.measure()  # which may compile, while requests run
            with self._replicas.paused("keep"):
                self._resize(kv_bytes)
        return self._replicas.first.pool_size.pool_bytes

    def _resize(self, kv_bytes: int) -> None:
        """Resize every replica's pool, and compile for the new size.

        On a DeviceMemoryError the failing replica and those after it keep their size.
        """
        replicas = self._replicas.all
        sizes = [resized(r.executor, r.pool_size, kv_bytes) for r in replicas]
        for replica, size in zip(replicas, sizes, strict=True):
            if size.num_pages != replica.executor.config.num_pages:
                replica.resize(size)
            replica.warm_up(self._options)

    def _check_is_alone(self) -> None:
        self._replicas.check_may_wait()
        self._replicas.check_awake()
        if self._replicas.group is not None:
            raise ProcessGroupError(
                "KV is neither exported nor imported where several processes serve one model; use "
                "one process for each runtime"
            )
