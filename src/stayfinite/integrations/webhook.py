"""A JSON POST for each incident and forecast: Slack, pagers, and whatever listens."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

from stayfinite.errors import ConfigError
from stayfinite.files import Background
from stayfinite.records import Forecast, Incident, to_data
from stayfinite.report.alerts import Alert
from stayfinite.report.terminal import as_text
from stayfinite.text import forecast_line, headline

_PAUSES = (1.0, 5.0, 25.0)


class WebhookSink:
    """Posts `{"text": ..., "incident": ...}` or `{"text": ..., "forecast": ...}`.

    The text is what Slack shows. It is sent from a thread of its own and tried again after 1, 5 and
    25 seconds; training never waits. `headers` are sent along. `body` makes another object of an
    incident; forecasts are then not sent, unless the sink is the receiver of an AlertRule, whose
    Alert `body` is given instead.
    """

    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: Callable[[Any], Any] | None = None,
        timeout: float = 10.0,
        pauses: tuple[float, ...] = _PAUSES,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(
                f"the webhook's url is {url!r}; it must begin with http:// or https://."
            )
        self._url, self._timeout = url, timeout
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        self._body = body
        self._background = Background("the webhook", pauses=pauses)

    def __call__(self, incident: Incident) -> None:
        self._post(_slack(incident) if self._body is None else self._body(incident))

    def on_forecast(self, forecast: Forecast) -> None:
        if self._body is None:
            text = f"stayfinite: {forecast_line(forecast)}"
            self._post({"text": text, "forecast": to_data(forecast)})

    def on_alert(self, alert: Alert) -> None:
        """Of an AlertRule; the fields are those of the Alert, less what is None."""
        if self._body is not None:
            self._post(self._body(alert))
            return
        given = {name: value for name, value in to_data(alert).items() if value is not None}
        self._post({"text": f"stayfinite: {alert.text}", **given})

    def _post(self, body: Any) -> None:
        data = json.dumps(body).encode()
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
    return {"text": text, "incident": to_data(incident)}
