import torch


def sphere_with_bumps(n, generator):
    """Points on a bumpy sphere of radius about 0.35, with the signed distance left to the network."""
    d = torch.randn(n, 3, generator=generator)
    d = d / d.norm(dim=1, keepdim=True)
    r = 0.35 + 0.03 * torch.sin(5 * d[:, :1]) * torch.cos(4 * d[:, 1:2])
    return d * r


class Sampler:
    def __init__(self, opt):
        self.opt = opt
        self.gen = torch.Generator().manual_seed(opt.seed)
        self.cloud = sphere_with_bumps(4096, self.gen)

    def radius(self, step):
        f = min(step / self.opt.grow_until, 1.0)
        return self.opt.radius_start + f * (self.opt.radius_end - self.opt.radius_start)

    def __call__(self, step):
        pick = torch.randint(len(self.cloud), (self.opt.surface_batch,), generator=self.gen)
        space = torch.rand(self.opt.space_batch, 3, generator=self.gen) * 2 - 1
        return self.cloud[pick], space * self.radius(step)

    def stream(self):
        step = 0
        while True:
            yield self(step)
            step += 1
