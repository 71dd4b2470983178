"""torchfold: dynamic batching by depth over PyTorch, as TensorFlow Fold. In its own environment."""

from __future__ import annotations

import time

from benchmarks.cells.peers.replay import FirstCome, answer, play, read_job, settle

_SHOWN = 8


def main() -> None:
    """Serve the job's requests and print what it took."""
    begin_s = time.perf_counter()
    import numpy as np
    import torch
    import torchfold  # pyright: ignore[reportMissingImports]

    job = read_job()
    tensors = {name: torch.from_numpy(value) for name, value in np.load(job["weights"]).items()}
    requests = job["requests"]

    class Tree(torch.nn.Module):
        """The cells, which a fold calls with batches of rows."""

        def leaf(self, token):
            x = tensors["leaf.table"][token]
            gates = x @ tensors["leaf.kernel"] + tensors["leaf.bias"]
            i, o, u = gates.chunk(3, 1)
            c = i.sigmoid() * u.tanh()
            return o.sigmoid() * c.tanh(), c

        def internal(self, left_h, left_c, right_h, right_c):
            both = torch.cat([left_h, right_h], 1)
            gates = both @ tensors["internal.kernel"] + tensors["internal.bias"]
            i, left_f, right_f, o, u = gates.chunk(5, 1)
            c = i.sigmoid() * u.tanh() + left_f.sigmoid() * left_c + right_f.sigmoid() * right_c
            return o.sigmoid() * c.tanh(), c

    cells = Tree()
    values: dict[int, list[float]] = {}

    def root(fold, tree):
        done, open = [], [tree]
        while open:
            part = open.pop()
            if part is None:
                right_h, right_c = done.pop()
                left_h, left_c = done.pop()
                done.append(fold.add("internal", left_h, left_c, right_h, right_c).split(2))
            elif isinstance(part, list):
                open += [None, part[1], part[0]]
            else:
                done.append(fold.add("leaf", part).split(2))
        return done.pop()[0]

    @torch.inference_mode()
    def run(batch: list[int]) -> None:
        fold = torchfold.Fold()
        roots = [root(fold, requests[number]["tree"]) for number in batch]
        (states,) = fold.apply(cells, [roots])
        for number, state in zip(batch, states, strict=True):
            values[number] = state[:_SHOWN].tolist()

    run(list(range(min(4, len(requests)))))
    settle()
    startup_s = time.perf_counter() - begin_s
    times = play(job["arrivals"], FirstCome(job["max_batch"]), run)
    answer(startup_s, times, [values[number] for number in range(len(requests))])


if __name__ == "__main__":
    main()
