"""Models of cells give the same numbers as PyTorch's modules with the same weights."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxserve.cells import CellRuntime
from jaxserve.cells.models import (
    Decoding,
    Stacked,
    folded,
    seq2seq_model,
    sequence_model,
    tree_lstm_model,
)
from jaxserve.cells.models.torch_weights import (
    embedded_from_torch,
    gru_from_torch,
    lstm_from_torch,
    predicting_from_torch,
    tree_lstm_from_torch,
)
from jaxserve.core.errors import (
    CheckpointError,
    EmptyGraphError,
    InvalidConfigError,
    InvalidGraphError,
    TokenOutOfRangeError,
)
from jaxserve.workload.trees import random_trees
from tests.cells.models.alone import evaluate
from tests.common.tiers import some

VOCAB, EMBED, HIDDEN = 13, 5, 6
END = 4


def _tensors(module: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: value.detach().numpy() for name, value in module.state_dict().items()}


def _close(found: np.ndarray, expected: torch.Tensor) -> bool:
    wanted = expected.detach().numpy()
    return bool(np.linalg.norm(found - wanted) <= 1e-5 * np.linalg.norm(wanted))


class _Reader(torch.nn.Module):
    def __init__(self, kind: type[torch.nn.LSTM | torch.nn.GRU], num_layers: int = 1):
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCAB, EMBED)
        self.rnn = kind(EMBED, HIDDEN, num_layers)

    def forward(self, tokens: list[int]):
        return self.rnn(self.embedding(torch.tensor(tokens)))[1]


class _Translator(torch.nn.Module):
    def __init__(self, num_layers: int):
        super().__init__()
        self.encoder, self.decoder = (_Reader(torch.nn.LSTM, num_layers) for _ in range(2))
        self.project = torch.nn.Linear(HIDDEN, VOCAB)

    def forward(self, tokens: list[int], max_steps: int) -> list[int]:
        state, token, answer = self.encoder(tokens), 0, []
        while len(answer) < max_steps and token != END:
            embedded = self.decoder.embedding(torch.tensor([token]))
            h, state = self.decoder.rnn(embedded, state)
            token = int(self.project(h[-1]).argmax())
            answer.append(token)
        return answer


class _Tree(torch.nn.Module):
    """Equations 9 to 14 of Tai et al. for N = 2; no x at internal nodes, no U at leaves."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCAB, EMBED)
        self.leaf = torch.nn.Linear(EMBED, 3 * HIDDEN)
        self.internal = torch.nn.Linear(2 * HIDDEN, 5 * HIDDEN)

    def forward(self, tree) -> tuple[torch.Tensor, torch.Tensor]:
        if not isinstance(tree, tuple):
            i, o, u = self.leaf(self.embedding(torch.tensor(tree))).chunk(3)
            c = i.sigmoid() * u.tanh()
            return o.sigmoid() * c.tanh(), c
        (left_h, left_c), (right_h, right_c) = self(tree[0]), self(tree[1])
        i, f_left, f_right, o, u = self.internal(torch.cat([left_h, right_h])).chunk(5)
        c = i.sigmoid() * u.tanh() + f_left.sigmoid() * left_c + f_right.sigmoid() * right_c
        return o.sigmoid() * c.tanh(), c


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def test_lstm_reads_as_torch():
    """The last states of a sentence are those of torch.nn.LSTM."""
    reader = _Reader(torch.nn.LSTM)
    tensors = _tensors(reader)
    module = embedded_from_torch(lstm_from_torch(tensors, "rnn."), tensors, "embedding.")
    tokens = [3, 1, 12, 0, 7]
    h, c = reader(tokens)
    found = evaluate(sequence_model(module).unfold(tokens))
    assert _close(found["h"], h[0]) and _close(found["c"], c[0])


