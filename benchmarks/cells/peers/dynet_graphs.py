"""DyNet with on-the-fly batching by agenda. Runs in its own environment."""

from __future__ import annotations

import time

from benchmarks.cells.peers.replay import FirstCome, answer, play, read_job, settle

_SHOWN = 8


def main() -> None:
    begin_s = time.perf_counter()
    import dynet_config

    job = read_job()
    dynet_config.set(mem=4096, autobatch=1, random_seed=1)
    import dynet as dy
    import numpy as np

    tensors = dict(np.load(job["weights"]))
    hidden, requests = job["hidden_size"], job["requests"]
    parameters = dy.ParameterCollection()

    def matrix(name: str):
        return parameters.parameters_from_numpy(np.ascontiguousarray(tensors[name].T))

    def table(name: str):
        return parameters.lookup_parameters_from_numpy(tensors[name])

    def vector(name: str):
        return parameters.parameters_from_numpy(tensors[name])

    values: dict[int, list[float]] = {}
    if "leaf.kernel" in tensors:
        words, of_word, word_bias = table("leaf.table"), matrix("leaf.kernel"), vector("leaf.bias")
        of_pair, pair_bias = matrix("internal.kernel"), vector("internal.bias")

        def parts(gates, num: int):
            return [dy.pick_range(gates, i * hidden, (i + 1) * hidden) for i in range(num)]

        def root(request):
            done, open = [], [request["tree"]]
            while open:
                part = open.pop()
                if part is None:
                    right_h, right_c = done.pop()
                    left_h, left_c = done.pop()
                    both = dy.concatenate([left_h, right_h])
                    gates = dy.affine_transform([pair_bias, of_pair, both])
                    i, left_f, right_f, o, u = parts(gates, 5)
                    c = dy.cmult(dy.logistic(i), dy.tanh(u))
                    c = c + dy.cmult(dy.logistic(left_f), left_c)
                    c = c + dy.cmult(dy.logistic(right_f), right_c)
                elif isinstance(part, list):
                    open += [None, part[1], part[0]]
                    continue
                else:
                    gates = dy.affine_transform([word_bias, of_word, dy.lookup(words, part)])
                    i, o, u = parts(gates, 3)
                    c = dy.cmult(dy.logistic(i), dy.tanh(u))
                done.append((dy.cmult(dy.logistic(o), dy.tanh(c)), c))
            return done.pop()[0]
    else:
        words = table("encoder.table")
        # Gates are in the order i, f, o, g there, and 1 is added to f.
        i, f, g, o = np.split(tensors["encoder.kernel"], 4, axis=1)
        kernel = np.concatenate([i, f, o, g], axis=1).T
        i, f, g, o = np.split(tensors["encoder.bias"], 4)
        bias = parameters.parameters_from_numpy(np.concatenate([i, f - 1, o, g]))
        w_x = parameters.parameters_from_numpy(np.ascontiguousarray(kernel[:, :hidden]))
        w_h = parameters.parameters_from_numpy(np.ascontiguousarray(kernel[:, hidden:]))

        def root(request):
            h = c = dy.zeros(hidden)
            for token in request["tokens"]:
                x = dy.lookup(words, token)
                gates = dy.vanilla_lstm_gates(x, h, w_x, w_h, bias)
                c = dy.vanilla_lstm_c(c, gates)
                h = dy.vanilla_lstm_h(c, gates)
            return h

    def run(batch: list[int]) -> None:
        dy.renew_cg()
        roots = [root(requests[number]) for number in batch]
        dy.forward(roots)
        for number, value in zip(batch, roots, strict=True):
            values[number] = value.npvalue()[:_SHOWN].tolist()

    run(list(range(min(4, len(requests)))))
    settle()
    startup_s = time.perf_counter() - begin_s
    times = play(job["arrivals"], FirstCome(job["max_batch"]), run)
    answer(startup_s, times, [values[number] for number in range(len(requests))])


if __name__ == "__main__":
    main()
