"""PyTorch: sentences packed, or padded in buckets of width 10. Runs in its own environment."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.cells.peers.replay import SHOWN, Queue, read_job, serve

_WIDTH = 10


def main() -> None:
    begin_s = time.perf_counter()
    import numpy as np
    import torch

    job = read_job()
    tensors = {name: torch.from_numpy(value) for name, value in np.load(job["weights"]).items()}
    hidden, vocab = job["hidden_size"], job["vocab_size"]
    requests, packs = job["requests"], job["variant"] == "packed"

    def step(prefix: str) -> tuple[torch.nn.Embedding, torch.nn.LSTM]:
        lstm = torch.nn.LSTM(hidden, hidden, batch_first=True)
        kernel, bias = tensors[f"{prefix}.kernel"].T, tensors[f"{prefix}.bias"]
        lstm.load_state_dict(
            {
                "weight_ih_l0": kernel[:, :hidden],
                "weight_hh_l0": kernel[:, hidden:],
                "bias_ih_l0": bias,
                "bias_hh_l0": torch.zeros_like(bias),
            }
        )
        return torch.nn.Embedding(vocab, hidden, _weight=tensors[f"{prefix}.table"]), lstm

    embed, encoder = step("encoder")
    has_decoder = "decoder.kernel" in tensors
    embed_out, decoder = step("decoder") if has_decoder else (None, None)
    values: dict[int, list[float]] = {}

    def packed(x: torch.Tensor, lengths: torch.Tensor):
        rows = torch.nn.utils.rnn.pack_padded_sequence(
            x, lengths, batch_first=True, enforce_sorted=False
        )
        return encoder(rows)[1]

    def last_h(x: torch.Tensor, lengths: torch.Tensor):
        """Run the whole padded batch; a sentence's h is that of its last word."""
        outputs, _ = encoder(x)
        return outputs[torch.arange(len(x)), lengths - 1][None], None

    def last_states(x: torch.Tensor, lengths: torch.Tensor):
        """Run the padded batch word by word: the outputs have no c, which a decoder needs."""
        found: Any = None
        for number in range(x.shape[1]):
            _, state = encoder(x[:, number : number + 1], found)
            is_over = (lengths <= number)[None, :, None]
            before = found or state
            found = tuple(
                torch.where(is_over, old, new) for old, new in zip(before, state, strict=True)
            )
        return found

    read = packed if packs else last_states if has_decoder else last_h

    @torch.inference_mode()
    def run(batch: list[int]) -> None:
        sentences = [requests[number]["tokens"] for number in batch]
        lengths = torch.tensor([len(tokens) for tokens in sentences])
        ids = torch.zeros(len(batch), int(lengths.max()), dtype=torch.long)
        for row, tokens in enumerate(sentences):
            ids[row, : len(tokens)] = torch.tensor(tokens)
        state = read(embed(ids), lengths)
        if has_decoder:
            decode(batch, state)
        else:
            for row, number in enumerate(batch):
                values[number] = state[0][0, row, :SHOWN].tolist()

    def decode(batch: list[int], state) -> None:
        assert decoder is not None and embed_out is not None
        left = torch.tensor([requests[number]["num_output_tokens"] for number in batch])
        token = torch.zeros(len(batch), 1, dtype=torch.long)
        steps = []
        for _ in range(int(left.max())):
            output, state = decoder(embed_out(token), state)
            logits = output[:, 0] @ tensors["project.kernel"] + tensors["project.bias"]
            token = logits.argmax(-1, keepdim=True)
            steps.append(token)
        tokens = torch.cat(steps, 1)
        for row, number in enumerate(batch):
            values[number] = tokens[row, : left[row]][:SHOWN].tolist()

    lengths = [len(request["tokens"]) for request in requests]
    queue = None if packs else Queue(job["max_batch"], lengths, _WIDTH)
    serve(job, begin_s, run, values, queue)


if __name__ == "__main__":
    main()
