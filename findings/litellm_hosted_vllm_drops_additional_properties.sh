#!/usr/bin/env bash
# litellm sends other schemas of tools to a vLLM server than to the same server by another name.
#
# litellm 1.110.2 with a model `hosted_vllm/...` removes `additionalProperties: false` and `strict` from each tool
# at every depth; `openai/...` with the same `api_base` passes the tools as they were given. An argument that
# the schema does not name is then allowed, and a grammar of the server's makes it: the same client code has
# arguments that its own schema refuses, and only by the name of the provider.
#
# Seen (whether the tool is strict, and additionalProperties of its two objects, in what the server gets):
#   hosted_vllm: strict False, additionalProperties [None, None]
#   openai: strict True, additionalProperties [False, False]
#
# It follows: clients of an engine with an OpenAI-compatible API use `openai/...` with `api_base`, and a server
# cannot tell from the request what the client's schema was.
set -euo pipefail
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
python3 -m venv "$here/env"
"$here/env/bin/pip" install -q litellm==1.110.2
LITELLM_LOCAL_MODEL_COST_MAP=True "$here/env/bin/python" - <<'PYTHON'
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import litellm

ANSWER = {
    "id": "1",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [
        {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "a"}}
    ],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}
asked = []


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        body = json.dumps(ANSWER).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *about):
        pass


server = HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()


def tools():
    place = {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    }
    whole = {
        "type": "object",
        "properties": {"place": place},
        "required": ["place"],
        "additionalProperties": False,
    }
    return [
        {"type": "function", "function": {"name": "weather", "strict": True, "parameters": whole}}
    ]


def sent(provider):
    litellm.completion(
        model=f"{provider}/m",
        api_base=f"http://127.0.0.1:{server.server_port}/v1",
        api_key="none",
        messages=[{"role": "user", "content": "hi"}],
        tools=tools(),
    )
    function = asked[-1]["tools"][0]["function"]
    whole = function["parameters"]
    parts = whole, whole["properties"]["place"]
    found = "strict" in function, [part.get("additionalProperties") for part in parts]
    print(f"{provider}: strict {found[0]}, additionalProperties {found[1]}")
    return found


changed = sent("hosted_vllm") != (False, [None, None]) or sent("openai") != (True, [False, False])
if changed:
    print("changed: tools are the same by both names, or others than before")
sys.exit(changed)
PYTHON
