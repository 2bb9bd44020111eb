"""A script run inside stayfinite.watch: `python watch_around.py MODE RESULT train.py`.

Every optimizer is watched, with the smallest module that has its parameters, from the first call of
a module on: where a user would write the line. One that another optimizer has inside is left to
that. What was found is written to RESULT at the end.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import sys
from typing import Any

from torch import nn
from torch.optim import Optimizer

import stayfinite
from stayfinite.records import to_json

guards: list[stayfinite.Guard] = []
new: list[Optimizer] = []
_init, _call = Optimizer.__init__, nn.Module.__call__


def model_of(optimizer: Optimizer) -> nn.Module:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    ours = set(map(id, params))
    modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    found = [m for m in modules if ours <= set(map(id, m.parameters()))]
    alone = nn.ParameterList(params)
    return min(found, key=lambda m: len(list(m.parameters())), default=alone)


def watch_from_the_next_call(mode: Any) -> None:
    def init(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        _init(self, *args, **kwargs)
        new.append(self)
        nn.Module.__call__ = call  # type: ignore[method-assign]

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nn.Module.__call__ = _call  # type: ignore[method-assign]
        inside = [each for outer in new for each in vars(outer).values()]
        outermost = [each for each in new if not any(each is one for one in inside)]
        new.clear()
        for optimizer in outermost:
            guards.append(stayfinite.watch(model_of(optimizer), optimizer, on_nan=mode, sinks=[]))
        return _call(self, *args, **kwargs)

    Optimizer.__init__ = init  # type: ignore[method-assign]


def main() -> None:
    mode, result, script = sys.argv[1:4]
    sys.argv[:] = sys.argv[3:]
    sys.path.insert(0, os.getcwd())
    watch_from_the_next_call(mode)
    try:
        runpy.run_path(script, run_name="__main__")
    except BaseException as error:
        for guard in guards:
            guard.__exit__(type(error), error, error.__traceback__)
    found = sorted((i for g in guards for i in g.incidents), key=lambda incident: incident.step)
    with open(result, "w") as file:
        json.dump([json.loads(to_json(incident)) for incident in found], file)


if __name__ == "__main__":
    main()
