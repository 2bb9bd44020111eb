"""A JSON POST for each incident: Slack, pagers, and whatever listens."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

from stayfinite.errors import ConfigError
from stayfinite.files import Background
from stayfinite.records import Incident, to_json
from stayfinite.report.terminal import as_text
from stayfinite.text import headline

_PAUSES = (1.0, 5.0, 25.0)


class WebhookSink:
    """Posts `{"text": ..., "incident": ...}`, where text is what Slack shows.

    It is sent from a thread of its own and tried again after 1, 5 and 25 seconds; training never
    waits. `body` makes another object of an incident, `headers` are sent along.
    """

    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: Callable[[Incident], Any] | None = None,
        timeout: float = 10.0,
        pauses: tuple[float, ...] = _PAUSES,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(
                f"the webhook's url is {url!r}; it must begin with http:// or https://."
            )
        self._url, self._timeout = url, timeout
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        self._body = _slack if body is None else body
        self._background = Background("the webhook", pauses=pauses)

    def __call__(self, incident: Incident) -> None:
        data = json.dumps(self._body(incident)).encode()
        request = urllib.request.Request(self._url, data, self._headers, method="POST")

        def post() -> None:
            with urllib.request.urlopen(request, timeout=self._timeout):
                pass

        self._background.run(post)

    def flush(self, timeout: float = 5.0) -> bool:
        """Wait until all is sent or given up, at most so many seconds; whether it is."""
        return self._background.flush(timeout)


def _slack(incident: Incident) -> dict[str, Any]:
    text = f"stayfinite: {headline(incident)}\n```\n{as_text(incident)}\n```"
    return {"text": text, "incident": json.loads(to_json(incident))}
