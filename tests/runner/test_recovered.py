"""What is told of a script whose bad steps were undone."""

from __future__ import annotations

SPIKES = """
    import torch
    from torch import nn
    from torch.nn import functional as F

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    for step in range(20):
        x = torch.rand(16, 4) * (1e6 if step in (3, 18) else 1.0)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(net(x).float(), torch.ones(16, 1))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    print(all(bool(t.isfinite().all()) for t in net.state_dict().values()))
"""


def test_words_are_those_of_a_run_that_went_on(scripts) -> None:
    scripts.write(SPIKES)
    options = ["--on-nan", "recover", "--json", "out.json", "--prove", "0", "--again", "never"]
    done = scripts.warm("train.py", options=options)
    assert done.out == b"True\n"
    first, later = scripts.result()["incidents"]
    assert (first["step"], first["diagnosis"]["cause"]) == (3, "bn_stats_poisoned")
    assert "they were put back with the step" in first["diagnosis"]["why"]
    assert "reset the running statistics" not in first["diagnosis"]["fix"]
    assert (later["step"], later["diagnosis"]["cause"]) == (18, "bn_stats_poisoned")
    assert later["origin"]["line"] == first["origin"]["line"]
    assert (later["origin"]["exact"], later["diagnosis"]["confidence"]) == (False, "possible")
    assert "went bad as at step 3" in later["diagnosis"]["why"]
