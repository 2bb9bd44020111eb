"""Bad values that are no data: buffers, and what a loop carries from step to step."""

import torch
from torch import nn

import stayfinite
from stayfinite.guard import Guard, GuardSettings


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        ratio = torch.linspace(1.0, 0.0, 5)
        self.register_buffer("weight", ratio / ratio.clamp(max=0.5))
        self.net = nn.Linear(2, 1)

    def forward(self, x, number):
        return self.net(x).square().mean() * self.weight[number]


def train(model, optimizer):
    for number in range(5):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 2), number)
        loss.backward()
        optimizer.step()


def test_a_buffer_that_was_bad_when_it_was_registered_has_that_line():
    guard = Guard(GuardSettings(on_nan="stop"))
    guard.attach()
    try:
        model = Weighted()
        train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    except stayfinite.TrainingAbortedError:
        pass
    finally:
        guard.close()
    (incident,) = guard.incidents
    assert incident.diagnosis.cause == "bad_buffer"
    assert "register_buffer" in incident.origin.code
    assert "weight of Weighted" in incident.diagnosis.why
    assert "[4]" in incident.diagnosis.why


def test_a_buffer_whose_beginning_was_not_seen_has_the_line_that_reads_it():
    model = Weighted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with stayfinite.watch(model, optimizer, sinks=[]) as guard:
        train(model, optimizer)
    (incident,) = guard.incidents
    assert incident.diagnosis.cause == "bad_buffer"
    assert "self.weight[number]" in incident.origin.code


def carry(update):
    cell, head = nn.GRUCell(2, 3), nn.Linear(3, 1)
    model = nn.ModuleList([cell, head])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    h, scale = torch.zeros(1, 3), torch.tensor(1.0)
    with stayfinite.watch(model, optimizer, sinks=[]) as guard:
        for _ in range(12):
            x = torch.ones(1, 2)
            h = cell(x * scale, h)
            optimizer.zero_grad()
            head(h).square().mean().backward()
            optimizer.step()
            h, scale = h.detach(), update(scale)
            if len(guard.incidents) == 1:
                break
    return guard.incidents[0]


def test_what_the_end_of_the_turn_before_made_bad_has_its_line():
    incident = carry(lambda scale: (scale - 0.3).sqrt())
    assert incident.diagnosis.cause == "sqrt_of_negative"
    assert "sqrt()" in incident.origin.code
    assert "`scale` bad" in incident.diagnosis.evidence[-1]


def test_a_carried_value_that_nothing_computed_is_called_by_its_name():
    counts = iter(range(100))
    incident = carry(lambda scale: scale if next(counts) < 4 else scale.new_tensor(float("nan")))
    assert incident.diagnosis.cause == "bad_carried_state"
    assert "`scale`" in incident.diagnosis.why


def test_a_batch_that_is_fetched_ahead_is_data():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [torch.full((1, 2), float("nan") if k == 3 else 1.0) for k in range(7)]
    x = batches[0]
    with stayfinite.watch(model, optimizer, sinks=[]) as guard:
        for k in range(6):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            x = batches[k + 1]
            loss.backward()
            optimizer.step()
    assert guard.incidents[0].diagnosis.cause == "bad_input_data"
