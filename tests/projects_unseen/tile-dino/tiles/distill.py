import torch
import torch.nn as nn
import torch.nn.functional as F


def views(x):
    """Two random flips / rotations with a little noise."""
    out = []
    for _ in range(2):
        v = torch.rot90(x, int(torch.randint(4, (1,))), (2, 3))
        if torch.rand(()) < 0.5:
            v = v.flip(3)
        out.append(v + 0.02 * torch.randn_like(v))
    return out


class Distiller(nn.Module):
    def __init__(self, factory, out=32, momentum=0.99, student_temp=0.2, teacher_temp=0.08):
        super().__init__()
        self.student, self.teacher = factory(out=out), factory(out=out)
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False)
        self.register_buffer("centre", torch.zeros(out))
        self.momentum, self.ts, self.tt = momentum, student_temp, teacher_temp

    @torch.no_grad()
    def targets(self, batch_views):
        outs = [self.teacher(v).float() for v in batch_views]
        probs = [F.softmax((o - self.centre) / self.tt, -1) for o in outs]
        self.centre.mul_(0.9).add_(0.1 * torch.cat(outs).mean(0))
        return probs

    def forward(self, x):
        v1, v2 = views(x)
        t1, t2 = self.targets((v1, v2))
        s1, s2 = (F.log_softmax(self.student(v).float() / self.ts, -1) for v in (v1, v2))
        return -0.5 * ((t1 * s2).sum(-1).mean() + (t2 * s1).sum(-1).mean())

    @torch.no_grad()
    def update_teacher(self):
        for t, s in zip(self.teacher.parameters(), self.student.parameters()):
            t.lerp_(s, 1 - self.momentum)
