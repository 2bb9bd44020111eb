"""TensorBoard: incidents as scalars, text, and a histogram of the guilty tensor; forecasts."""

from __future__ import annotations

from typing import Any

from stayfinite.integrations import check_package
from stayfinite.living import living
from stayfinite.records import Forecast, Incident, TensorSummary
from stayfinite.report.sinks import guilty_tensor
from stayfinite.report.terminal import as_text
from stayfinite.text import forecast_and_answer

check_package("tensorboard", extra="tensorboard")

from torch.utils.tensorboard import SummaryWriter  # noqa: E402


class TensorBoardSink:
    """Writes each incident at the step that it happened in, each forecast where it was made."""

    def __init__(self, writer: SummaryWriter) -> None:
        self.writer = writer
        self._count = self._forecasts = 0

    def __call__(self, incident: Incident) -> None:
        self._count += 1
        writer, step = self.writer, incident.step
        writer.add_scalar("stayfinite/incidents", self._count, step)
        writer.add_text("stayfinite/incident", f"```\n{as_text(incident)}\n```", step)
        guilty = guilty_tensor(incident)
        if guilty is not None:
            writer.add_scalar("stayfinite/bad_elements", guilty.bad_count, step)
            if guilty.histogram:
                self._add_histogram(guilty, step)
        writer.flush()

    def on_forecast(self, forecast: Forecast) -> None:
        self._forecasts += 1
        writer, step = self.writer, forecast.step
        writer.add_scalar("stayfinite/forecasts", self._forecasts, step)
        for name in ("steps_left", "steps_low", "steps_high"):
            if (value := getattr(forecast, name)) is not None:
                writer.add_scalar(f"stayfinite/{name}", value, step)
        writer.add_text("stayfinite/forecast", forecast_and_answer(forecast), step)
        writer.flush()

    def _add_histogram(self, tensor: TensorSummary, step: int) -> None:
        """Of its finite values."""
        count = sum(number for _, number in tensor.histogram)
        mean, std = tensor.mean or 0.0, tensor.std or 0.0
        self.writer.add_histogram_raw(
            "stayfinite/guilty tensor",
            min=tensor.min,
            max=tensor.max,
            num=count,
            sum=mean * count,
            sum_squares=(std * std + mean * mean) * count,
            bucket_limits=[limit for limit, _ in tensor.histogram],
            bucket_counts=[number for _, number in tensor.histogram],
            global_step=step,
        )


_sinks: dict[int, TensorBoardSink] = {}


def running() -> TensorBoardSink | None:
    """A sink for the writer that the script has opened last, if it is still open."""
    writers: list[Any] = living(SummaryWriter)
    open_ones = [writer for writer in writers if writer.all_writers]
    if not open_ones:
        return None
    writer = open_ones[-1]
    sink = _sinks.get(id(writer))
    if sink is None or sink.writer is not writer:
        sink = _sinks[id(writer)] = TensorBoardSink(writer)
    return sink