@pytest.mark.release
def test_folded_products_give_the_same():
    """An LSTM and a TreeLSTM that look up products with embeddings, alone and in a batch."""
    reader, tree_lstm = _Reader(torch.nn.LSTM), _Tree()
    tensors = _tensors(reader)
    module = embedded_from_torch(lstm_from_torch(tensors, "rnn."), tensors, "embedding.")
    model = sequence_model(folded(module), batch_sizes=(1, 4), returns=["c"])
    sentences = [[3, 1, 12, 0, 7], [5], [2, 2]]
    with CellRuntime(model.cells, model.unfold, warmup=False, progress=False) as rt:
        for tokens, found in zip(sentences, rt.generate(sentences), strict=True):
            assert found.values.keys() == {"c"} and _close(found["c"], reader(tokens)[1][0])
    leaf, internal = tree_lstm_from_torch(_tensors(tree_lstm))
    model = tree_lstm_model(folded(leaf), internal)
    for tree in [5, ((1, 2), 3)]:
        found, (h, c) = evaluate(model.unfold(tree)), tree_lstm(tree)
        assert _close(found["h"], h) and _close(found["c"], c)
    gru = gru_from_torch(_tensors(torch.nn.GRUCell(EMBED, HIDDEN)))
    with pytest.raises(InvalidConfigError, match="before a GRU"):
        folded(embedded_from_torch(gru, tensors, "embedding."))


def test_gru_reads_as_torch():
    """The last state of a sentence is that of torch.nn.GRU."""
    reader = _Reader(torch.nn.GRU)
    tensors = _tensors(reader)
    module = embedded_from_torch(gru_from_torch(tensors, "rnn."), tensors, "embedding.")
    found = evaluate(sequence_model(module).unfold([3, 1, 12, 0, 7]))
    assert found.keys() == {"h"} and _close(found["h"], reader([3, 1, 12, 0, 7])[0])


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU])
def test_layers_read_as_torch(kind):
    """The last states of every layer are those of torch, also when requests are batched."""
    reader = _Reader(kind, num_layers=3)
    tensors = _tensors(reader)
    load = lstm_from_torch if kind is torch.nn.LSTM else gru_from_torch
    model = sequence_model(
        embedded_from_torch(load(tensors, "rnn."), tensors, "embedding."), batch_sizes=(1, 4)
    )
    sentences = [[3, 1, 12, 0, 7], [5], [2, 2]]
    with CellRuntime(model.cells, model.unfold, warmup=False, progress=False) as rt:
        answers = rt.generate(sentences)
    for tokens, found in zip(sentences, answers, strict=True):
        expected = reader(tokens)
        names = ("h", "c") if kind is torch.nn.LSTM else ("h",)
        for name, layers in zip(names, expected if len(names) > 1 else [expected], strict=True):
            assert _close(found[name], layers[2])
            assert all(_close(found[f"{name}_{layer}"], layers[layer]) for layer in (0, 1))


def test_cells_of_torch_load_too():
    """The names of torch.nn.LSTMCell and torch.nn.GRUCell have no suffix."""
    x, h, c = (torch.randn(4, size) for size in (EMBED, HIDDEN, HIDDEN))
    arrays = {"x": jnp.asarray(x.numpy()), "h": jnp.asarray(h.numpy())}
    cell = torch.nn.LSTMCell(EMBED, HIDDEN)
    found = lstm_from_torch(_tensors(cell))(**arrays, c=jnp.asarray(c.numpy()))
    expected_h, expected_c = cell(x, (h, c))
    assert _close(np.asarray(found["h"]), expected_h) and _close(np.asarray(found["c"]), expected_c)
    gru = torch.nn.GRUCell(EMBED, HIDDEN)
    assert _close(np.asarray(gru_from_torch(_tensors(gru))(**arrays)["h"]), gru(x, h))


@pytest.mark.parametrize("num_layers", some([2, 1]))
def test_seq2seq_answers_as_torch(num_layers):
    """The same tokens, ended by the end token or by the limit."""
    translator = _Translator(num_layers)
    with torch.no_grad():
        translator.project.weight *= 20
        translator.project.bias[END] += 1
    tensors = _tensors(translator)
    parts = [
        embedded_from_torch(lstm_from_torch(tensors, f"{part}.rnn."), tensors, f"{part}.embedding.")
        for part in ("encoder", "decoder")
    ]
    decoder = predicting_from_torch(parts[1], tensors, "project.")
    decoding = Decoding(go=0, end=END, max_steps=lambda num: num + 5)
    model = seq2seq_model(parts[0], decoder, decoding)
    random = np.random.default_rng(0)
    reasons = set()
    for _ in range(25):
        tokens = random.integers(0, VOCAB, random.integers(1, 6)).tolist()
        expected = translator(tokens, len(tokens) + 5)
        assert evaluate(model.unfold(tokens))["token"].tolist() == expected
        reasons.add(expected[-1] == END)
    assert reasons == {True, False}


