"""Work that runs ahead in threads, with the results in order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

Job = TypeVar("Job")
Result = TypeVar("Result")

MOST_THREADS = 4


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Operations on small pieces, not shared among torch's threads.

    Those wait for one another at every operation, which takes seconds on a busy machine.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def threads_for(size: int, *, at_least: int) -> int:
    """How many threads are worth starting for so many bytes; 0: none."""
    return 0 if size < at_least else min(MOST_THREADS, os.cpu_count() or 1)


def ahead(
    work: Callable[[Job], Result], jobs: Iterable[Job], threads: int
) -> Iterator[tuple[Job, Result]]:
    """Each job with its result, in the order of the jobs; at most 2 * threads run ahead."""
    if not threads:
        for job in jobs:
            yield job, work(job)
        return
    pending: deque[tuple[Job, Future[Result]]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for job in jobs:
            pending.append((job, pool.submit(work, job)))
            if len(pending) > 2 * threads:
                first, future = pending.popleft()
                yield first, future.result()
        while pending:
            first, future = pending.popleft()
            yield first, future.result()
