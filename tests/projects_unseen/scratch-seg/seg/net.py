import torch
import torch.nn.functional as F


def init_params(channels):
    def conv(cin, cout, k=3):
        w = torch.randn(cout, cin, k, k) * (2.0 / (cin * k * k)) ** 0.5
        return w.requires_grad_(), torch.zeros(cout, requires_grad=True)

    p = {}
    p["w1"], p["b1"] = conv(1, channels)
    p["w2"], p["b2"] = conv(channels, 2 * channels)
    p["w3"], p["b3"] = conv(2 * channels, 2 * channels)
    p["w4"], p["b4"] = conv(3 * channels, 1, k=1)
    return p


def predict(p, x):
    """Two scales and one skip connection; returns logits."""
    a = F.relu(F.conv2d(x, p["w1"], p["b1"], padding=1))
    b = F.relu(F.conv2d(F.max_pool2d(a, 2), p["w2"], p["b2"], padding=1))
    b = F.relu(F.conv2d(b, p["w3"], p["b3"], padding=1))
    b = F.interpolate(b, scale_factor=2, mode="bilinear", align_corners=False)
    return F.conv2d(torch.cat([a, b], dim=1), p["w4"], p["b4"])


def segmentation_loss(logits, masks):
    bce = F.binary_cross_entropy_with_logits(logits, masks)
    prob = logits.sigmoid()
    dice = 1 - (2 * (prob * masks).sum() + 1) / (prob.sum() + masks.sum() + 1)
    return bce + dice
