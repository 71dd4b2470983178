#!/usr/bin/env bash
# The first thing that huggingface_hub 2.4.0 asks a mirror for is not the model: it is /api/agent-harnesses,
# a list by which its user agent names coding agents. Where that path has no answer, each process asks again.
#
# Seen with huggingface_hub 2.4.0 (Python 3.11, x86-64), HF_ENDPOINT naming a server of this machine
# that has one repository of two files and answers 404 to all else:
#   first process:  GET /api/agent-harnesses, then the repository, its tree and its files
#   second process, all files in the cache:  GET /api/agent-harnesses again, then the repository
#   the server is slow with that path alone:  up to 3 s more before the first download, in every process
#   HF_HUB_DISABLE_TELEMETRY=1:  that path is not asked for
#
# It follows: a 404 is not remembered (an answer is, for a day), so a mirror of the Hub should answer that path
# or refuse at once; a mirror or a firewall that drops unknown paths costs each start up to three seconds, unless
# HF_HUB_DISABLE_TELEMETRY is set; and a test that counts requests must expect this one.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q huggingface_hub==2.4.0
cat > "$folder/download.py" <<'PYTHON'
import time
from huggingface_hub import snapshot_download
from huggingface_hub.utils import disable_progress_bars

disable_progress_bars()
begin = time.monotonic()
snapshot_download("org/tiny")
print(round(time.monotonic() - begin))
PYTHON
cat > "$folder/mirror.py" <<'PYTHON'
import hashlib, json, os, subprocess, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

folder = sys.argv[1]
FILES = {"config.json": b"{}", "notes.txt": b"text"}
COMMIT = "5" * 40
asked, slow = [], False


class Mirror(BaseHTTPRequestHandler):
    def do_GET(self):
        path = self.path.split("?")[0]
        asked.append(path)
        name = path.rpartition("/")[2]
        digest = {n: hashlib.sha1(c).hexdigest() for n, c in FILES.items()}
        if path == "/api/agent-harnesses" and slow:
            time.sleep(6)
        if path.startswith("/api/models/org/tiny/tree/"):
            listed = [{"type": "file", "path": n, "size": len(c), "oid": digest[n]} for n, c in FILES.items()]
            self.reply(200, json.dumps(listed).encode())
        elif path.startswith("/api/models/org/tiny"):
            names = [{"rfilename": n} for n in FILES]
            self.reply(200, json.dumps({"id": "org/tiny", "sha": COMMIT, "siblings": names}).encode())
        elif path.startswith("/org/tiny/resolve/") and name in FILES:
            self.reply(200, FILES[name], {"ETag": f'"{digest[name]}"', "X-Repo-Commit": COMMIT})
        else:
            self.reply(404, b"{}")

    do_HEAD = do_GET

    def reply(self, status, body, headers={}):
        try:
            self.send_response(status)
            for header, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(header, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)
        except OSError:  # the client has given up
            pass

    def log_message(self, *args):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Mirror)
server.daemon_threads = True
threading.Thread(target=server.serve_forever, daemon=True).start()


def run(**variables):
    asked.clear()
    given = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": f"{folder}/home"}
    given |= {"HF_HUB_DISABLE_TELEMETRY": "", **variables}
    command = [sys.executable, f"{folder}/download.py"]
    seconds = int(subprocess.check_output(command, env={**os.environ, **given}, text=True))
    return list(asked), seconds


first, quick = run()
print("first process:", first[:2], "files:", len({p for p in first if "/resolve/" in p}))
second, _ = run()
print("second process:", second)
slow = True
_, late = run()
print("a slow answer costs seconds:", late > quick)
print("without telemetry:", run(HF_HUB_DISABLE_TELEMETRY="1")[0])
PYTHON
"$folder/venv/bin/python" "$folder/mirror.py" "$folder" | tee "$folder/seen"
cat > "$folder/stated" <<'STATED'
first process: ['/api/agent-harnesses', '/api/models/org/tiny/revision/main'] files: 2
second process: ['/api/agent-harnesses', '/api/models/org/tiny/revision/main']
a slow answer costs seconds: True
without telemetry: ['/api/models/org/tiny/revision/main']
STATED
if ! diff "$folder/stated" "$folder/seen"; then
    echo "changed: huggingface_hub 2.4.0 no longer does what is stated above"
    exit 1
fi
