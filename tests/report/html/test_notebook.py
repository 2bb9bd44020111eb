"""guard.report(): text where it is printed, HTML where a notebook asks for it."""

from __future__ import annotations

import random

import torch

import stayfinite
from stayfinite.report.html.notebook import GuardReport


def trained(steps: int, *, bad: tuple[int, ...] = ()) -> GuardReport:
    """A guard's report after so many steps; the batches of bad steps hold a zero."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with stayfinite.watch(model, optimizer, on_nan="recover", sinks=[]) as guard:

        def step(batch: torch.Tensor) -> None:
            optimizer.zero_grad()
            (model(batch) + torch.log(batch).sum()).mean().backward()
            optimizer.step()

        for number in range(steps):
            guard.step(step, torch.full((2, 3), 0.0 if number in bad else 1.0))
        return guard.report()


def test_report_of_a_healthy_guard_is_one_line() -> None:
    report = trained(3)
    assert repr(report) == "3 steps, all finite"
    assert "3 steps, all finite" in report._repr_html_()


def test_report_tells_of_the_incidents() -> None:
    report = trained(4, bad=(2,))
    text, page = repr(report), report._repr_html_()
    assert text.startswith("1 incident in 4 steps\nerror[log_of_zero]: ")
    assert "torch.log(batch)" in text
    assert "<mark>torch.log(batch)</mark>" in page
    assert "Logarithm of zero" in page


def test_fragment_styles_nothing_but_itself() -> None:
    page = trained(1)._repr_html_()
    assert "<html" not in page
    style = page.partition("<style>")[2].partition("</style>")[0]
    rules = [line.strip() for line in style.splitlines() if line.rstrip().endswith(("{", "}"))]
    selectors = [rule.partition("{")[0] for rule in rules if "{" in rule and rule[0] != "@"]
    assert selectors
    for selector in ",".join(selectors).split(","):
        assert ".sf" in selector, selector


def test_asking_draws_no_random_number() -> None:
    report = trained(2, bad=(1,))
    state = random.getstate()
    repr(report)
    report._repr_html_()
    assert random.getstate() == state


def test_report_is_of_the_moment_it_was_asked_for() -> None:
    incidents: list[stayfinite.Incident] = []
    report = GuardReport(incidents, steps=1)
    incidents.append(stayfinite.Incident(step=1))
    assert repr(report) == "1 step, finite"
