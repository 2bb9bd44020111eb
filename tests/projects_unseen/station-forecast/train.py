"""Forecast of the next hours at weather stations.

The training runs in a process of its own (a supervisor restarts or reports it), because the
nightly job must always leave a status file behind.
"""
import json
import multiprocessing as mp
import sys
from pathlib import Path

from wx.settings import Settings
from wx.stations import download
from wx.worker import train_main

HERE = Path(__file__).resolve().parent


def main():
    settings = Settings.from_args()
    settings.root = str(HERE)
    download(HERE / settings.data, settings.stations, settings.hours)

    ctx = mp.get_context("spawn")
    queue = ctx.Queue()
    child = ctx.Process(target=train_main, args=(settings, queue), name="trainer")
    child.start()
    history = []
    while True:
        message = queue.get()
        if message is None:
            break
        history.append(message)
        print(f"epoch {message['epoch']} train {message['train']:.4f} val {message['val']:.4f}", flush=True)
    child.join()

    status = {"exit": child.exitcode, "history": history}
    (HERE / settings.out / "status.json").write_text(json.dumps(status, indent=1))
    if child.exitcode:
        print(f"trainer ended with code {child.exitcode}", file=sys.stderr)
    sys.exit(child.exitcode)


if __name__ == "__main__":
    main()
