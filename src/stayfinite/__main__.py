"""`python -m stayfinite`."""

from __future__ import annotations

from stayfinite.cli import main

main(prog_name="stayfinite")
