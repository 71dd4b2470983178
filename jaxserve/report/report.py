"""The report of a runtime: figures, a table, JSON, a Perfetto trace or a picture."""

from __future__ import annotations

import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from jaxserve.core.metrics import OUTCOMES, BoundOutcome, spread
from jaxserve.engine.recorder import RequestRecord, StepRecord, over_replicas
from jaxserve.kernels.dispatch import Choice
from jaxserve.report.trace import trace_events

if TYPE_CHECKING:
    from jaxserve.report.picture import Picture


@final
class Report:
    """The steps and ended requests since the runtime's start, the newest 100,000 of each.

    A notebook displays it as a picture; `print` shows the table.

    Attributes:
      steps, requests: the records, oldest first. Times are on the engine's clock.
      policy: the policy's name, with the schedule that replaced its iteration shape, if one did.
      schedule: figures of the schedule in force, see `Plan.figures`; None without one.
      num_pages: pages of all replicas' pools, without null pages.
      kernels: the implementation of each operation and shape in this process, with the reason.
      num_prefix_queried: prompt tokens, in full pages, that were looked up in the prefix cache.
      num_prefix_hit: queried tokens that were in the prefix cache.
    """

    def __init__(
        self,
        steps: tuple[StepRecord, ...],
        requests: tuple[RequestRecord, ...],
        *,
        policy: str,
        num_pages: int,
        schedule: dict[str, Any] | None = None,
        kernels: tuple[Choice, ...] = (),
        num_prefix_queried: int = 0,
        num_prefix_hit: int = 0,
    ):
        self.steps = steps
        self.requests = requests
        self.policy = policy if schedule is None else f"{policy} ({schedule['schedule']})"
        self.schedule = schedule
        self.num_pages = num_pages
        self.kernels = kernels
        self.num_prefix_queried = num_prefix_queried
        self.num_prefix_hit = num_prefix_hit

    def figures(self) -> dict[str, Any]:
        """Return totals, rates and percentiles; a figure without records is None.

        Times are in seconds. A rate is a total divided by the time from the first arrival to the
        last end.
        """
        timings = [request.timing for request in self.requests]
        ends = [t.finished_s for t in timings if t.finished_s is not None]
        span_s = max(ends) - min(t.arrival_s for t in timings) if ends else None
        num_output = sum(request.num_output_tokens for request in self.requests)
        num_computed = sum(step.num_tokens for step in self.steps)
        num_padding = sum(step.num_padding_tokens for step in self.steps)
        rows = [float(step.num_rows) for step in self.steps]
        pages = over_replicas(self.steps, lambda step: step.pages_owned)
        return {
            "policy": self.policy,
            **({} if self.schedule is None else {"plan": self.schedule}),
            "num_requests": len(self.requests),
            "prompt_tokens": sum(request.num_prompt_tokens for request in self.requests),
            "output_tokens": num_output,
            "output_tokens_per_s": num_output / span_s if span_s else None,
            "num_steps": len(self.steps),
            "num_iterations": sum(step.num_iterations for step in self.steps),
            "num_preemptions": sum(t.num_preemptions for t in timings),
            "pages_out": sum(step.pages_out for step in self.steps),
            "pages_in": sum(step.pages_in for step in self.steps),
            "num_prefix_queried": self.num_prefix_queried,
            "num_prefix_hit": self.num_prefix_hit,
            "hit_rate": (
                self.num_prefix_hit / self.num_prefix_queried if self.num_prefix_queried else None
            ),
            "padding_share": num_padding / (num_computed + num_padding) if self.steps else None,
            "host_gap_s": sum(step.host_gap_s for step in self.steps),
            "rows_a_step": spread(rows),
            "pages_owned": spread([float(owned) for owned in pages]),
            "num_pages": self.num_pages,
            "time_to_first_token_s": spread(
                [t.time_to_first_token_s for t in timings if t.time_to_first_token_s is not None]
            ),
            "latency_s": spread([t.latency_s for t in timings if t.latency_s is not None]),
            "latency_bounds": self._bounds(),
            "kernels": self._served_by(),
        }

    def _bounds(self) -> dict[str, dict[BoundOutcome, int]]:
        """Return how many bounds of single requests were kept, missed and refused, by name."""
        counts: dict[str, dict[BoundOutcome, int]] = {}
        for name, outcome in (each for request in self.requests for each in request.bounds):
            counts.setdefault(name, dict.fromkeys(OUTCOMES, 0))[outcome] += 1
        return counts

    def _served_by(self) -> dict[str, str]:
        served: dict[str, dict[str, None]] = {}
        for choice in self.kernels:
            implementation = f"{choice.implementation} ({choice.reason})"
            served.setdefault(choice.operation, {})[implementation] = None
        return {operation: ", ".join(names) for operation, names in served.items()}

    def __repr__(self) -> str:
        """Return the numbers of requests, tokens and steps; `print` shows all figures."""
        num_output = sum(request.num_output_tokens for request in self.requests)
        return (
            f"Report(policy {self.policy!r}, {len(self.requests)} requests with {num_output} "
            f"output tokens, {len(self.steps)} steps; print it for all figures)"
        )

    def __str__(self) -> str:
        from rich.console import Console
        from rich.table import Table

        table = Table(box=None, show_header=False)
        for name, value in self.figures().items():
            table.add_row(name.replace("_", " "), _shown(value))
        text = io.StringIO()
        Console(file=text, width=100).print(table)
        return text.getvalue().rstrip()

    def to_json(self) -> str:
        """Return the figures, all records, and the implementation of each operation and shape."""
        return json.dumps(
            {
                "figures": self.figures(),
                "requests": [asdict(request) for request in self.requests],
                "steps": [asdict(step) for step in self.steps],
                "kernels": [asdict(choice) for choice in self.kernels],
            }
        )

    def save_trace(self, path: str | Path) -> None:
        """Write a trace that https://ui.perfetto.dev and chrome://tracing open."""
        events = {"traceEvents": trace_events(self.steps, self.requests)}
        Path(path).write_text(json.dumps(events), encoding="utf-8")

    def plot(self, path: str | Path | None = None) -> Picture:
        """Draw throughput, batch and pages over time, and the distribution of latencies.

        Args:
          path: file to save the picture to; its extension selects the format.

        Returns:
          A picture that a notebook displays; its `figure` is Matplotlib's.
        """
        from jaxserve.report.picture import Picture, draw

        figure = draw(self)
        if path is not None:
            figure.savefig(path)
        return Picture(figure)

    def _repr_png_(self) -> bytes:
        return self.plot()._repr_png_()


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(each)}" for name, each in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)
