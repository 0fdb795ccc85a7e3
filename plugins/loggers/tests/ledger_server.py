"""An experiment service over HTTP, as small as one can be.

    python ledger_server.py PORT FOLDER

keeps what it is sent in ``FOLDER/rows.jsonl``. ``FOLDER/mode`` says how it behaves: ``ok``, ``hang`` (it takes a
request and answers never), ``fail`` (500), or a word that it refuses in a record (400). It ends with the process that
started it.
"""

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def serve(port, folder):
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            mode = (folder / "mode").read_text()
            if mode == "hang":
                time.sleep(600)
            if mode == "fail":
                self.send_error(500)
            elif mode != "ok" and mode in json.dumps(content):
                self.send_error(400, f"no {mode} here")
            else:
                if "begin" in content:
                    content["run"] = f"run-{time.time_ns()}"
                with open(folder / "rows.jsonl", "ab", buffering=0) as file:
                    file.write(json.dumps(content).encode() + b"\n")
                self.send_response(200)
                self.end_headers()
                self.wfile.write(json.dumps({"run": content["run"]}).encode())

        def log_message(self, *_):
            pass

    parent = os.getppid()
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.timeout = 1
    while os.getppid() == parent:
        server.handle_request()


if __name__ == "__main__":
    serve(int(sys.argv[1]), Path(sys.argv[2]))
