"""Ranks that torchrun starts by command line."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from stayfinite.runner.aside import step_aside
from stayfinite.runner.imports import after_import
from stayfinite.runner.plan import VARIABLE, child_command
from stayfinite.runner.watch import Watch

_HANDLER = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"


def watch_launcher(watch: Watch) -> None:
    """Have the ranks watched if this process turns out to be torchrun."""

    def react(module: ModuleType) -> None:
        theirs = module.SubprocessHandler._popen

        def _popen(self: Any, args: tuple[str, ...], env: dict[str, str]) -> Any:
            with step_aside("watching a rank"):
                args, env = watched(args, env, watch)
            return theirs(self, args, env)

        module.SubprocessHandler._popen = _popen

    after_import(_HANDLER, react)


def watched(
    args: tuple[str, ...], env: dict[str, str], watch: Watch
) -> tuple[tuple[str, ...], dict[str, str]]:
    """The command and environment that run the same rank under watch; unchanged if not python."""
    if sys.executable not in args:
        return args, env
    at = args.index(sys.executable)
    flags, target = _split(list(args[at + 1 :]))
    if not target:
        return args, env
    command = child_command(target, key=rank_key(env), flags=flags)
    return (*args[:at], *command), {**env, VARIABLE: watch.plan.path}


def rank_key(env: Mapping[str, str]) -> str:
    """The key of the process that torchrun starts with these variables."""
    return f"rank-{env.get('RANK', '0')}-{env.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    flags = []
    while words and words[0].startswith("-") and words[0] not in ("-m", "-c"):
        flags.append(words.pop(0))
    return flags, [] if words[:1] == ["-c"] else words
