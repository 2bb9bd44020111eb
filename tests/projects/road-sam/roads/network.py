"""A synthetic road network with sparse speed sensors, cut into district subgraphs."""
from pathlib import Path

import numpy as np
import torch


def build(n, rng):
    xy = rng.random((n, 2))
    d = ((xy[:, None] - xy[None]) ** 2).sum(-1)
    np.fill_diagonal(d, np.inf)
    near = np.argsort(d, axis=1)[:, :4]
    src = np.repeat(np.arange(n), 4)
    dst = near.reshape(-1)
    edges = np.unique(np.sort(np.stack([src, dst], 1), axis=1), axis=0)
    return xy, np.concatenate([edges, edges[:, ::-1]])


def prepare(root, n, districts, seed):
    root = Path(root)
    path = root / "roads.pt"
    if path.exists():
        return torch.load(path)
    root.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    xy, edges = build(n, rng)
    lanes = rng.integers(1, 5, n)
    limit = rng.choice([30.0, 50.0, 70.0, 100.0], n)
    degree = np.bincount(edges[:, 0], minlength=n)
    centre = np.exp(-6 * ((xy - 0.5) ** 2).sum(1))
    speed = limit * (1 - 0.6 * centre) + 3 * lanes - 1.5 * degree + rng.normal(0, 2, n)
    # sensors stand mostly downtown
    has_sensor = rng.random(n) < 0.07 + 0.4 * centre
    side = int(districts ** 0.5)
    cell = np.minimum((xy * side).astype(int), side - 1)
    graph = {
        "x": torch.tensor(np.column_stack([xy, lanes, limit / 50, degree]), dtype=torch.float32),
        "y": torch.tensor((speed - speed.mean()) / speed.std(), dtype=torch.float32),
        "edges": torch.tensor(edges.T.copy()),
        "sensor": torch.tensor(has_sensor),
        "district": torch.tensor(cell[:, 0] * side + cell[:, 1]),
    }
    torch.save(graph, path)
    return graph


def subgraph(graph, districts):
    """Nodes of the given districts with the edges among them."""
    keep = torch.isin(graph["district"], districts)
    index = torch.full((len(keep),), -1)
    index[keep] = torch.arange(int(keep.sum()))
    e = graph["edges"]
    e = index[e[:, keep[e[0]] & keep[e[1]]]]
    return {"x": graph["x"][keep], "y": graph["y"][keep], "sensor": graph["sensor"][keep], "edges": e}
