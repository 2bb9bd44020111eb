"""A watcher that can be asked what it has seen."""

from __future__ import annotations

from pathlib import Path

from stayfinite.explain.causes import CAUSES
from stayfinite.guard.watcher import Watcher
from stayfinite.report.html.notebook import GuardReport


class ReportingWatcher(Watcher):
    """Watches, and tells of it when it is asked."""

    def report(self) -> GuardReport:
        """The incidents so far, shown inline in a notebook and as text when printed."""
        folder = Path(self.settings.folder) if self.settings.folder else None
        return GuardReport(self.incidents, steps=self.steps, causes=CAUSES, folder=folder)
