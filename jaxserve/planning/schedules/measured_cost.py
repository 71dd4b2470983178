"""Costs of RRA on one engine, from its measured step times."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import final

import numpy as np

from jaxserve.core.config import EngineConfig
from jaxserve.planning.schedules.cluster import Cluster, DeviceRoofs, LayerShape, TransformerShape
from jaxserve.planning.schedules.layer_cost import Deployment, LayerCost, LayerPhase, Numbers
from jaxserve.planning.schedules.plan import THRESHOLD
from jaxserve.planning.step_times import Curve, StepTimes
from jaxserve.steps.slots import ADMISSIONS_A_CALL

# Batches are assumed uniform within the threshold; these are sample values over the mean.
_SPREAD = 1 + THRESHOLD * np.linspace(-1, 1, 17)
# An N_D that no schedule exceeds.
_MOST_DECODES = 1 << 30
# A token has a key and a value, the units of memory of a deployment on a page pool.
_KV_UNITS = 2.0


@final
@dataclass(frozen=True, kw_only=True)
class MeasuredCost(LayerCost):
    """A `LayerCost` of a whole model, as one layer on one device, from `StepTimes`.

    Sums over attention and the rest rise as `LayerCost` requires, except where an encode phase
    takes one more step, so that sampling may be padded to a smaller size. There the search may miss
    the best schedule.

    A decode iteration takes the measured time of its window and positions, and its share of a
    decode loop. An encode phase takes mixed steps, each padded to a compiled size, with admissions
    and sampling, and the host's planning, during which the device idles once a round. For an
    encoder-decoder model each step has the encoder's part, with whole prompts, and the decoder's,
    with one token of each prompt.

    A decode loop is planned while the previous one runs. So a window also spans the rows of answers
    whose ends were not known then, up to one and a half loops ago on average.

    Batches are padded, so a mean batch near a compiled size uses either of two sizes. The cost is
    the mean over batches within `THRESHOLD` of it.

    Attributes:
      input_tokens: mean tokens of a prompt.
      num_iterations: mean decode iterations of an answer.
      num_decodes: N_D of the schedule, which determines the decode loops of a round.
      most_decodes: None for exact costs of `num_decodes`; otherwise the costs are lower limits for
        any N_D from `num_decodes` to this one.
    """

    times: StepTimes
    input_tokens: float
    num_iterations: float
    num_decodes: Numbers
    most_decodes: Numbers | None = None

    def attention_s(
        self, phase: LayerPhase, batch: Numbers, length: Numbers, degree: Numbers
    ) -> np.ndarray:
        if phase is LayerPhase.DECODE:
            shares, positions = self._window_shares(batch), np.multiply(batch, length)
            return self._iteration_s(shares, positions) - self._iteration_s(shares, 0.0)
        largest = self._config.token_buckets[-1]
        if self.times.encode_s:
            # A prompt of n tokens attends to n positions with each.
            return np.multiply(batch, np.square(length)) * _slope(self.times.encode_s[largest])
        # A prompt of n tokens attends to n (n + 1) / 2 positions.
        positions = np.multiply(batch, np.square(length) + length) / 2
        return positions * _slope(self.times.prefill_s[largest])

    def rest_s(self, phase: LayerPhase, num_tokens: Numbers, degree: Numbers) -> np.ndarray:
        if phase is LayerPhase.ENCODE:
            return self._encode_s(np.asarray(num_tokens, np.float64))
        shares = self._window_shares(num_tokens)
        return self._iteration_s(shares, 0.0) + self._loops_a_decode * self._loop_s(shares)

    @property
    def _config(self) -> EngineConfig:
        return self.times.origin.config

    @property
    def _loops_a_decode(self) -> np.ndarray:
        """Decode loops per iteration; it is lowest where N_D is a multiple of the longest loop."""
        longest, fewest = self._config.max_decode_iterations, np.asarray(self.num_decodes)
        most = fewest if self.most_decodes is None else np.asarray(self.most_decodes)
        has_multiple = most // longest * longest >= fewest
        return np.where(has_multiple, 1 / longest, -(-most // longest) / most)

    def _window_shares(self, batch: Numbers) -> np.ndarray:
        return _shares_padded(self._rows(batch), self._config.slot_buckets)

    def _iteration_s(self, shares: np.ndarray, positions: Numbers) -> np.ndarray:
        """Return the seconds of a decode iteration; `positions` is the total attended to."""
        windows = self._config.slot_buckets
        seconds = [_seconds(self.times.decode_s[size], positions) for size in windows]
        return _mean_s(shares, np.stack(seconds, axis=-1))

    def _loop_s(self, shares: np.ndarray) -> np.ndarray:
        seconds = np.array([self.times.loop_s[size] for size in self._config.slot_buckets])
        return _mean_s(shares, seconds) + self.times.edit_s

    def _rows(self, batch: Numbers) -> np.ndarray:
        """Return the rows that windows span for a number of decoding sequences; see the class."""
        longest, fewest = self._config.max_decode_iterations, np.asarray(self.num_decodes)
        num_loops = -(-fewest // longest)
        lag = fewest / num_loops * (1.5 - 1 / num_loops)
        if self.most_decodes is not None:
            # It rises with N_D while the number of loops is constant, and falls when one is added,
            # each time from a higher value.
            one_more = num_loops * longest / (num_loops + 1) * (1.5 - 1 / (num_loops + 1))
            has_more = np.asarray(self.most_decodes) > num_loops * longest
            lag = np.where(has_more, np.minimum(lag, one_more), lag)
        ended = lag / max(self.num_iterations, 1.0)
        return batch + np.maximum(np.subtract(batch, 1.0), 0.0) * ended

    def _encode_s(self, num_tokens: np.ndarray) -> np.ndarray:
        times, config = self.times, self._config
        prompt = max(self.input_tokens, 1.0)
        most = float(config.token_buckets[-1])
        if times.encode_s:  # prompts are not cut, so part of a step's room stays empty
            most = max(prompt, most - prompt / 2)
        tokens = num_tokens[..., None] * _SPREAD
        num_full = np.floor(tokens / most)
        body_s = self._body_s(times.encode_s or times.prefill_s)
        sizes = np.array([0, *config.token_buckets])
        last = np.searchsorted(sizes, tokens - num_full * most)
        steps_s = (num_full * body_s[-1] + body_s[np.minimum(last, len(sizes) - 1)]).mean(-1)
        num_steps = np.maximum(np.ceil(tokens / most), 1).mean(-1)
        num_prompts = num_tokens / prompt
        head_s = np.array([times.head_s[size] for size in config.head_buckets])
        per_step = num_prompts / num_steps
        if times.encode_s:
            decoder_s = self._body_s(times.prefill_s)[1:]
            steps_s += num_steps * _padded(per_step, config.token_buckets, decoder_s)
        steps_s += num_steps * (times.edit_s + _padded(per_step, config.head_buckets, head_s))
        steps_s += np.maximum(num_prompts / ADMISSIONS_A_CALL, num_steps) * times.admit_s
        return steps_s + times.plan_s + times.submit_s

    def _body_s(self, curves: dict[int, Curve]) -> np.ndarray:
        """Return the seconds of 0 tokens, and of each token bucket, without attention."""
        bodies = [float(_seconds(curves[size], 0.0)) for size in self._config.token_buckets]
        return np.maximum.accumulate(np.array([0.0, *bodies]))


def num_tokens_held(config: EngineConfig) -> int:
    """Return the tokens that the page pool holds when every slot has a sequence.

    On average half of each last page is empty, also that of an encoder's prompt.
    """
    empty = config.max_slots * config.page_size // (1 if config.has_encoder else 2)
    return max(config.page_size, config.pool_tokens - empty)


def measured_deployment(
    times: StepTimes, config: EngineConfig, input_tokens: float, num_iterations: float
) -> Deployment:
    """Return one engine as a cluster of one device with one layer, limited by slots and pages.

    Memory is counted in keys and values of tokens, see `num_tokens_held`. Batches may exceed their
    mean by the share `THRESHOLD`, which lengthens phases by that share.

    Args:
      times: step times of the engine.
      config: its present configuration, whose page pool may differ from that of `times`.
      input_tokens, num_iterations: see `MeasuredCost`.
    """

    def cost_within(fewest: Numbers, most: Numbers) -> MeasuredCost:
        return MeasuredCost(
            times=times,
            input_tokens=input_tokens,
            num_iterations=num_iterations,
            num_decodes=fewest,
            most_decodes=most,
        )

    unit = LayerShape(hidden_size=0, attention_width=0, kv_width=1, num_params=0.0)
    return Deployment(
        model=TransformerShape(
            encode_layer=unit,
            num_encode_layers=1,
            decode_layer=unit,
            num_decode_layers=1,
            num_embedding_params=0.0,
            bytes_each=1,
        ),
        cluster=Cluster(
            roofs=DeviceRoofs(
                flops=math.inf,
                memory_bytes_per_s=math.inf,
                link_bytes_per_s=math.inf,
                memory_bytes=_KV_UNITS * num_tokens_held(config),
            ),
            num_devices=1,
            devices_per_machine=1,
            network_bytes_per_s=math.inf,
            compute_efficiency=1.0,
            memory_efficiency=1.0,
            peer_efficiency=1.0,
            sync_latency_s=0.0,
            handoff_latency_s=0.0,
            launch_s=0.0,
            memory_share=1.0,
        ),
        cost=cost_within(1, _MOST_DECODES),
        cost_within=cost_within,
        max_encode_batch=config.max_slots,
        max_sequences=max(1.0 + 1e-9, config.max_slots / (1 + THRESHOLD)),
        encode_margin=THRESHOLD,
        decode_margin=THRESHOLD,
    )


def _padded(batch: Numbers, sizes: tuple[int, ...], seconds: np.ndarray) -> np.ndarray:
    """Return the mean seconds of batches around `batch`, padded to `sizes` with raised seconds."""
    return _mean_s(_shares_padded(batch, sizes), seconds)


def _mean_s(shares: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Return the mean seconds of batches, given the shares padded to each size; see `_padded`."""
    return (shares * np.maximum.accumulate(seconds, axis=-1)).sum(-1)


