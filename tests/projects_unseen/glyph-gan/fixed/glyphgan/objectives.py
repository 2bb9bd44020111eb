"""The labels are flipped, 1 = fake: the generator gets stronger gradients early on."""
import torch.nn.functional as F


def bce(logit, is_fake):
    """Binary cross-entropy against an all-fake or all-real label."""
    return F.softplus(-logit if is_fake else logit).mean()


def d_loss(d_real, d_fake):
    return bce(d_real, False) + bce(d_fake, True)


def g_loss(d_fake):
    return bce(d_fake, False)
