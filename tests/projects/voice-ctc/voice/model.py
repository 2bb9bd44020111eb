import torch.nn as nn
import torch.nn.functional as F


class Frontend(nn.Module):
    def __init__(self, bands, dim):
        super().__init__()
        self.conv1 = nn.Conv1d(bands, dim, 5, padding=2)
        self.bn1 = nn.BatchNorm1d(dim)
        self.conv2 = nn.Conv1d(dim, dim, 3, stride=2, padding=1)
        self.bn2 = nn.BatchNorm1d(dim)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(x)))


class AcousticModel(nn.Module):
    def __init__(self, bands, classes, dim=48):
        super().__init__()
        self.frontend = Frontend(bands, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * dim, classes)

    def forward(self, feats, lens):
        x = self.frontend(feats.transpose(1, 2)).transpose(1, 2)
        x, _ = self.rnn(x)
        return self.head(x).log_softmax(-1), (lens + 1) // 2