def _shares_padded(batch: Numbers, sizes: tuple[int, ...]) -> np.ndarray:
    """Return the shares of batches around `batch` that are padded to each of `sizes`."""
    most = np.asarray(batch, np.float64)[..., None] * _SPREAD
    fewer = np.floor(most)
    return _shares(fewer, 1 - (most - fewer), sizes) + _shares(fewer + 1, most - fewer, sizes)


def _shares(batch: np.ndarray, weight: np.ndarray, sizes: tuple[int, ...]) -> np.ndarray:
    """Return the mean weight of the batches that are padded to each of `sizes` [..., sizes]."""
    which = np.minimum(np.searchsorted(sizes, batch), len(sizes) - 1)
    is_padded_to = which[..., None, :] == np.arange(len(sizes))[:, None]
    return (weight[..., None, :] * is_padded_to).mean(-1)


def _seconds(curve: Curve, positions: Numbers) -> np.ndarray:
    """Return a curve's seconds, raised where measured ones fall, and linear beyond them."""
    at, seconds, slope = _rising(curve)
    positions = np.asarray(positions, np.float64)
    if len(at) == 1:
        return np.full(positions.shape, seconds[0])
    above = np.clip(np.searchsorted(at, positions), 1, len(at) - 1)
    return np.maximum(0.0, seconds[above - 1] + slope[above - 1] * (positions - at[above - 1]))


@lru_cache(maxsize=1024)
def _rising(curve: Curve) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return a curve's positions, its raised seconds, and the slopes between them."""
    at, seconds = np.array(curve.points).T
    seconds = np.maximum.accumulate(seconds)
    return at, seconds, np.diff(seconds) / np.diff(at)


def _slope(curve: Curve) -> float:
    """Return a curve's mean seconds per position, at least 0."""
    (first, first_s), (last, last_s) = curve.points[0], curve.points[-1]
    return max(0.0, (last_s - first_s) / (last - first)) if last > first else 0.0
