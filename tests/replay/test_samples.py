"""A sample that a dataset makes bad is read again, and its line found there."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import stayfinite

pytestmark = pytest.mark.filterwarnings("ignore:divide by zero")


class Gamma(Dataset):
    """A random transform, as augmentations are."""

    def __init__(self):
        self.x = torch.linspace(1.0, -0.4, 24).reshape(12, 2)
        self.reads = 0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        self.reads += 1
        x = self.x[index]
        if random.random() < 0.5:
            x = x**0.5
        return x, x.nan_to_num().sum()


class Logs(Dataset):
    """NumPy makes it bad, and no operation of torch."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        counts = np.arange(4.0) + (1.0 if index != 7 else 0.0)
        features = np.log(counts)
        return torch.from_numpy(features).float()


def train(loader, on_nan="stop"):
    model = nn.LazyLinear(1)
    model(torch.ones(1, 2 if isinstance(loader.dataset, Gamma) else 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    try:
        with stayfinite.watch(model, optimizer, on_nan=on_nan, sinks=[]) as guard:
            for batch in loader:
                x = batch[0] if isinstance(batch, list) else batch
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
    except stayfinite.TrainingAbortedError:
        pass
    return guard


def test_the_transform_that_made_the_sample_bad_has_its_line():
    random.seed(3)
    guard = train(DataLoader(Gamma(), batch_size=2))
    incident = guard.incidents[0]
    assert incident.origin.code.strip() == "x = x**0.5"
    assert incident.origin.phase == "data"
    assert incident.diagnosis.cause == "pow_of_negative"
    assert "bit for bit" in incident.diagnosis.evidence[-1]


def test_reading_it_again_changes_nothing():
    found = []
    for again in ("auto", "never"):
        random.seed(3)
        torch.manual_seed(0)
        data = Gamma()
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with stayfinite.watch(model, optimizer, again=again, sinks=[]) as guard:
            for x, _ in DataLoader(data, batch_size=2):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
        assert guard.incidents
        state = random.getstate(), torch.get_rng_state().tolist()
        found.append((data.reads, state, model.weight.tolist()))
    assert found[0] == found[1]


def test_what_numpy_made_bad_has_the_line_where_it_was_reported():
    guard = train(DataLoader(Logs(), batch_size=3))
    incident = guard.incidents[0]
    assert incident.origin.code.strip() == "features = np.log(counts)"
    assert incident.origin.exact
    assert "divide by zero" in incident.diagnosis.why


def test_a_sample_of_a_worker_is_read_again_here():
    guard = train(DataLoader(Logs(), batch_size=3, num_workers=1))
    assert guard.incidents[0].origin.code.strip() == "features = np.log(counts)"


def test_data_that_were_bad_from_the_beginning_are_only_data():
    x = torch.ones(12, 4)
    x[7, 2] = float("nan")
    guard = train(DataLoader(x, batch_size=3))
    assert guard.incidents[0].diagnosis.cause == "bad_input_data"
    assert "model(x)" in guard.incidents[0].origin.code
