"""Incidents counted for Prometheus, under /metrics.

python examples/prometheus_example.py
"""

from __future__ import annotations

from urllib.request import urlopen

from prometheus_client import start_http_server
from training import train


def main() -> None:
    server, _ = start_http_server(0, addr="127.0.0.1")  # a free port
    train()
    address = f"http://127.0.0.1:{server.server_port}/metrics"
    with urlopen(address) as page:
        lines = page.read().decode().splitlines()
    print(address)
    print("\n".join(line for line in lines if line.startswith("stayfinite_")))
    server.shutdown()


if __name__ == "__main__":
    main()
