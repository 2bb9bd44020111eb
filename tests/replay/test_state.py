"""Bad values that are no data: buffers, and what a loop carries from step to step."""

import copy

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


class Average:
    """A teacher that follows its student, with a correction that is 0 at the first time."""

    def __init__(self, student, is_bad_at=3):
        self.teacher, self.student, self.calls = copy.deepcopy(student), student, -is_bad_at

    def follow(self):
        share = 0.9
        correction = 1 - share**self.calls if self.calls >= 0 else 1.0
        self.calls += 1
        with torch.no_grad():
            for mine, other in zip(
                self.teacher.parameters(), self.student.parameters(), strict=True
            ):
                mine.mul_(share).add_(other, alpha=1 - share)
                mine.div_(torch.tensor(correction))


def distil(on_nan):
    torch.manual_seed(0)
    student = nn.Linear(2, 2)
    average = Average(student)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    guard = Guard(GuardSettings(on_nan=on_nan))
    guard.attach()
    try:
        for _ in range(8):
            x = torch.randn(4, 2)
            loss = (student(x) - average.teacher(x)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            average.follow()
            if guard.incidents:
                break
    except stayfinite.TrainingAbortedError:
        pass
    finally:
        guard.close()
    return guard.incidents[0], average.teacher


def test_an_average_that_the_end_of_the_turn_before_made_bad_has_its_line():
    incident, teacher = distil("stop")
    assert incident.diagnosis.cause == "division_by_zero"
    assert "mine.div_(" in incident.origin.code
    assert "small values in the place of the bad ones" in incident.diagnosis.evidence[-1]
    assert "`torch.tensor(correction)` in" in incident.diagnosis.why
    assert not torch.isfinite(teacher.weight).any()  # as it was: the small values were for a look


def test_an_average_that_was_bad_at_the_start_is_not_blamed_on_the_turn_before():
    student = nn.Linear(2, 2)
    average = Average(student, is_bad_at=100)
    with torch.no_grad():
        average.teacher.weight[0, 0] = float("nan")
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    seen = []
    with stayfinite.watch(student, optimizer, on_nan="recover", sinks=[seen.append]):
        for step in range(3):
            x = torch.randn(4, 2)
            out = student(x) - (average.teacher(x) if step == 2 else 0)
            optimizer.zero_grad()
            out.square().mean().backward()
            optimizer.step()
            average.follow()
    assert "average.teacher(x)" in seen[0].origin.code
    assert seen[0].diagnosis.cause in ("bad_init", "unknown")
