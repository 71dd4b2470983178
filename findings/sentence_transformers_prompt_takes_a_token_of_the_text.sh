#!/usr/bin/env bash
# sentence-transformers leaves the first token of a text out of its embedding if the prompt ends in a space.
#
# `include_prompt: false` of a Pooling module leaves a prompt's tokens out of the mean. sentence-transformers
# 6.2.0 (transformers 5.24.0, torch 2.13.0) counts them in the prompt alone, whose last space is a token of its
# own, and takes that number off prompt and text together, where byte-level BPE, the tokenizer of most
# decoders, has joined the space with the first word. So that word does not count, and a text of one token has
# an embedding of zeros, without a warning. The usual prompts ("query: ", "search_document: ") end in a space.
#
# Seen (prompts and texts; which tokens the embedding is the mean of):
#   'query: ' and 'rain': none, its length is 0.00
#   'query: ' and 'rain falls': [' falls']
#   'query:' and ' rain falls': [' rain', ' falls']
#
# It follows: prompts for such a model end before the space, and the text begins with it.
set -euo pipefail
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
python3 -m venv "$here/env"
"$here/env/bin/pip" install -q torch==2.13.0 transformers==5.24.0 sentence-transformers==6.2.0
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error "$here/env/bin/python" -W ignore - "$here" <<'PYTHON'
import sys
from pathlib import Path

import torch
import transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Pooling, Transformer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

transformers.utils.logging.disable_progress_bar()
folder = Path(sys.argv[1], "model")
backend = Tokenizer(models.BPE())
backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
backend.decoder = decoders.ByteLevel()
alphabet = pre_tokenizers.ByteLevel.alphabet()
trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=["<end>"], show_progress=False)
backend.train_from_iterator(["query: rain falls"] * 9, trainer)
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="<end>")
tokenizer.save_pretrained(folder)
torch.manual_seed(0)
config = transformers.Qwen3Config(
    vocab_size=len(tokenizer),
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=6,
    head_dim=8,
)
plain = transformers.Qwen3Model(config).eval()
plain.save_pretrained(folder)
model = SentenceTransformer(
    modules=[Transformer(str(folder)), Pooling(48, pooling_mode="mean", include_prompt=False)], device="cpu"
)


def counted(prompt, text):
    """Return the last tokens whose mean is the embedding; None if no mean of last tokens is."""
    ids = tokenizer(prompt + text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        states = plain(ids).last_hidden_state[0]
    embedding = torch.tensor(model.encode(text, prompt=prompt))
    length = embedding.norm().item()
    if length < 1e-6:
        print(f"{prompt!r} and {text!r}: none, its length is {length:.2f}")
        return []
    for first in range(len(states)):
        if torch.allclose(states[first:].mean(0), embedding, atol=1e-4):
            tokens = [tokenizer.decode(each) for each in ids[0, first:]]
            print(f"{prompt!r} and {text!r}: {tokens}")
            return tokens
    print(f"{prompt!r} and {text!r}: another embedding")


found = counted("query: ", "rain"), counted("query: ", "rain falls"), counted("query:", " rain falls")
changed = found != ([], [" falls"], [" rain", " falls"])
if changed:
    print("changed: the first token of a text was left out with 'query: ' alone")
sys.exit(changed)
PYTHON
