#!/usr/bin/env bash
# `content: null` in a chat never reaches a chat template in transformers 5.
#
# OpenAI's API gives an answer that only calls functions a `content` of null, and templates of several
# families (DeepSeek-V3's, for one) choose how to write a message by `message['content'] is none`.
# transformers 5.24.0 (tokenizers 0.23.3) leaves out every key of a message whose value is None before it
# renders: `content is none` is false, `content is defined` is false too, and the branch for calls is not
# taken. The same holds for `tool_calls: null`. A template has to ask `not message.content`.
#
# Seen:
#   is none: [user False True][assistant False False]
#   by is none: user=q answer= (no call)
#   by not: user=q call=f
#
# It follows: with transformers as the reference, null is the same as leaving the key out.
set -euo pipefail
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
python3 -m venv "$here/env"
"$here/env/bin/pip" install -q transformers==5.24.0 tokenizers==0.23.3 jinja2
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error "$here/env/bin/python" - <<'PYTHON'
import sys

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
call = {"type": "function", "id": "1", "function": {"name": "f", "arguments": "{}"}}
chat = [
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": None, "tool_calls": [call]},
]
EACH = "{% for m in messages %}"
templates = {
    "is none": EACH + "[{{ m.role }} {{ m.content is none }} {{ m.content is defined }}]{% endfor %}",
    "by is none": EACH + "{% if m.role == 'user' %}user={{ m.content }} {% elif m.content is none %}"
    "call={{ m.tool_calls[0].function.name }}{% else %}answer={{ m.content }} (no call){% endif %}{% endfor %}",
    "by not": EACH + "{% if m.role == 'user' %}user={{ m.content }} {% elif not m.content %}"
    "call={{ m.tool_calls[0].function.name }}{% else %}answer={{ m.content }} (no call){% endif %}{% endfor %}",
}
expected = {
    "is none": "[user False True][assistant False False]",
    "by is none": "user=q answer= (no call)",
    "by not": "user=q call=f",
}
changed = False
for name, template in templates.items():
    text = tokenizer.apply_chat_template(chat, chat_template=template, tokenize=False)
    print(f"{name}: {text}")
    if text != expected[name]:
        print(f"changed: {name} was {expected[name]!r}")
        changed = True
sys.exit(changed)
PYTHON
