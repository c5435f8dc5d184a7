"""A fake of an engine's server, with the standard library alone: ``python fake_server.py OPTIONS``.

It answers what a comparison of servers asks: /health, /v1/models, /v1/completions and the profiler's routes.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


def completion(prompt: str, shift: float, word: str) -> dict[str, Any]:
    """What the OpenAI interface gives with logprobs: three tokens, made of the prompt and moved by ``shift``."""
    tokens = [f"{word}{len(prompt) % 7}{index}" for index in range(3)]
    logprobs = [-0.5 - index + shift for index in range(3)]
    top = [{token: value, "other": -4.0 + shift} for token, value in zip(tokens, logprobs, strict=True)]
    given = {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": top}
    return {"choices": [{"text": "".join(tokens), "logprobs": given}]}


def trace(directory: Path) -> None:
    """A trace of one step of 100 us on a GPU, a quarter of which communicates."""
    events = [
        {"ph": "X", "cat": "gpu_user_annotation", "name": "step[DECODE bs=8]", "ts": 0, "dur": 100},
        {"ph": "X", "cat": "kernel", "name": "uccl_ep_dispatch_send", "ts": 10, "dur": 25},
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 40, "dur": 50},
    ]
    (directory / "rank-0.trace.json").write_text(json.dumps({"traceEvents": events}))


class Handler(BaseHTTPRequestHandler):
    """One request."""

    shift, word, traces = 0.0, "t", True

    def _send(self, body: dict[str, Any], status: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self._send({"data": [{"id": "fake-model"}]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/v1/completions":
            self._send(completion(asked["prompt"], self.shift, self.word))
        elif self.path == "/start_profile" and self.traces:
            trace(Path(asked["output_dir"]))
            self._send({})
        else:
            self._send({}, 404)

    def log_message(self, *_arguments: object) -> None:
        """Nothing."""


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--moe-a2a-backend", required=True)
    parser.add_argument("--shift", type=float, default=0.0)
    parser.add_argument("--word", default="t")
    parser.add_argument("--no-profiler", action="store_true")
    parser.add_argument("--end", type=Path, help="written when it is asked to end")
    options = parser.parse_args()
    if options.moe_a2a_backend == "deepep":
        sys.exit("ModuleNotFoundError: No module named 'deep_ep'")
    Handler.shift, Handler.word, Handler.traces = options.shift, options.word, not options.no_profiler
    if options.end:
        signal.signal(signal.SIGTERM, lambda *_: (options.end.write_text("ended by itself"), sys.exit(0)))
    print("fake server is up", flush=True)
    ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
