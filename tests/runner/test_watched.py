"""Scripts that train, watched in real processes."""

from __future__ import annotations

import json

TRAIN = """
    import os, sys, torch
    how = sys.argv[1]

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)
        def forward(self, x):
            return self.layer(x)

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train():
        for step in range(6):
            x = torch.rand(3, 2)
            loss = model(x).pow(2).mean()
            if how != "healthy" and step == 3:
                loss = loss * torch.log(loss.detach() * 0 - 1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"{model.layer.weight.sum().item():.6f}")

    if how == "swallow":
        try:
            train()
        except Exception as error:
            print("swallowed", type(error).__name__)
            sys.exit(0)
    elif how == "sudden":
        with open("result.bin", "wb") as file: file.write(b"x")
        try:
            train()
        finally:
            print("unwound", flush=True)
            os._exit(0)
    elif how == "thread":
        import threading
        thread = threading.Thread(target=train); thread.start(); thread.join()
    elif how == "own error":
        torch.ones(1).backward()
    else:
        train()
"""


def run(scripts, how, *options, start=None):
    scripts.write(TRAIN)
    start = start or scripts.watched
    return start("train.py", how, options=["--json", "out.json", *options])


def test_healthy_run_ends_with_one_line(scripts):
    done = run(scripts, "healthy")
    assert done.code == 0
    assert done.err == b"stayfinite: 6 steps checked, all finite.\n"
    assert scripts.result() == {
        "schema": 1,
        "incidents": [],
        "skipped_by_scaler": 0,
        "steps": 6,
        "exit": "finite",
    }


def test_incident_is_stopped_run_again_and_explained(scripts):
    done = run(scripts, "bad", "--again", "never")
    assert done.code == 3
    assert done.out == b""
    assert b"Traceback" not in done.err
    assert done.ours[0].startswith("running the script again")
    assert done.ours[-1] == "the script was stopped at step 3; exit code 3."
    assert b"train.py:20" in done.err
    result = scripts.result()
    assert result["exit"] == "incident"
    (incident,) = result["incidents"]
    assert (incident["step"], incident["rank"]) == (3, 0)
    assert incident["origin"]["exact"] is True
    assert (incident["origin"]["file"], incident["origin"]["line"]) == ("train.py", 20)
    assert "Not deterministic" not in str(incident)
    assert not list(scripts.temporary.glob("stayfinite*"))


def test_swallowed_stop_still_gives_our_exit_code(scripts):
    done = run(scripts, "swallow", "--trace", start=scripts.warm)
    assert (done.code, done.out) == (3, b"swallowed TrainingAbortedError\n")
    assert len(done.ours) == 1
    assert scripts.result()["incidents"][0]["origin"]["line"] == 20


def test_sudden_exit_loses_nothing_and_what_it_wrote_is_no_obstacle(scripts):
    done = run(scripts, "sudden", "--again", "never", start=scripts.warm)
    assert (done.code, done.out) == (3, b"unwound\n")
    assert done.ours[0].startswith("running the script again")
    result = scripts.result()
    assert result["exit"] == "incident"
    assert result["incidents"][0]["origin"]["exact"] is True


def test_stop_inside_a_thread_is_no_crash_of_the_thread(scripts):
    done = run(scripts, "thread", "--second-run", "never", start=scripts.warm)
    assert (done.code, done.out) == (3, b"")
    assert b"Traceback" not in done.err
    assert b"TrainingAbortedError" not in done.err


def test_warning_of_many_bad_steps_is_one_report_and_one_line(scripts):
    scripts.write(
        """
        import torch
        net = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for step in range(40):
            x = torch.full((4, 3), float(step != 5))
            loss = (net(x) - x.sum(-1, keepdim=True).log()).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        """
    )
    options = ("--on-nan", "warn", "--second-run", "never", "--json", "out.json")
    done = scripts.warm("train.py", options=options)
    err = done.err.decode()
    assert err.count("error[") == 1, err
    assert done.ours[-1] == "35 incidents in 40 steps; the script went on (--on-nan warn)."
    causes = {each["diagnosis"]["cause"] for each in scripts.result()["incidents"]}
    assert causes == {"log_of_zero"}


