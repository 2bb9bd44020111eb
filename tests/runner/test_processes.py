"""Training in several processes: one report, on the rank where it began."""

from __future__ import annotations

import json

import pytest

GROUP = """
    import os, sys, tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp

    def train(rank, method):
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(5):
            loss = model(torch.ones(3, 2)).pow(2).mean()
            if rank == 1 and step == 2:
                loss = loss * torch.log(loss.detach() * 0 - 1)
            optimizer.zero_grad()
            loss.backward()
            for p in model.parameters():
                dist.all_reduce(p.grad)
            optimizer.step()
        print("not reached by a waiting rank")

    def worker(rank, method, path):
        dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=2)
        train(rank, method)

    if __name__ == "__main__":
        method = sys.argv[1]
        if method == "torchrun":
            dist.init_process_group("gloo")
            train(dist.get_rank(), method)
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "meeting")
            if method == "mp.spawn":
                mp.spawn(worker, (method, path), nprocs=2)
            else:
                context = mp.get_context(method)
                children = [
                    context.Process(target=worker, args=(rank, method, path)) for rank in range(2)
                ]
                for child in children: child.start()
                for child in children: child.join()
                print(sorted(child.exitcode for child in children))
"""
LINE = 10


def test_forked_ranks_are_stopped_together_and_traced_again(scripts):
    scripts.write(GROUP)
    options = ["--json", "out.json", "--again", "never"]
    done = scripts.warm("train.py", "fork", options=options)
    assert (done.code, done.out) == (3, b"[-15, 3]\n"), done.err.decode()
    assert b"Traceback" not in done.err
    assert done.ours[0].startswith("step 2, rank 1: loss is NaN")
    assert done.ours[0].endswith("ending the run.")
    assert done.ours[1].startswith("running the script again")
    assert done.ours[2] == "the script was stopped at step 2; exit code 3."
    (incident,) = scripts.result()["incidents"]
    assert (incident["step"], incident["rank"]) == (2, 1)
    assert (incident["origin"]["exact"], incident["origin"]["line"]) == (True, LINE)


def test_spawned_ranks_end_without_the_words_of_the_machinery(scripts):
    scripts.write(GROUP)
    options = ["--json", "out.json", "--second-run", "never"]
    done = scripts.warm("train.py", "mp.spawn", options=options)
    assert (done.code, done.out) == (3, b""), done.err.decode()
    assert b"Traceback" not in done.err
    assert b"ProcessRaisedException" not in done.err
    assert scripts.result()["incidents"][0]["rank"] == 1


def test_ranks_of_torchrun_are_watched(scripts):
    scripts.write(GROUP)
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py", "torchrun"]
    options = ["--json", "out.json", "--second-run", "never"]
    done = scripts.warm(*words, options=options)
    assert (done.code, done.out) == (3, b""), done.err.decode()
    assert b"ChildFailedError" not in done.err
    assert done.ours[-1] == "the script was stopped at step 2; exit code 3."
    (incident,) = scripts.result()["incidents"]
    assert (incident["rank"], incident["origin"] and incident["origin"]["file"]) in [
        (1, "train.py"),
        (1, None),
    ]


def test_torchrun_of_watched_ranks_speaks_once(scripts):
    scripts.write(GROUP)
    run = ["-m", "stayfinite", "run", "--json", "out.json", "--trace", "train.py", "torchrun"]
    done = scripts.alone("-m", "torch.distributed.run", "--nproc-per-node", "2", *run)
    assert done.code == 1
    assert done.ours == ["the script was stopped at step 2; exit code 3."]
    (incident,) = scripts.result()["incidents"]
    assert (incident["rank"], incident["origin"]["line"]) == (1, LINE)


POOL = """
    import sys, torch
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    def train(seed):
        w = torch.zeros(1, requires_grad=True)
        (w * 0 + (0.5 if seed else 0)).log().sum().backward()
        return seed

    if __name__ == "__main__":
        with ProcessPoolExecutor(1, mp_context=get_context(sys.argv[1])) as pool:
            print(pool.submit(train, 1).result(), flush=True)
            pool.submit(train, 0).result()
"""


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_stop_in_a_pool_is_the_stop_of_the_run(scripts, method):
    scripts.write(POOL)
    options = ["--json", "out.json", "--second-run", "never"]
    done = scripts.warm("train.py", method, options=options)
    assert (done.code, done.out) == (3, b"1\n"), done.err.decode()
    assert b"Traceback" not in done.err
    assert json.loads((scripts.folder / "out.json").read_text())["incidents"]
