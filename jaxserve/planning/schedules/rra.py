"""The timeline of RRA: encode B_E sequences, decode N_D times, again (ExeGPT, figure 4a)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from jaxserve.planning.schedules.layer_cost import (
    Boxes,
    Deployment,
    Pipeline,
    layouts_of,
    stages_of,
)
from jaxserve.planning.schedules.lengths import LengthDistribution, TaskLengths
from jaxserve.planning.schedules.schedule import (
    AllocationPolicy,
    Best,
    Estimates,
    ParallelLayout,
    Points,
    Schedule,
)

# Parts of a decode phase, each with its mean batch.
NUM_PARTS = 4
# Longest phases whose memory peaks are all computed, and the ratio of the sampled longer ones.
_EXACT, _LONGER = 512, 1.01


@final
class RangeLeast:
    """The smallest values over ranges of an array's first index, in constant time each.

    Level k of its table has the smallest of 2^k values from each index; two of them cover a range.
    """

    def __init__(self, values: np.ndarray):
        levels = [values]
        for level in range(len(values).bit_length() - 1):
            before, step = levels[-1], 1 << level
            least = before.copy()
            least[:-step] = np.minimum(before[:-step], before[step:])
            levels.append(least)
        self._levels = np.stack(levels)

    def __call__(self, first: np.ndarray, last: np.ndarray) -> np.ndarray:
        """Return the smallest values at the indices from `first` to `last`, both included."""
        level = np.frexp(last - first + 1)[1] - 1
        later = last + 1 - (1 << level)
        return np.minimum(self._levels[level, first], self._levels[level, later])


@final
@dataclass(frozen=True, kw_only=True)
class DecodePhases:
    """Steady states of RRA for N_D = 0, 1, ..., per sequence that is encoded a round.

    Arrays are indexed by N_D; index 0 is unused.

    Attributes:
      batch: mean number of sequences in each part of the phase [num_decodes, NUM_PARTS].
      length: positions that a token of that part attends to [num_decodes, NUM_PARTS].
      first_batch: expected sequences in the first iteration [num_decodes].
      peak_tokens, peak_sequences: expected most in memory at a time [num_decodes].
      least_decoded: the fewest tokens that a part decodes, over a range of N_D.
      least_negated: the smallest of `batch` times -1 over a range, for the largest batches.
    """

    batch: np.ndarray
    length: np.ndarray
    first_batch: np.ndarray
    peak_tokens: np.ndarray
    peak_sequences: np.ndarray
    least_batch: RangeLeast
    least_length: RangeLeast
    least_peak_tokens: RangeLeast
    least_peak_sequences: RangeLeast
    least_decoded: RangeLeast
    least_negated: RangeLeast

    @classmethod
    def of(cls, num_input_tokens: float, iterations: LengthDistribution) -> DecodePhases:
        """Return the phases of answers whose decode iterations have this distribution.

        A sequence with D iterations takes part in iteration u of every phase k with k N_D + u <= D.
        In a steady state with one new sequence a phase, iteration u has sum_k P(D >= k N_D + u) of
        them, which never rises with u. `num_input_tokens` is the mean length of the inputs, whose
        KV is held too.
        """
        num = max(1, iterations.max_length)
        # By iteration of an answer, from 0; the last phase may exceed the longest answer.
        running = np.zeros(2 * num + 1)
        running[1 : iterations.max_length + 1] = iterations.survival[1:]
        held = running * (num_input_tokens + np.arange(2 * num + 1))
        # The phases of a longest answer, for N_D = 1, 2, ... in turn.
        num_phases = -(-num // np.arange(1, num + 1))
        first = np.cumsum(num_phases) - num_phases
        num_decodes = np.repeat(np.arange(1, num + 1), num_phases)
        before = (np.arange(len(num_decodes)) - np.repeat(first, num_phases)) * num_decodes

        def by_num_decodes(values: np.ndarray) -> np.ndarray:
            return np.concatenate([np.zeros_like(values[:1]), np.add.reduceat(values, first)])

        batch = by_num_decodes(_part_means(running, before, num_decodes))
        tokens = by_num_decodes(_part_means(held, before, num_decodes))
        first_batch = by_num_decodes(running[before + 1])
        # Answers that end with their first token need memory but no iteration.
        at_once = float(iterations.probabilities[0])
        peak_tokens = np.concatenate([[0.0], _most_held(held, num) + at_once * num_input_tokens])
        # If nothing is expected to run, one token attends to the inputs.
        length = np.where(batch > 0, tokens / np.where(batch > 0, batch, 1.0), num_input_tokens)
        length = np.clip(length, num_input_tokens, num_input_tokens + num)
        decoded = np.arange(num + 1)[:, None] / NUM_PARTS * batch
        return cls(
            batch=batch,
            length=length,
            first_batch=first_batch,
            peak_tokens=peak_tokens,
            peak_sequences=first_batch + at_once,
            least_batch=RangeLeast(batch),
            least_length=RangeLeast(length),
            least_peak_tokens=RangeLeast(peak_tokens),
            least_peak_sequences=RangeLeast(first_batch + at_once),
            least_decoded=RangeLeast(decoded),
            least_negated=RangeLeast(-batch),
        )


def _most_held(held: np.ndarray, num: int) -> np.ndarray:
    """Return the most of `held` [2 num + 1] in an iteration of a phase, for N_D = 1 ... num.

    Of long phases only a sample is computed, each less than a hundredth longer than the one before.
    Phases between two samples get the larger value.
    """
    exact = np.arange(1, min(num, _EXACT) + 1)
    steps = math.ceil(math.log(max(1.0, num / _EXACT)) / math.log(_LONGER))
    some = np.unique(np.concatenate([exact, np.geomspace(len(exact), num, steps + 1).astype(int)]))
    most = np.array(
        [
            held[1 : -(-num // each) * each + 1].reshape(-1, each).sum(0).max()
            for each in some.tolist()
        ]
    )
    above = np.searchsorted(some, np.arange(1, num + 1))
    is_exact = some[above] == np.arange(1, num + 1)
    return np.where(is_exact, most[above], np.maximum(most[above - 1], most[above]))


def _part_means(values: np.ndarray, before: np.ndarray, num_decodes: np.ndarray) -> np.ndarray:
    """Return the means of `NUM_PARTS` equal parts of each phase, float [phases, NUM_PARTS].

    `values` are of each iteration of an answer, from 0; `before` [phases] is the first of a phase.
    """
    parts = np.arange(NUM_PARTS + 1) / NUM_PARTS
    ends = before[:, None] + num_decodes[:, None] * parts
    whole = ends.astype(np.int64)
    sums = np.cumsum(values)[whole] + (ends - whole) * values[whole + 1]
    return np.maximum(np.diff(sums, axis=1), 0.0) * NUM_PARTS / num_decodes[:, None]


@final
@dataclass(frozen=True, kw_only=True)
class RoundParts:
    """Seconds of the parts of rounds: an encode phase and N_D decode iterations each.

    The sequences are in M mini-batches, one per stage, but of at least one sequence each. With e
    and d the seconds of a mini-batch in the slowest stage, and E and D those through all stages, a
    decode iteration of all mini-batches takes R = max(M d, D), and an encode phase F = E + (M - 1)
    e. A round's results, which tell how many answers have ended, are read before the next begins,
    so it takes E + (M - 1) max(e, d) + N_D R. For equal stages, except transfers, that is exact:
    `tests/planning/schedules/pipelines.py` plays the pipeline stage by stage.

    Attributes:
      encode_s: F, an encode phase from its start to its end in the last stage.
      stagger_s: (M - 1) (d - e) if d is longer: the delay from the end of the last mini-batch's
        encoding to the start of its decoding.
      present_s: R of a mean iteration of each part of a phase [configurations, parts].
      token_s: seconds per decoded token and encoded sequence of each part; 0 without tokens.
      iteration_s: R of a mean iteration. An iteration with less than one expected sequence takes
        place with that probability.
    """

    encode_s: np.ndarray
    stagger_s: np.ndarray
    present_s: np.ndarray
    token_s: np.ndarray
    iteration_s: np.ndarray

    @classmethod
    def of(
        cls,
        deployment: Deployment,
        pipeline: Pipeline,
        inputs: LengthDistribution,
        encode_batch: np.ndarray,
        sequences: np.ndarray,
        length: np.ndarray,
    ) -> RoundParts:
        """Return the parts of rounds of B_E sequences, each with `sequences` decoding ones."""
        num = np.minimum(pipeline.num_stages, encode_batch)
        batch = encode_batch / num
        slowest_s, encode_through_s = pipeline.encode_pass_s(
            deployment, batch, np.sqrt(inputs.mean_square), batch * inputs.mean
        )
        rows = pipeline[:, None]
        num_decoding = encode_batch[:, None] * sequences
        num_parts = np.clip(num_decoding, 1, rows.num_stages)
        row_batch = np.maximum(num_decoding / rows.num_stages, 1.0)
        slowest_row_s, through_s = rows.decode_pass_s(deployment, row_batch, length)
        present_s = np.maximum(num_parts * slowest_row_s, through_s)
        odds = np.minimum(num_decoding, 1.0)
        later_s = np.maximum(slowest_row_s[:, 0] - slowest_s, 0.0)
        return cls(
            encode_s=encode_through_s + (num - 1) * slowest_s,
            stagger_s=(num_parts[:, 0] - 1) * later_s,
            present_s=present_s,
            token_s=np.where(sequences > 0, odds * present_s / np.maximum(sequences, 1e-300), 0.0),
            iteration_s=(odds * present_s).mean(1),
        )

    def round_s(self, num_decodes: np.ndarray) -> np.ndarray:
        return self.encode_s + self.stagger_s + num_decodes * self.iteration_s

    def decoding_s(self, num_tokens: np.ndarray) -> np.ndarray:
        """Return the seconds in which parts decode `num_tokens` per encoded sequence."""
        return (num_tokens * self.token_s).sum(1)

    def begun_s(self, num_decodes: np.ndarray, num_begun: np.ndarray) -> np.ndarray:
        """Return the seconds of the first `num_begun` of `num_decodes` iterations."""
        part = (num_decodes / NUM_PARTS)[:, None]
        begun = np.clip(num_begun[:, None] - part * np.arange(NUM_PARTS), 0.0, part)
        return (begun * self.present_s).sum(1)


@final
class RRATimeline:
    """Estimates of RRA's configurations.

    Every device holds its share of the encode layers and of the decode layers. `RoundParts` gives
    the seconds of a round of an encode phase and N_D decode iterations. An answer of s iterations
    takes ceil(s / N_D) - 1 rounds, then an encode phase and its iterations of the last round. The
    batch of an iteration is that of `DecodePhases`.

    Args:
      layouts: the layouts to consider; by default all that the cluster allows.
      classes: bounds of single requests, as (output tokens, seconds) each.
      phases: those of another timeline for the same lengths, to avoid computing them again.
    """

    def __init__(
        self,
        deployment: Deployment,
        lengths: TaskLengths,
        layouts: Sequence[ParallelLayout] | None = None,
        classes: Sequence[tuple[int, float]] = (),
        phases: DecodePhases | None = None,
    ):
        model, cluster = deployment.model, deployment.cluster
        self._deployment = deployment
        self._inputs = lengths.inputs
        self._iterations = lengths.outputs.less_one() if model.is_decoder_only else lengths.outputs
        self._level = lengths.level
        self._longest = self._iterations.percentile(lengths.level)
        self._classes = [(num - model.is_decoder_only, bound_s) for num, bound_s in classes]
        self.phases = phases or DecodePhases.of(lengths.inputs.mean, self._iterations)
        self.layouts = tuple(layouts or layouts_of((AllocationPolicy.RRA,), cluster))
        self._pipelines = Pipeline.of_layouts(self.layouts, cluster)
        self.max_control = max(1, self._iterations.max_length)
        self.max_encode_batch = self._largest_batch()

    def estimate(self, points: Points) -> Estimates:
        batch, num_decodes = points.encode_batch, points.control
        pipeline, phases = self._pipelines[points.layout], self.phases
        parts = self._parts(points)
        latency_s = self._latency_s(parts, num_decodes, self._longest)
        encode_s = parts.encode_s + self._slack_s(parts, 0)
        memory = self._memory(pipeline, batch * phases.peak_tokens[num_decodes])
        fits = self._fits(pipeline, memory, batch * phases.peak_sequences[num_decodes])
        return Estimates(
            fits=fits,
            throughput=batch / parts.round_s(num_decodes),
            latency_s=latency_s,
            first_token_s=self._first_token_s(pipeline, batch, parts),
            token_s=(latency_s - encode_s) / max(1, self._longest),
            period_s=parts.round_s(num_decodes),
            encode_s=parts.encode_s,
            decode_batch=batch * phases.first_batch[num_decodes],
            memory_bytes=memory,
            own_share=self._own_share(
                lambda longest: self._latency_s(parts, num_decodes, longest),
                self._own_prompts_s(pipeline, batch, parts),
            ),
        )

    def own_latencies_s(self, points: Points) -> list[np.ndarray]:
        parts, pipeline = self._parts(points), self._pipelines[points.layout]
        prompts_s = self._own_prompts_s(pipeline, points.encode_batch, parts)
        return [
            prompts_s + self._latency_s(parts, points.control, longest)
            for longest, _ in self._classes
        ]

    def boxes(self) -> Boxes:
        return Boxes.whole(len(self.layouts), self.max_encode_batch, self.max_control)

    def bound(self, boxes: Boxes) -> Best:
        """Bound boxes by their smallest batches and fewest rounds.

        Costs do not fall with the batch, and the batch in a part of a phase is at least the
        smallest of any N_D of the box. So a round takes at least as long as one of the box's
        smallest B_E and N_D with that batch, and an answer at least as many rounds and encode
        phases as with the largest N_D. Where batching pays, the largest B_E that may fit has the
        shortest round per sequence, and a part of a phase decodes its tokens at most as fast as in
        the part's largest batch.
        """
        batch, most = boxes.low.encode_batch, boxes.high.control
        controls = boxes.low.control, most
        deployment, phases = self._deployment.at(*controls), self.phases
        pipeline = self._pipelines[boxes.low.layout]

        def parts_of(encode_batch: np.ndarray, sequences: np.ndarray) -> RoundParts:
            length = phases.least_length(*controls)
            return RoundParts.of(
                deployment, pipeline, self._inputs, encode_batch, sequences, length
            )

        parts = parts_of(batch, phases.least_batch(*controls))
        fastest, largest = parts, boxes.high.encode_batch
        round_s = parts.round_s(boxes.low.control)
        if deployment.cost.batching_pays:
            largest = np.clip(self._largest_fitting(pipeline, controls), batch, largest)
            fastest = parts_of(largest, phases.least_batch(*controls))
            together = parts_of(largest, -phases.least_negated(*controls))
            together_s = fastest.encode_s + together.decoding_s(phases.least_decoded(*controls))
            round_s = np.maximum(fastest.round_s(boxes.low.control), together_s)
        latency_s = self._least_latency_s(parts, most, self._longest)
        memory = self._memory(pipeline, batch * phases.least_peak_tokens(*controls))
        fits = self._fits(pipeline, memory, batch * phases.least_peak_sequences(*controls))
        encode_s = parts.encode_s + self._slack_s(parts, 0)
        return Best(
            fits=fits,
            throughput=largest / round_s,
            latency_s=latency_s,
            first_token_s=self._first_token_s(pipeline, batch, parts),
            token_s=(latency_s - encode_s) / max(1, self._longest),
            own_share=self._own_share(
                lambda longest: self._least_latency_s(parts, most, longest),
                self._own_prompts_s(pipeline, batch, parts),
            ),
        )

    def schedule(self, point: Points) -> Schedule:
        layout = self.layouts[int(point.layout[0])]
        model = self._deployment.model
        devices = layout.devices(self._deployment.cluster.num_devices)
        return Schedule(
            layout=layout,
            encode_batch=int(point.encode_batch[0]),
            encode_tokens=int(point.encode_batch[0]) * self._inputs.mean,
            decode_batch=float(self.estimate(point).decode_batch[0]),
            num_decodes=int(point.control[0]),
            num_micro_batches=len(devices),
            stages=stages_of(model, devices),
        )

    def _parts(self, points: Points) -> RoundParts:
        num_decodes = points.control
        return RoundParts.of(
            self._deployment.at(num_decodes, num_decodes),
            self._pipelines[points.layout],
            self._inputs,
            points.encode_batch,
            self.phases.batch[num_decodes],
            self.phases.length[num_decodes],
        )

    def _latency_s(self, parts: RoundParts, num_decodes: np.ndarray, longest: int) -> np.ndarray:
        num_earlier = np.maximum(-(-longest // num_decodes), 1) - 1
        num_last = longest - num_earlier * num_decodes
        last_s = np.maximum(parts.begun_s(num_decodes, num_last), num_last * parts.iteration_s)
        slow = 1 + self._deployment.decode_margin
        latency_s = parts.encode_s + self._slack_s(parts, num_earlier) + slow * last_s
        # In the rounds of a running answer every iteration takes place.
        present_s = parts.begun_s(num_decodes, num_decodes)
        decode_s = num_decodes * parts.iteration_s
        return latency_s + num_earlier * (parts.round_s(num_decodes) - decode_s + slow * present_s)

    def _least_latency_s(
        self, parts: RoundParts, most_decodes: np.ndarray, longest: int
    ) -> np.ndarray:
        """Return a lower limit of `_latency_s`, given that of the parts."""
        num_earlier = np.maximum(-(-longest // most_decodes), 1) - 1
        slow = 1 + self._deployment.decode_margin
        latency_s = parts.encode_s + slow * longest * parts.iteration_s
        between_s = parts.encode_s + parts.stagger_s
        return latency_s + num_earlier * between_s + self._slack_s(parts, num_earlier)

    def _own_share(
        self, latency_s: Callable[[int], np.ndarray], prompts_s: np.ndarray
    ) -> np.ndarray:
        """Return `Estimates.own_share`, from the seconds of answers and of additional prompts."""
        shares = [(prompts_s + latency_s(num)) / bound_s for num, bound_s in self._classes]
        return np.max(shares, axis=0, initial=0.0) if shares else np.zeros(len(prompts_s))

    def _own_prompts_s(
        self, pipeline: Pipeline, batch: np.ndarray, parts: RoundParts
    ) -> np.ndarray:
        """Return the seconds of prompts in a span of `classes` that `_latency_s` does not include.

        A span may be short, so one encode phase in it has long prompts instead of mean ones. In
        addition, one prompt of the class, its own or another request's, is computed by itself.
        """
        if not self._classes:
            return np.zeros(len(batch))
        expected_s = parts.encode_s + self._slack_s(parts, 0)
        longer_s = np.maximum(self._longest_encode_s(pipeline, batch), expected_s) - expected_s
        return longer_s + self._longest_encode_s(pipeline, np.ones(len(batch)))

    def _first_token_s(
        self, pipeline: Pipeline, batch: np.ndarray, parts: RoundParts
    ) -> np.ndarray:
        first_s = self._longest_encode_s(pipeline, batch)
        if self._deployment.model.is_decoder_only:
            return first_s
        return first_s + (1 + self._deployment.decode_margin) * parts.present_s[:, 0]

    def _longest_encode_s(self, pipeline: Pipeline, batch: np.ndarray) -> np.ndarray:
        """Return the seconds of an encode phase with long prompts, for which a first token waits.

        A runner ends a batch at the prompt that brings its tokens over their mean
        (`scheduling.iteration.encode_batch`), so it has up to half a long prompt more than the
        mean, and at least one prompt of any length. Without a margin every phase is assumed even.
        """
        deployment, mean = self._deployment, max(self._inputs.mean, 1.0)
        margin = deployment.encode_margin
        if margin:
            longest = self._inputs.percentile(self._level) / mean
            batch = (1 + margin) * np.maximum(longest, batch + longest / 2)
        sequences = np.zeros((len(batch), 1))
        parts = RoundParts.of(deployment, pipeline, self._inputs, batch, sequences, sequences)
        return parts.encode_s

    def _largest_fitting(
        self, pipeline: Pipeline, controls: tuple[np.ndarray, np.ndarray]
    ) -> np.ndarray:
        """Return an upper limit of the B_E that fit, for any N_D of a range."""
        deployment, phases = self._deployment, self.phases
        empty = self._memory(pipeline, 0.0)
        token_bytes = self._memory(pipeline, 1.0) - empty
        free = np.maximum(deployment.cluster.memory_bytes - empty, 0.0)
        tokens = phases.least_peak_tokens(*controls)
        by_memory = free / np.maximum(token_bytes * tokens, 1e-300)
        sequences = phases.least_peak_sequences(*controls)
        by_slots = deployment.max_sequences / np.maximum(sequences, 1e-300)
        return np.floor(np.minimum(by_memory, by_slots) * (1 + 1e-9))

    def _slack_s(self, parts: RoundParts, num_earlier: np.ndarray | int) -> np.ndarray:
        """Return by how much the encode phases of an answer may exceed their average.

        The scheduler keeps a phase within the margin of a target, and raises the target by the
        margin while too few sequences run (`scheduling.iteration.encode_batch`). The deviation of a
        phase follows from the inputs of its own batch, so the sum of K phases spreads by sqrt(K)
        times that of one.
        """
        most = (1 + self._deployment.encode_margin) ** 2 - 1
        return most * parts.encode_s * np.sqrt(num_earlier + 1)

    def _memory(self, pipeline: Pipeline, kv_tokens: np.ndarray | float) -> np.ndarray:
        return pipeline.whole_bytes(self._deployment.model, kv_tokens)

    def _fits(
        self, pipeline: Pipeline, memory: np.ndarray, num_sequences: np.ndarray
    ) -> np.ndarray:
        deployment = self._deployment
        num_layers = min(deployment.model.num_encode_layers, deployment.model.num_decode_layers)
        return (
            (memory <= deployment.cluster.memory_bytes)
            & (num_sequences <= deployment.max_sequences)
            & (pipeline.num_stages <= num_layers)
        )

    def _largest_batch(self) -> int:
        """Return an upper limit (at least 1) of B_E in configurations that fit."""
        deployment, phases = self._deployment, self.phases
        empty = self._memory(self._pipelines, 0.0)
        token_bytes = self._memory(self._pipelines, 1.0) - empty
        tokens = (deployment.cluster.memory_bytes - empty) / np.maximum(token_bytes, 1e-300)
        every = np.array(1), np.array(self.max_control)
        by_memory = tokens.max() / max(float(phases.least_peak_tokens(*every)), 1e-300)
        by_slots = deployment.max_sequences / float(phases.least_peak_sequences(*every))
        return max(1, int(min(by_memory, by_slots, deployment.max_encode_batch)))