def test_warning_leaves_the_script_alone(scripts):
    options = ("--on-nan", "warn", "--second-run", "never", "--again", "never")
    done = run(scripts, "bad", *options, start=scripts.warm)
    assert done.code == 0
    assert done.out == b"nan\n"
    assert done.ours[0].startswith("step 3: loss is NaN")
    assert done.ours[0].endswith("; the script goes on.")
    assert "--second-run always train.py bad" in done.ours[-3]
    assert done.ours[-2] == "At the end parameter layer.weight and 1 more tensor are not finite."
    assert done.ours[-1].endswith("in 6 steps; the script went on (--on-nan warn).")
    assert scripts.result()["incidents"][0]["step"] == 3


def test_own_error_of_a_script_keeps_its_words_and_code(scripts):
    done = run(scripts, "own error", start=scripts.warm)
    plain = scripts.alone("train.py", "own error")
    assert done.seen == plain.seen
    assert scripts.result()["exit"] == "script-error"


def test_broken_guard_never_breaks_the_run(scripts):
    scripts.write(TRAIN)
    broken = "import sys, types; sys.modules['stayfinite.guard'] = types.ModuleType('broken')"
    done = scripts.warm("train.py", "bad", first=broken)
    assert (done.code, done.out) == (0, b"nan\n")
    assert done.ours[0].startswith("attaching to torch failed (ImportError: ")


LOADER = """
    import torch
    from torch.utils.data import DataLoader, Dataset
    class Numbers(Dataset):
        def __len__(self): return 8
        def __getitem__(self, i):
            w = torch.zeros(1, requires_grad=True)
            (w * float("nan") if i else w).sum().backward()
            return torch.ones(2)
    if __name__ == "__main__":
        model = torch.nn.Linear(2, 1); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for context in ("fork", "spawn"):
            for x in DataLoader(Numbers(), batch_size=4, num_workers=1,
                                multiprocessing_context=context):
                optimizer.zero_grad(); model(x).sum().backward(); optimizer.step()
        print("done")
"""


def test_workers_of_a_data_loader_never_report(scripts):
    scripts.write(LOADER)
    done = scripts.warm("train.py")
    assert (done.code, done.out) == (0, b"done\n"), done.err.decode()
    assert done.ours == ["4 steps checked, all finite."]


def test_result_is_current_when_the_process_is_killed(scripts):
    scripts.write(
        """
        import os, signal, torch
        w = torch.zeros(1, requires_grad=True)
        try:
            (w.log() * 0).sum().backward()
        except Exception:
            os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    done = scripts.warm("train.py", options=["--json", "out.json"])
    assert done.code == -9
    result = json.loads((scripts.folder / "out.json").read_text())
    assert (result["exit"], len(result["incidents"])) == ("incident", 1)


def test_trackers_that_the_script_uses_are_told(scripts):
    scripts.write(
        """
        import prometheus_client, torch
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(6):
            optimizer.zero_grad()
            model(torch.log(torch.full((3, 2), -1.0 if step == 3 else 1.0))).sum().backward()
            optimizer.step()
        labels = {"cause": "log_of_negative", "strategy": "skip"}
        print(prometheus_client.REGISTRY.get_sample_value("stayfinite_incidents_total", labels))
        """
    )
    done = scripts.warm("train.py", options=["--on-nan", "recover"])
    assert done.out.decode().split() == ["1.0"]


def test_trackers_are_told_of_forecasts_and_the_report_says_how_long_before(scripts):
    scripts.write(
        """
        import prometheus_client, torch

        class Score(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.words = torch.nn.Embedding(24, 16)

            def forward(self, a, b):
                with torch.autocast("cpu", dtype=torch.float16):
                    return self.words(a) @ self.words(b).T

        torch.manual_seed(0)
        model = Score()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        for step in range(300):
            optimizer.zero_grad()
            a = torch.randint(24, (32,))
            loss = -model(a, (a + 1) % 24).diagonal().float().mean()
            if not torch.isfinite(loss):
                names = [m.name for m in prometheus_client.REGISTRY.collect() if m.samples]
                print("stayfinite_forecasts" in names)
            loss.backward()
            optimizer.step()
        """
    )
    done = scripts.warm("train.py", options=["--forecast", "--second-run", "never"])
    assert done.code == 3
    assert done.out.decode().split() == ["True"]
    assert "steps before:" in done.err.decode()
