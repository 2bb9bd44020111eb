import torch
import torch.nn as nn

from .features import LogSpectrogram


class SongNet(nn.Module):
    def __init__(self, species, stations, width=32):
        super().__init__()
        self.features = LogSpectrogram()
        self.conv = nn.Sequential(
            nn.Conv1d(65, width, 3, padding=1), nn.SiLU(), nn.Conv1d(width, width, 3, padding=1), nn.SiLU())
        self.attend = nn.Linear(width, 1)
        self.head = nn.Linear(width, species)
        self.log_gain = nn.Embedding(stations, 1)  # microphones differ
        nn.init.zeros_(self.log_gain.weight)

    def forward(self, wave, station):
        gain = self.log_gain(station).exp().unsqueeze(1)
        h = self.conv(self.features(wave) * gain).transpose(1, 2)
        pooled = (self.attend(h).softmax(1) * h).sum(1)
        return self.head(pooled)
