"""The timeline of RRA: encode B_E sequences, decode N_D times, again (ExeGPT, figure 4a)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import numpy as np

from jaxserve.planning.schedules.configuration import Layout, Points, Policy, Schedule, Stage
from jaxserve.planning.schedules.estimates import Best, Estimates
from jaxserve.planning.schedules.lengths import TaskLengths
from jaxserve.planning.schedules.phases import DecodePhases
from jaxserve.planning.schedules.pipeline import Pipeline, shared_out
from jaxserve.planning.schedules.rounds import RoundParts
from jaxserve.planning.schedules.timeline import Boxes, Deployment, layouts_of


@final
class RRATimeline:
    """Estimates of RRA's configurations.

    Every device holds its share of the encode layers and of the decode layers. `RoundParts` says
    how long a round of an encode phase and N_D decode iterations takes. An answer of s iterations
    takes ceil(s / N_D) - 1 rounds, then an encode phase and its iterations of the last round. The
    batch of an iteration is that of `DecodePhases`.

    Args:
      layouts: the layouts to consider; by default all that the cluster allows.
      classes: bounds of requests with bounds of their own, as (output tokens, seconds) each.
      phases: those of another timeline for the same lengths, so that they are not computed anew.

    Attributes:
      phases: the decode phases of every length.
    """

    def __init__(
        self,
        deployment: Deployment,
        lengths: TaskLengths,
        layouts: Sequence[Layout] | None = None,
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
        self.layouts = tuple(layouts or layouts_of((Policy.RRA,), cluster))
        self._pipelines = Pipeline.of(
            np.full(len(self.layouts), cluster.num_devices),
            np.array([layout.num_sharded_devices for layout in self.layouts]),
            np.array([layout.degree for layout in self.layouts]),
            first_device=0,
            devices_per_machine=cluster.devices_per_machine,
        )
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
        """Return the seconds that the tokens of each of `classes` take."""
        parts, pipeline = self._parts(points), self._pipelines[points.layout]
        prompts_s = self._own_prompts_s(pipeline, points.encode_batch, parts)
        return [
            prompts_s + self._latency_s(parts, points.control, longest)
            for longest, _ in self._classes
        ]

    def boxes(self) -> Boxes:
        layouts = np.arange(len(self.layouts))
        ones = np.ones_like(layouts)
        high = Points(layouts, ones * self.max_encode_batch, ones * self.max_control)
        return Boxes(Points(layouts, ones, ones), high)

    def bound(self, boxes: Boxes) -> Best:
        """See `Timeline.bound`.

        Costs do not fall with the batch, and the batch in a part of a phase is at least the
        smallest of any N_D of the box. So a round takes at least as long as one of the box's
        smallest B_E and N_D with that batch, and an answer at least as many rounds and encode
        phases as with the largest N_D. Where batching pays, the largest B_E that may fit has the
        shortest round per sequence; and a part of a phase decodes its tokens at most as fast as in
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
            together_s = fastest.least_s + together.decoding_s(phases.least_decoded(*controls))
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
            stages=tuple(
                Stage(num_devices=num, num_encode_layers=encode, num_decode_layers=decode)
                for num, encode, decode in zip(
                    devices,
                    shared_out(model.num_encode_layers, devices),
                    shared_out(model.num_decode_layers, devices),
                    strict=True,
                )
            ),
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
        """Return the seconds of an answer of `longest` iterations."""
        num_earlier = np.maximum(-(-longest // num_decodes), 1) - 1
        num_last = longest - num_earlier * num_decodes
        last_s = np.maximum(parts.begun_s(num_decodes, num_last), num_last * parts.iteration_s)
        slow = 1 + self._deployment.decode_margin
        latency_s = parts.encode_s + self._slack_s(parts, num_earlier) + slow * last_s
        # In the rounds of an answer every iteration takes place, however few others there are.
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
        return latency_s + num_earlier * parts.between_s + self._slack_s(parts, num_earlier)

    def _own_share(
        self, latency_s: Callable[[int], np.ndarray], prompts_s: np.ndarray
    ) -> np.ndarray:
        """Return `Estimates.own_share` of configurations.

        Args:
          latency_s: returns the seconds of answers of so many iterations.
          prompts_s: seconds of prompts besides.
        """
        shares = [(prompts_s + latency_s(num)) / bound_s for num, bound_s in self._classes]
        return np.max(shares, axis=0, initial=0.0) if shares else np.zeros(len(prompts_s))

    def _own_prompts_s(
        self, pipeline: Pipeline, batch: np.ndarray, parts: RoundParts
    ) -> np.ndarray:
        """Return the seconds of prompts in a span of `classes` that `_latency_s` does not have.

        A span may be short, so one encode phase in it has long prompts, and not those of the mean.
        And a prompt of the class is computed beside it, by itself: its own, or another one.
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
        """Return the seconds of an encode phase with long prompts, which a first token waits for.

        A runner ends a batch at the prompt that brings its tokens over their mean
        (`scheduling.iteration.encode_batch`), so it has up to half a long prompt more than the
        mean; and at least one prompt, however long. Without a margin every phase is taken as even.
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
        """Return a B_E that none that fits exceeds, with any N_D of a range."""
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
        """Return by how much the encode phases of an answer may last longer than on average.

        The scheduler keeps a phase within the margin of a target, and raises the target by the
        margin while too few sequences run (`scheduling.iteration.encode_batch`). By how much a
        phase differs follows from the inputs of its own batch, so the sum of K of them spreads by
        the square root of K times as much as one.
        """
        most = (1 + self._deployment.encode_margin) ** 2 - 1
        return most * parts.encode_s * np.sqrt(num_earlier + 1)

    def _memory(self, pipeline: Pipeline, kv_tokens: np.ndarray | float) -> np.ndarray:
        model = self._deployment.model
        return pipeline.memory_bytes(
            model,
            num_encode_layers=0 if model.is_decoder_only else model.num_encode_layers,
            num_decode_layers=model.num_decode_layers,
            kv_tokens=kv_tokens,
        )

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
        """Return a B_E that no fitting configuration exceeds; at least 1."""
        deployment, phases = self._deployment, self.phases
        empty = self._memory(self._pipelines, 0.0)
        token_bytes = self._memory(self._pipelines, 1.0) - empty
        tokens = (deployment.cluster.memory_bytes - empty) / np.maximum(token_bytes, 1e-300)
        every = np.array(1), np.array(self.max_control)
        by_memory = tokens.max() / max(float(phases.least_peak_tokens(*every)), 1e-300)
        by_slots = deployment.max_sequences / float(phases.least_peak_sequences(*every))
        return max(1, int(min(by_memory, by_slots, deployment.max_encode_batch)))