def test_tree_lstm_as_its_equations():
    """The root's states are those of Tai et al.'s equations."""
    tree_lstm = _Tree()
    model = tree_lstm_model(*tree_lstm_from_torch(_tensors(tree_lstm)))
    for tree in [5, ((1, 2), 3), *random_trees([7, 11], seed=1)]:
        found, (h, c) = evaluate(model.unfold(tree)), tree_lstm(tree)
        assert _close(found["h"], h) and _close(found["c"], c)


def test_all_problems_of_a_checkpoint_are_named():
    """An error lists every tensor that is missing or of another shape."""
    tensors = _tensors(torch.nn.GRUCell(EMBED, HIDDEN))
    with pytest.raises(CheckpointError) as caught:
        lstm_from_torch(tensors)
    assert len(caught.value.problems) == 4 and "weight_hh has the shape" in str(caught.value)
    both_ways = _tensors(torch.nn.LSTM(EMBED, HIDDEN, bidirectional=True))
    with pytest.raises(CheckpointError, match="l0_reverse is of a layer that reads backwards"):
        lstm_from_torch(both_ways)
    with pytest.raises(CheckpointError, match="weight_ih_l1 is missing"):
        lstm_from_torch({"weight_hh_l1": np.zeros((4 * HIDDEN, HIDDEN))})
    projected = _tensors(torch.nn.LSTM(EMBED, HIDDEN, proj_size=2))
    with pytest.raises(CheckpointError, match="weight_hh_l0 has the shape"):
        lstm_from_torch(projected)
    with pytest.raises(CheckpointError, match="leaf.weight is missing"):
        tree_lstm_from_torch({"embedding.weight": np.zeros((VOCAB, EMBED))})


def test_inputs_are_checked():
    """Empty inputs, tokens outside of the vocabulary and odd trees raise typed errors."""
    tensors = _tensors(_Reader(torch.nn.LSTM))
    lstm = lstm_from_torch(tensors, "rnn.")
    reader = embedded_from_torch(lstm, tensors, "embedding.")
    unfold = sequence_model(reader).unfold
    with pytest.raises(EmptyGraphError):
        unfold([])
    with pytest.raises(TokenOutOfRangeError, match="0 to 12"):
        unfold([1, VOCAB])
    tree = tree_lstm_model(*tree_lstm_from_torch(_tensors(_Tree())))
    with pytest.raises(InvalidGraphError, match="3 members"):
        tree.unfold((1, 2, 3))
    gru = gru_from_torch(_tensors(torch.nn.GRUCell(EMBED, HIDDEN)))
    other = embedded_from_torch(gru, tensors, "embedding.")
    project = {"weight": np.zeros((VOCAB, HIDDEN)), "bias": np.zeros(VOCAB)}
    decoder = predicting_from_torch(other, project, "")
    with pytest.raises(InvalidConfigError, match="equal states"):
        seq2seq_model(reader, decoder, Decoding(go=0, end=None, max_steps=lambda _: 3))
    with pytest.raises(InvalidConfigError, match="do not form a stack"):
        Stacked([lstm, gru])
    with pytest.raises(InvalidConfigError, match="do not form a stack"):
        Stacked([lstm, lstm])  # the second one reads 6 values, not 5


def test_deep_trees_unfold():
    """A tree as deep as a long sentence needs no recursion."""
    model = tree_lstm_model(*tree_lstm_from_torch(_tensors(_Tree())))
    tree = 0
    for _ in range(3000):
        tree = (tree, 1)
    assert model.unfold(tree).num_nodes == 6001
