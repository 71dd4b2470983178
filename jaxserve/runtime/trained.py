"""The part of a runtime that a trainer drives."""

from __future__ import annotations

import abc

from flax import nnx

from jaxserve.engine.device_loop import Running
from jaxserve.runtime.maintenance import Maintenance
from jaxserve.runtime.weight_swap import PreparedParams
from jaxserve.runtime.weight_update import KV, WeightUpdate


class Trained(abc.ABC):
    """The methods of `Runtime` for new weights, and for pauses and memory while they come."""

    @abc.abstractmethod
    def __init__(self, maintenance: Maintenance):
        self._maintenance = maintenance

    @property
    def weights_version(self) -> int:
        """The version of the weights that the next steps compute with; 0 at first."""
        return self._maintenance.weights.version

    def prepare_params(self, params: nnx.State, *, partial: bool = False) -> PreparedParams:
        """Check new weights, and place them on the devices beside the present ones.

        Requests run meanwhile. `update_params` of the result then moves no array, unless the
        weights or their devices have changed in between. They take memory until the result is
        dropped, or other weights have followed them.

        Args:
          params, partial: as for `update_params`.

        Raises:
          InvalidParamsError: the parameters do not fit, or have NaN or infinite numbers.
          DeviceMemoryError: the device has no room for them.
          RuntimeClosedError
        """
        return self._maintenance.prepare_params(params, partial=partial)

    def update_params(
        self,
        params: nnx.State | PreparedParams,
        *,
        version: int | None = None,
        running: Running | None = None,
        kv: KV = "recompute",
        partial: bool = False,
        max_staleness: int | None = None,
    ) -> int:
        """Replace the weights for all later steps, for instance by those of a trainer.

        Arrays that are placed as the old ones are shared and not copied; others are moved to the
        old ones' devices, and cast to their dtypes. No step is compiled. The runtime drops its
        references to the old arrays, and finds no cached page of theirs again. After an error the
        old weights go on serving, unless it is an EngineFailedError. If several processes serve the
        model, all of them call it while none follows (`dismiss_followers`).
        `docs/promises/rollouts.md` says what is guaranteed.

        Args:
          params: parameters of the same structure and shapes, or those that have changed, or what
            `prepare_params` has returned.
          version: number of the new weights, above the present one; by default the next number.
            `Sample.weights_versions` has it for each token.
          running: treatment of the requests that were submitted before. "finish", the default,
            waits until they have ended with the old weights. "keep", the default while the runtime
            is paused, continues them with the new weights, and "abort" cancels them. "restart"
            starts them again with the new weights, except that a request that has sent tokens to a
            stream, or has ended one of its samples, continues as with "keep". Requests that are
            submitted during the call wait, or run on a replica that is not paused yet.
          kv: treatment of the KV of requests that continue. "recompute" computes it anew from their
            tokens. "keep", only with running="keep", goes on with that of the old weights at once.
          partial: whether `params` lacks the parameters that have not changed. Prepared ones know.
          max_staleness: a sample that continues ends with StaleWeightsError if its first token is
            of weights more than so many versions older than the new ones; None for no bound.

        Returns:
          The version of the new weights.

        Raises:
          InvalidParamsError: the parameters do not fit, or have NaN or infinite numbers, also
            after a cast to the model's dtype.
          InvalidConfigError: another argument is not allowed.
          DeviceMemoryError: the device has no room for them beside the old ones.
          EngineBusyError: running="finish" while the runtime is paused.
          EngineFailedError: the engine has failed, or an update has failed that could not be
            undone; the runtime serves no more.
          RuntimeClosedError
        """
        if running is None:
            running = "keep" if self._maintenance.is_paused else "finish"
        update = WeightUpdate(
            version=version, running=running, kv=kv, partial=partial, max_staleness=max_staleness
        )
        return self._maintenance.update_params(params, update)

    def pause(self, running: Running = "keep") -> None:
        """Run no step from now on, until `resume`; return when the last one has ended.

        Requests can be submitted and cancelled meanwhile; calls that wait for answers wait for
        `resume`. `update_params` works in a pause. Pausing again with "keep" does nothing more.

        Args:
          running: treatment of the requests that were submitted before. "keep" halts them, and they
            continue with the same tokens. "finish" waits for their end. "abort" and "restart" are
            as in `update_params`.

        Raises:
          InvalidConfigError: `running` is unknown.
          EngineBusyError: running="finish" while the runtime is paused.
          ProcessGroupError: this process follows.
          RuntimeClosedError, EngineFailedError
        """
        self._maintenance.pause(running)

    def resume(self) -> None:
        """Run steps again after `pause`; do nothing without a pause.

        Raises:
          EngineBusyError: the memory was given back; see `sleep`.
          RuntimeClosedError, EngineFailedError
        """
        self._maintenance.resume()

    def sleep(self, *, drops_weights: bool = False) -> None:
        """Pause, and give the memory of the page pool back until `wake_up`, for a training step.

        Requests are accepted meanwhile, and wait. Those that run keep their tokens, and their KV is
        computed anew. Executables stay, so that nothing compiles for the steps after `wake_up`.
        Cached pages on the device and the host are dropped, and those on disk are kept.

        Args:
          drops_weights: also drop the references to the weights, whose memory is free then unless
            others share the arrays. `update_params` is needed before `wake_up`.

        Raises:
          InvalidConfigError: several processes or two groups of devices serve the model.
          RuntimeClosedError, EngineFailedError
        """
        self._maintenance.sleep(drops_weights=drops_weights)

    def wake_up(self) -> None:
        """Take the memory of the page pool again, and resume; see `sleep`.

        Raises:
          DeviceMemoryError: there is too little memory; the runtime stays asleep.
          InvalidConfigError: the weights were dropped, and no others have come.
          RuntimeClosedError, EngineFailedError
        """
        self._maintenance.wake_up()
