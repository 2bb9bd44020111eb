"""Incidents posted as JSON; a server of its own stands for Slack or a pager.

python examples/webhook_example.py
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

from training import train

from stayfinite.integrations.webhook import WebhookSink


class Receiver(BaseHTTPRequestHandler):
    """Prints the first line of what is posted."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        print("received:", body["text"].splitlines()[0])
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing but what was posted is printed."""


def main() -> None:
    server = HTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sink = WebhookSink(f"http://127.0.0.1:{server.server_port}/")
    train(sinks=[sink])
    sink.flush()
    server.shutdown()


if __name__ == "__main__":
    main()
