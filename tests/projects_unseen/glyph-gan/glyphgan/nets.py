import torch
import torch.nn as nn

Z = 16


class Generator(nn.Module):
    def __init__(self, ch=16):
        super().__init__()
        self.ch = ch
        self.fc = nn.Linear(Z, ch * 9)
        self.up = nn.Sequential(
            nn.ReLU(), nn.Upsample(scale_factor=2), nn.Conv2d(ch, ch, 3, padding=1),
            nn.ReLU(), nn.Upsample(scale_factor=2), nn.Conv2d(ch, 1, 3, padding=1), nn.Tanh(),
        )

    def forward(self, z):
        return self.up(self.fc(z).view(-1, self.ch, 3, 3))


class Discriminator(nn.Module):
    def __init__(self, ch=24):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, ch, 3, stride=2, padding=1), nn.LeakyReLU(0.2),
            nn.Conv2d(ch, 2 * ch, 3, stride=2, padding=1), nn.LeakyReLU(0.2), nn.Flatten(),
        )
        self.out = nn.Linear(2 * ch * 9, 1)

    def forward(self, x):
        return torch.sigmoid(self.out(self.features(x))).squeeze(1)
