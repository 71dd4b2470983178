"""jaxserve as a peer: the same job, the same output."""

from __future__ import annotations

import sys
import time
from typing import Any

from benchmarks.cells.peers.replay import SHOWN, answer, read_job, settle

_SWITCH_S = 5e-4
# Maximum relative increase of a row's time with each doubling of the largest batch.
_MOST_LOSS = 0.1


def main() -> None:
    begin_s = time.perf_counter()
    import numpy as np

    from benchmarks.cells.applications import SIZES, CellRequest
    from benchmarks.cells.contenders import OURS, batch_sizes_of
    from benchmarks.cells.models import model_from
    from benchmarks.cells.playing import serve_all
    from jaxserve.cells import CellRuntime
    from jaxserve.cells.measure import sized

    job = read_job()
    sizes = SIZES[job["size"]]
    requests = [
        CellRequest(
            tuple(request.get("tokens", ())),
            _pairs(request["tree"]) if "tree" in request else None,
            request.get("num_output_tokens", 0),
        )
        for request in job["requests"]
    ]
    tensors = dict(np.load(job["weights"]))
    model = model_from(tensors, batch_sizes_of(OURS, sizes), folds=job["folds"], returns=["h"])
    # Larger tasks are less work for the host, which `sized` does not measure.
    has_loops = any(cell.is_loop for cell in model.cells)
    cells = sized(model.cells, least_gain=0.05 if has_loops else -_MOST_LOSS)
    with CellRuntime(cells, model.unfold, slot_memory=job["slot_memory"]) as rt:
        rt.generate(requests[:4], progress=False)
        settle()
        # The runtime's thread needs the interpreter while this one unfolds; see docs/cells.md.
        sys.setswitchinterval(_SWITCH_S)
        startup_s = time.perf_counter() - begin_s
        served, done = serve_all(rt, requests, job["arrivals"])
    values = [
        (one["token"] if "token" in one.values else one["h"])[:SHOWN].tolist() for one in done
    ]
    answer(startup_s, [(one.begin_s, one.end_s) for one in served], values)


def _pairs(tree: Any) -> Any:
    """Return a tree with pairs instead of JSON's lists; trees of sentences are not deep."""
    return tuple(map(_pairs, tree)) if isinstance(tree, list) else tree


if __name__ == "__main__":
    main()
