"""A server with OpenAI's completions, each of as many "a"s as asked for: SCRIPT JOB.json PORT."""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert body["stream"] and body["ignore_eos"] and body["extra"] == 1
        usage = {"completion_tokens": body["max_tokens"]}
        text = [{"choices": [{"text": "a"}]}] * body["max_tokens"]
        events = [*text, {"choices": [], "usage": usage}]
        lines = [f"data: {json.dumps(each)}\n\n" for each in events]
        self.send_response(200)
        self.end_headers()
        self.wfile.write("".join([*lines, "data: [DONE]\n\n"]).encode())

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    folder = Path(job["models"]["safetensors"])
    names = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    assert all((folder / name).is_file() for name in names)
    assert job["batch_size"] == 2 and len(job["requests"]) == 4
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), _Handler).serve_forever()


if __name__ == "__main__":
    main()
