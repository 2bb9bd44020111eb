"""Takes the pictures of the dashboard and of the report anew, from runs that it makes.

    python docs/pictures.py

Writes docs/images/ui-light.png, ui-dark.png and report.png. Needs Chromium, the extra `ui` and
playwright.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
DEMO = ROOT / "examples" / "demo" / "train.py"
BAD, GOOD = "torch.sqrt(frames.var(dim=2))", "torch.sqrt(frames.var(dim=2) + 1e-8)"
WIDE = {"width": 1280, "height": 1180}
TALL = {"width": 1100, "height": 1250}


def main() -> None:
    with tempfile.TemporaryDirectory() as name, sync_playwright() as driver:
        folder = Path(name)
        text = DEMO.read_text(encoding="utf-8")
        (folder / "train_fixed.py").write_text(text.replace(BAD, GOOD), encoding="utf-8")
        (folder / "train.py").write_text(text, encoding="utf-8")
        for script in ("train_fixed.py", "train.py"):
            stayfinite(folder, "run", "--on-nan", "recover", script)
        newest = max((folder / "stayfinite-runs").iterdir())
        stayfinite(folder, "html", str(newest), "--output", "report.html")
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        with served(folder) as address:
            take(browser, address, "ui-light.png", viewport=WIDE, color_scheme="light")
            take(browser, address, "ui-dark.png", viewport=WIDE, color_scheme="dark", ticks=1)
        page = (folder / "report.html").as_uri()
        take(browser, page, "report.png", viewport=TALL, color_scheme="light")
        browser.close()


def stayfinite(folder: Path, *words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "stayfinite", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode not in (0, 3):
        raise SystemExit(done.stderr)


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The dashboard of the folder's runs; its address."""
    server = subprocess.Popen(
        [sys.executable, "-m", "stayfinite", "ui", "--no-open"],
        cwd=folder,
        env={**os.environ, "XDG_STATE_HOME": str(folder / "state")},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    try:
        yield server.stdout.readline().split()[-1]
    finally:
        server.terminate()
        server.wait()


def take(browser: Any, address: str, name: str, *, ticks: int = 0, **context: Any) -> None:
    """A picture of the page; of a dashboard, with so many more runs ticked."""
    opened = browser.new_context(**context)
    page = opened.new_page()
    page.goto(address)
    if address.startswith("http"):
        page.wait_for_selector("#heat canvas")
        for at in range(ticks):
            page.locator("#runs input").nth(at + 1).check()
        time.sleep(2.5)  # until the curves of all are there
    page.screenshot(path=str(IMAGES / name))
    opened.close()
    print(f"docs/images/{name} was taken")


if __name__ == "__main__":
    main()
