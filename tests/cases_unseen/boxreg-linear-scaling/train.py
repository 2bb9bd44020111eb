"""Box regression on synthetic scenes; the schedule was copied from an 8-GPU recipe."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(1)
torch.set_num_threads(1)
IMG = 48


def scenes(n, g):
    img = 0.2 * torch.randn(n, 3, IMG, IMG, generator=g)
    boxes = torch.zeros(n, 4)
    for i in range(n):
        w, h = (torch.rand(2, generator=g) * 16 + 8).tolist()
        x = torch.rand(1, generator=g).item() * (IMG - w)
        y = torch.rand(1, generator=g).item() * (IMG - h)
        img[i, :, int(y):int(y + h), int(x):int(x + w)] += 1.0
        boxes[i] = torch.tensor([x + w / 2, y + h / 2, w, h])
    return img, boxes / 4.0


class ResBlock(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.conv1 = nn.Conv2d(cin, cout, 3, 2, 1)
        self.conv2 = nn.Conv2d(cout, cout, 3, 1, 1)
        self.skip = nn.Conv2d(cin, cout, 1, 2)

    def forward(self, x):
        return F.relu(self.skip(x) + self.conv2(F.relu(self.conv1(x))))


class BoxNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(ResBlock(3, 16), ResBlock(16, 32), ResBlock(32, 32))
        self.fc = nn.Linear(32 * 36, 128)
        self.box = nn.Linear(128, 4)
        self.obj = nn.Linear(128, 1)

    def forward(self, img):
        h = F.relu(self.fc(self.backbone(img).flatten(1)))
        return self.box(h), self.obj(h).squeeze(1)


def main():
    g = torch.Generator().manual_seed(2)
    net = BoxNet()
    base_lr = 0.02
    opt = torch.optim.SGD(net.parameters(), lr=base_lr, momentum=0.9, weight_decay=1e-4)
    for step in range(50):
        img, boxes = scenes(4, g)
        pred, obj = net(img)
        loss = F.mse_loss(pred, boxes) + 0.1 * F.binary_cross_entropy_with_logits(obj, torch.ones_like(obj))
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4g}")


main()
