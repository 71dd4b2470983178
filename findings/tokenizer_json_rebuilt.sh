#!/usr/bin/env bash
# transformers' AutoTokenizer does not always give the ids of a folder's tokenizer.json.
#
# Versions: transformers 5.24.0, tokenizers 0.23.3.
# Behaviour: the class that the model type (or tokenizer_config.json) names builds normalizer, pre-tokenizer and decoder
#   again, and keeps only vocabulary and merges of the file. With model type qwen2 a file that splits digits in threes
#   loses its rule. TokenizersBackend (PreTrainedTokenizerFast) reads the same folder as it is.
# Seen:
#   tokenizer.json         ['a', '123', '45']
#   AutoTokenizer          ['a', '1', '2', '3', '4', '5'] by Qwen2Tokenizer
#   TokenizersBackend      ['a', '123', '45']
# What follows: read tokenizer.json with tokenizers, and take from transformers only what the settings add.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q transformers==5.24.0 tokenizers==0.23.3
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - "$folder" <<'PYTHON'
import json, pathlib, sys

import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

where = pathlib.Path(sys.argv[1]) / "model"
where.mkdir()
tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "12", "123", "45", "<|end|>"]
backend = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, [("1", "2"), ("12", "3"), ("4", "5")]))
backend.pre_tokenizer = pre_tokenizers.Sequence(
    [
        pre_tokenizers.Split(Regex(r"\p{N}{1,3}|\p{L}+|\s+"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
)
backend.decoder = decoders.ByteLevel()
backend.save(str(where / "tokenizer.json"))
(where / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
(where / "config.json").write_text(json.dumps({"model_type": "qwen2"}))

auto = transformers.AutoTokenizer.from_pretrained(where)
plain = transformers.TokenizersBackend.from_pretrained(where)
found = [backend.encode("a12345").tokens, auto.tokenize("a12345"), plain.tokenize("a12345")]
print("tokenizer.json        ", found[0])
print("AutoTokenizer         ", found[1], "by", type(auto).__name__)
print("TokenizersBackend     ", found[2])
if found != [["a", "123", "45"], ["a", "1", "2", "3", "4", "5"], ["a", "123", "45"]]:
    sys.exit("changed: the ids are others than those stated at the head")
PYTHON
