"""A worker whose tasks take one unit of time, for tests of policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jaxserve.cells.cell_graph import CellGraph
from jaxserve.cells.policy import CellPolicy, CellType, Task


@dataclass
class Played:
    """What happened.

    Attributes:
      tasks: (begin, task).
      ends: time at which each request left, by its number.
    """

    tasks: list[tuple[float, Task]] = field(default_factory=list)
    ends: dict[int, float] = field(default_factory=dict)


def play(
    policy: CellPolicy,
    types: Sequence[CellType],
    arrivals: Sequence[tuple[float, CellGraph]],
    *,
    steps_of: Mapping[int, int] | None = None,
    cancelled: Mapping[int, float] | None = None,
) -> Played:
    """Play graphs that arrive in the order of their times, and check every task.

    Args:
      steps_of: of requests with a loop, the step that ends it, where it is not the last one.
      cancelled: request -> time.
    """
    scheduler = policy.new_scheduler(types, 1)
    played = Played()
    first_nodes, owner = [], {}
    num_nodes = 0
    for number, (_, graph) in enumerate(arrivals):
        first_nodes.append(num_nodes)
        owner |= dict.fromkeys(range(num_nodes, num_nodes + len(graph)), number)
        num_nodes += len(graph)
    to_cancel = dict(cancelled or {})
    gone: set[int] = set()
    num_steps: dict[int, int] = {}
    now_s, added = 0.0, 0
    while added < len(arrivals) or scheduler.has_work:
        while added < len(arrivals) and arrivals[added][0] <= now_s:
            scheduler.add(added, arrivals[added][1], first_nodes[added], now_s)
            added += 1
        for number, at_s in list(to_cancel.items()):
            if at_s <= now_s and number < added:
                del to_cancel[number]
                if number not in played.ends:
                    scheduler.cancel(number)
                    gone.add(number)
        tasks = scheduler.schedule(0, now_s)
        if not tasks:
            assert not scheduler.has_work, "nodes are left, and none is scheduled"
            if added < len(arrivals):
                now_s = max(now_s, arrivals[added][0])
            continue
        for task in tasks:
            assert len(task.nodes) + task.num_padding <= types[task.type].max_batch
            assert len(set(task.nodes)) == len(task.nodes) and task.worker == 0
            ended = set()
            for node in task.nodes:
                number = owner[node]
                assert number not in gone, "a cancelled request runs"
                graph, place = arrivals[number][1], node - first_nodes[number]
                assert graph.types[place] == task.type
                num_steps[node] = num_steps.get(node, 0) + 1
                last = graph.max_steps[place]
                if types[task.type].is_loop:
                    last = (steps_of or {}).get(number, last)
                    if num_steps[node] >= last:
                        ended.add(node)
                    assert num_steps[node] <= graph.max_steps[place]
                else:
                    assert num_steps[node] == 1, "a node runs twice"
                for before in graph.predecessors[place]:
                    assert num_steps.get(first_nodes[number] + before, 0) > 0, "too early"
            played.tasks.append((now_s, task))
            now_s += 1
            for number in scheduler.complete([task], [ended]):
                played.ends[number] = now_s
    assert played.ends.keys() == set(range(len(arrivals))) - gone
    done = {number for number in range(len(arrivals)) if number not in gone}
    for node, number in owner.items():
        assert number not in done or num_steps.get(node, 0) > 0, "a node was left out"
    return played


def sizes(played: Played) -> list[tuple[int, int, int]]:
    """Return (type, nodes, padding) of each task."""
    return [(task.type, len(task.nodes), task.num_padding) for _, task in played.tasks]
