"""DyNet with on-the-fly batching by agenda. Runs in its own environment."""

from __future__ import annotations

import time

from benchmarks.cells.peers.replay import SHOWN, folded, read_job, serve


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

        def state(o, c):
            return dy.cmult(dy.logistic(o), dy.tanh(c)), c

        def leaf(token: int):
            gates = dy.affine_transform([word_bias, of_word, dy.lookup(words, token)])
            i, o, u = parts(gates, 3)
            return state(o, dy.cmult(dy.logistic(i), dy.tanh(u)))

        def pair(left, right):
            both = dy.concatenate([left[0], right[0]])
            gates = dy.affine_transform([pair_bias, of_pair, both])
            i, left_f, right_f, o, u = parts(gates, 5)
            c = dy.cmult(dy.logistic(i), dy.tanh(u))
            c = c + dy.cmult(dy.logistic(left_f), left[1])
            return state(o, c + dy.cmult(dy.logistic(right_f), right[1]))

        def root(request):
            return folded(request["tree"], leaf, pair)[0]
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
            values[number] = value.npvalue()[:SHOWN].tolist()

    serve(job, begin_s, run, values)


if __name__ == "__main__":
    main()
