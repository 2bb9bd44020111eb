"""Query-based segmentation with windowed attention; reports the mean IoU over the classes of the batch."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(31)
torch.set_num_threads(1)

CLASSES, SIZE, DIM = 5, 16, 24


class WindowAttention(nn.Module):
    """Each position sees its neighbours up to `radius`."""

    def __init__(self, dim, radius=3):
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)
        pos = torch.stack(torch.meshgrid(torch.arange(8), torch.arange(8), indexing="ij"), -1).view(-1, 2)
        near = (pos[:, None] - pos[None]).abs().amax(dim=-1) <= radius
        self.register_buffer("bias", near.float().log())

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        att = (q @ k.transpose(1, 2)) / x.shape[-1] ** 0.5 + self.bias
        return x + att.softmax(dim=-1) @ v


class Segmenter(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, DIM, 2, stride=2)
        self.attn = WindowAttention(DIM)
        self.head = nn.ConvTranspose2d(DIM, CLASSES, 2, stride=2)

    def forward(self, img):
        f = self.patch(img)
        h = self.attn(f.flatten(2).transpose(1, 2)).transpose(1, 2).reshape_as(f)
        return self.head(F.gelu(h))


@torch.no_grad()
def class_iou(logits, target):
    pred = F.one_hot(logits.argmax(1), CLASSES)
    true = F.one_hot(target, CLASSES)
    inter = (pred * true).sum(dim=(0, 1, 2)).float()
    union = ((pred + true) > 0).sum(dim=(0, 1, 2)).float()
    return inter / union


def scenes(gen, present, n=6):
    target = torch.zeros(n, SIZE, SIZE, dtype=torch.long)
    for i in range(n):
        for c in present:
            r, q = torch.randint(0, SIZE - 6, (2,), generator=gen).tolist()
            target[i, r:r + 6, q:q + 6] = c
    colour = torch.linspace(-1, 1, CLASSES)[target]
    img = torch.stack([colour, colour ** 2, -colour], dim=1)
    return img + 0.15 * torch.randn(img.shape, generator=gen), target


def main():
    gen = torch.Generator().manual_seed(7)
    model = Segmenter()
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
    best = torch.tensor(float("inf"))
    history = torch.full((45, CLASSES), float("nan"))
    for step in range(45):
        present = [1, 2, 3, 4] if step < 9 else torch.randperm(4, generator=gen)[:2].add(1).tolist()
        img, target = scenes(gen, present)
        logits = model(img)
        loss = F.cross_entropy(logits, target)
        opt.zero_grad()
        loss.backward()
        opt.step()
        history[step] = class_iou(logits, target)
        best = torch.minimum(best, loss.detach())
        print(f"step {step} loss {loss.item():.4f} mIoU {history[step].nanmean().item():.3f} best {best.item():.4f}")


main()
