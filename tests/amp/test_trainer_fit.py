"""fit, evaluate, callbacks and statistics."""

from __future__ import annotations

import io
import logging
import math
import random
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from training import (
    Batch,
    Heard,
    batches,
    by_hand,
    config,
    mse,
    raw,
    small_model,
    trainer_of,
)

from stayfinite.amp.epoch import Callback, LogEvent, ProgressBar
from stayfinite.amp.trainer import AMPTrainer
from stayfinite.errors import TrainingAbortedError


def loader_of(made: list[Batch]) -> DataLoader[Any]:
    return DataLoader(made, batch_size=None)  # type: ignore[arg-type]


class Augmenting(torch.utils.data.Dataset[Batch]):
    """Draws random numbers for each sample, as augmentation does."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Batch:
        x = torch.randn(4)
        return x, x.sum(0, keepdim=True)


@pytest.mark.parametrize("every", [1, 2])
def test_fit_is_the_plain_loop_by_bytes_also_in_its_random_numbers(every: int) -> None:
    plain, ours = small_model(), small_model()
    loader = DataLoader(Augmenting(), batch_size=6, shuffle=True)
    torch.manual_seed(7)
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.05)
    for _ in range(2):
        for number, (x, y) in enumerate(loader):
            if number % every == 0:
                optimizer.zero_grad()
            (mse(plain(x), y) / every).backward()
            if number % every == every - 1:
                optimizer.step()
    torch.manual_seed(7)
    with trainer_of(config(accumulate_grad_batches=every), ours) as trainer:
        trainer.fit(loader, epochs=2)
    assert raw(ours) == raw(plain)


def test_epochs_are_told_with_their_mean_loss() -> None:
    made = batches(5, bad=(1,))
    heard = Heard()
    with trainer_of(config(), nn.Linear(4, 1), callbacks=[heard]) as trainer:
        events = trainer.fit(loader_of(made[::-1]), epochs=2)
        assert trainer.epoch == 2
    assert heard.named("on_epoch") == events
    assert [(event.epoch, event.step, event.batches) for event in events] == [(0, 4, 5), (1, 8, 5)]
    assert [event.skipped_batches for event in events] == [1, 1]
    losses = [event.loss.item() for event in heard.named("on_step") if event.loss is not None]
    assert events[0].loss == pytest.approx(sum(losses[:4]) / 4)


def test_last_window_of_an_epoch_is_a_short_one() -> None:
    made = batches(5)
    plain, ours = small_model(), small_model()
    torch.manual_seed(7)
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.05)
    for window in (made[:3], made[3:]):
        optimizer.zero_grad()
        for x, y in window:
            (mse(plain(x), y) / len(window)).backward()
        optimizer.step()
    torch.manual_seed(7)
    with trainer_of(config(accumulate_grad_batches=3), ours) as trainer:
        trainer.fit(made)
        assert trainer.step == 2
    assert raw(ours) == raw(plain)


class Stream(IterableDataset[Batch]):
    """A DataLoader over it has a __len__ that raises."""

    def __iter__(self) -> Any:
        return iter(batches(5))


def test_window_goes_on_in_the_next_epoch_of_a_loader_without_length() -> None:
    plain, ours = small_model(), small_model()
    for model in (plain, ours):  # making a loader's iterator draws a random number too
        model[3].p = 0.0
    by_hand(plain, [*batches(5), *batches(5)][:9], every=3)
    with trainer_of(config(accumulate_grad_batches=3), ours) as trainer:
        trainer.fit(DataLoader(Stream(), batch_size=None), epochs=2)
        assert trainer.step == 3
    assert [p.tolist() for p in ours.parameters()] == [p.tolist() for p in plain.parameters()]


def test_evaluation_is_the_mean_over_samples_and_leaves_the_model_alone() -> None:
    model = small_model()
    model[3].eval()
    x, y = torch.randn(20, 4), torch.randn(20, 1)
    loader = DataLoader(TensorDataset(x, y), batch_size=8)  # 8, 8 and 4
    with trainer_of(config(), model) as trainer:
        before, flags = raw(model), [module.training for module in model.modules()]
        result = trainer.evaluate(loader)
        assert raw(model) == before
        assert [module.training for module in model.modules()] == flags
    with torch.no_grad():
        expected = mse(model.eval()(x), y).item()
    assert result.loss == pytest.approx(expected, rel=1e-5)
    assert (result.batches, result.samples, result.bad) == (3, 20, ())


def test_bad_batches_are_named_and_not_averaged_in() -> None:
    made = batches(6, bad=(1, 4))
    model = nn.Linear(4, 1)
    with trainer_of(config(), model) as trainer:
        result = trainer.evaluate(made)
        alone = trainer.evaluate([made[n] for n in (0, 2, 3, 5)])
    assert [report.location for report in result.bad] == ["batches.1.loss", "batches.4.loss"]
    assert result.loss == alone.loss
    assert (result.batches, result.samples) == (6, 32)


def test_terms_are_averaged_each_on_their_own() -> None:
    def terms(output: Tensor, target: Tensor) -> dict[str, Tensor]:
        loss = mse(output, target)
        return {"loss": loss, "half": loss / 2, "odd": loss * math.nan}

    with trainer_of(config(), nn.Linear(4, 1), loss_fn=terms) as trainer:
        result = trainer.evaluate(batches(2))
    assert result.terms == {"half": pytest.approx(result.loss / 2)}
    assert [report.location for report in result.bad] == [
        "batches.0.loss.odd",
        "batches.1.loss.odd",
    ]


def test_evaluation_of_nothing_is_nan() -> None:
    with trainer_of(config(), nn.Linear(4, 1)) as trainer:
        result = trainer.evaluate([])
        assert math.isnan(result.loss)
        assert result.batches == 0
        only_bad = trainer.evaluate(batches(1, bad=(0,)))
        assert math.isnan(only_bad.loss)
        assert only_bad.samples == 0


def test_another_model_can_be_evaluated() -> None:
    other = nn.Linear(4, 1)
    x, y = batches(1)[0]
    with trainer_of(config(), nn.Linear(4, 1)) as trainer:
        result = trainer.evaluate([(x, y)], model=other)
    assert result.loss == pytest.approx(mse(other(x), y).item())


@pytest.mark.parametrize("clip", [None, 0.5])
def test_statistics_are_those_of_the_gradients(clip: float | None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    made, heard = batches(6), Heard()
    given = config(log_every=3, gradient_clip_val=clip)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0625)
    seen: list[dict[str, float]] = []

    def keep(event: Any) -> None:
        grads = {n: p.grad.double().norm().item() for n, p in model.named_parameters()}
        seen.append(grads)

    watcher = type("Watcher", (), {"on_step": staticmethod(keep)})()
    with AMPTrainer(given, model, optimizer, mse, callbacks=[heard, watcher]) as trainer:
        for batch in made:
            trainer.training_step(batch)
    events: list[LogEvent] = heard.named("on_log")
    assert [event.step for event in events] == [3, 6]
    for event, after in zip(events, (seen[2], seen[5]), strict=True):
        norm_after = math.hypot(*after.values())
        assert event.norm_after_clipping == pytest.approx(norm_after)
        ratio = event.norm / event.norm_after_clipping
        assert event.norm_after_clipping <= (clip or math.inf) * (1 + 1e-6)
        assert dict(event.largest) == pytest.approx({n: v * ratio for n, v in after.items()})
        assert [v for _, v in event.largest] == sorted((v for _, v in event.largest), reverse=True)
        assert event.learning_rates == (0.0625,)
    if clip is None:
        assert all(event.norm == event.norm_after_clipping for event in events)
    else:
        assert any(event.norm > event.norm_after_clipping for event in events)


def test_each_term_of_the_loss_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def terms(output: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {"near": mse(output, target), "size": output.square().mean() * 0.1}

    heard = Heard()
    given = config("fp16", log_every=1, loss_scale=64.0, gradient_clip_val=1e-3)
    with (
        caplog.at_level(logging.INFO, "stayfinite"),
        trainer_of(given, nn.Linear(4, 1), loss_fn=terms, callbacks=[heard]) as trainer,
    ):
        trainer.training_step(batches(1)[0])
    (event,) = heard.named("on_log")
    assert set(event.terms) == {"near", "size"}
    assert event.loss == pytest.approx(sum(event.terms.values()), rel=1e-3)
    assert event.scale == 64.0
    line = caplog.records[-1].getMessage()
    assert line.startswith("step 1: loss ")
    for part in ("near", "size", "clipped to 0.001", "largest: weight", "lr 0.05", "scale 64"):
        assert part in line


def test_nothing_is_logged_when_log_every_is_0() -> None:
    heard = Heard()
    with trainer_of(config(log_every=0), nn.Linear(4, 1), callbacks=[heard]) as trainer:
        for batch in batches(3):
            trainer.training_step(batch)
    assert heard.named("on_log") == []


def test_callbacks_are_told_in_order_of_what_happened() -> None:
    heard = Heard()
    with trainer_of(config(log_every=2), nn.Linear(4, 1), callbacks=[heard]) as trainer:
        trainer.training_step(batches(1)[0])
        trainer.fit(batches(3, bad=(1,)))
    assert [name for name, _ in heard.events] == [
        "on_step",
        "on_log",
        "on_step",
        "on_nan",
        "on_recovery",
        "on_step",
        "on_step",
        "on_epoch",
    ]


def test_failing_callback_is_logged_once_and_training_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Failing(Callback):
        calls = 0

        def on_step(self, event: Any) -> None:
            self.calls += 1
            raise RuntimeError("of the callback's own")

    failing, heard = Failing(), Heard()
    with trainer_of(config(), nn.Linear(4, 1), callbacks=[failing, heard]) as trainer:
        trainer.fit(batches(4))
        assert trainer.step == 4
    assert failing.calls == 4
    assert len(heard.named("on_step")) == 4
    assert len([r for r in caplog.records if "callback" in r.getMessage()]) == 1


def test_callback_may_end_training_on_purpose() -> None:
    class Enough(Callback):
        def on_step(self, event: Any) -> None:
            if event.step == 2:
                raise TrainingAbortedError("enough")

    with trainer_of(config(), nn.Linear(4, 1), callbacks=[Enough()]) as trainer:
        with pytest.raises(TrainingAbortedError, match="enough"):
            trainer.fit(batches(4))
        assert trainer.step == 2


def test_nothing_is_printed_where_there_is_no_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    with trainer_of(config(), nn.Linear(4, 1)) as trainer:
        trainer.fit(batches(3, bad=(1,)))
    assert capfd.readouterr() == ("", "")


def test_terminal_shows_epoch_loss_and_skipped_batches() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120)
    before = random.getstate()
    with ProgressBar(epochs=2, console=console) as bar:
        bar.begin_epoch(0, 3)
        bar.advance(loss=torch.tensor(1.25), skipped=0)
        bar.advance(loss=None, skipped=1)
        bar.advance(loss=torch.tensor(0.5), skipped=1)
        bar.end_epoch(loss=torch.tensor(0.5), skipped=1)
    shown = screen.getvalue()
    assert random.getstate() == before
    for part in ("epoch 1/2", "3/3", "loss 0.5", "1 skipped"):
        assert part in shown
