"""Endless stream of 12x12 glyphs: bars, crosses and boxes with jitter."""
import torch

SIZE = 12


def draw(kind, g):
    img = torch.full((SIZE, SIZE), -1.0)
    a, b = (int(v) for v in torch.randint(2, 5, (2,), generator=g))
    if kind == 0:
        img[a:a + 6, 5:7] = 1.0
    elif kind == 1:
        img[5:7, b:b + 6] = 1.0
    elif kind == 2:
        img[a:a + 6, 5:7] = 1.0
        img[5:7, b:b + 6] = 1.0
    else:
        img[a - 1:a + 6, b - 1:b + 6] = 1.0
        img[a + 1:a + 4, b + 1:b + 4] = -1.0
    return img


def stream(batch, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        kinds = torch.randint(0, 4, (batch,), generator=g).tolist()
        x = torch.stack([draw(k, g) for k in kinds])[:, None]
        yield x + 0.02 * torch.randn(x.shape, generator=g)
