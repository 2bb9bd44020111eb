"""What a process draws from the system is given back to its second run."""

from __future__ import annotations

import random
import sys
import types

from stayfinite.runner.seeds import Seeds

DRAWING = """
import sys
from stayfinite.runner.seeds import Seeds
seeds = Seeds(folder=sys.argv[1], repeat=sys.argv[2] or None, key=sys.argv[3])
seeds.install()
import random, numpy as np
print(random.random(), np.random.rand(), np.random.default_rng().random(), random.gauss(0, 1))
np.random.seed(); print(np.random.rand(), np.random.RandomState().rand())
if "torch" in sys.argv:
    import torch
    print(torch.rand(1).item(), torch.seed(), torch.rand(1).item(), torch.initial_seed())
"""


def draw(scripts, folder, repeat="", key="main", *more):
    (scripts.folder / folder).mkdir()
    done = scripts.plain("train.py", folder, repeat, key, *more)
    assert done.code == 0, done.err.decode()
    return done.out


def test_same_numbers_are_drawn_again(scripts):
    scripts.write(DRAWING)
    first = draw(scripts, "first")
    assert draw(scripts, "second", "first") == first
    assert draw(scripts, "third") != first
    assert draw(scripts, "other", "first", "Process-2") != first


def test_torch_reseeded_from_the_system_is_repeated(scripts):
    scripts.write(DRAWING)
    assert draw(scripts, "first", "", "main", "torch") == draw(
        scripts, "second", "first", "main", "torch"
    )


class Generator:
    def __init__(self, seed):
        self.seed = seed

    def initial_seed(self):
        return self.seed

    def manual_seed(self, seed):
        self.seed = seed


def test_generators_of_devices_are_repeated(tmp_path, monkeypatch):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    devices = types.SimpleNamespace(default_generators=[Generator(5), Generator(6)])
    monkeypatch.setitem(sys.modules, "torch.cuda", devices)
    Seeds(folder=str(tmp_path / "first"), repeat=None, key="main")._reseed_devices()
    devices.default_generators = [Generator(7), Generator(8)]
    state = random.getstate()
    again = Seeds(folder=str(tmp_path / "second"), repeat=str(tmp_path / "first"), key="main")
    again._reseed_devices()
    random.setstate(state)
    assert [generator.seed for generator in devices.default_generators] == [5, 6]


def test_broken_record_is_as_good_as_none(scripts):
    scripts.write(DRAWING)
    draw(scripts, "first")
    (scripts.folder / "first" / "seeds-main.json").write_text("{")
    draw(scripts, "second", "first")
