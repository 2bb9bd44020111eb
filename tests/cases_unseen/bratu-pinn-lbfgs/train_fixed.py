"""Physics-informed network for the Bratu equation u'' + lam * exp(u) = 0, u(0) = u(1) = 0. Adam first, then L-BFGS."""
import torch
import torch.nn as nn

torch.manual_seed(5)
torch.set_num_threads(1)

LAM = 2.0


class Field(nn.Module):
    def __init__(self, width=24, depth=3):
        super().__init__()
        dims = [1] + [width] * depth
        self.hidden = nn.ModuleList(nn.Linear(i, o) for i, o in zip(dims, dims[1:]))
        self.out = nn.Linear(width, 1)
        for layer in self.hidden:
            nn.init.xavier_normal_(layer.weight, gain=5 / 3)

    def forward(self, x):
        for layer in self.hidden:
            x = torch.tanh(layer(x))
        return self.out(x)


def derivative(y, x):
    return torch.autograd.grad(y, x, grad_outputs=torch.ones_like(y), create_graph=True)[0]


def residual(net, x):
    u = net(x)
    u_xx = derivative(derivative(u, x), x)
    return u_xx + LAM * torch.exp(u)


class PinnTrainer:
    def __init__(self, net, points=16):
        self.net = net
        self.points = points
        self.edge = torch.tensor([[0.0], [1.0]])
        self.adam = torch.optim.Adam(net.parameters(), lr=1e-3)
        self.lbfgs = torch.optim.LBFGS(net.parameters(), lr=1.0, max_iter=8, history_size=20, line_search_fn="strong_wolfe")

    def objective(self):
        pde_loss = residual(self.net, self.x).square().mean()
        bc_loss = self.net(self.edge).square().mean()
        return pde_loss + 10.0 * bc_loss

    def closure(self):
        self.net.zero_grad()
        loss = self.objective()
        loss.backward()
        return loss

    def step(self, n):
        self.x = torch.rand(self.points, 1).requires_grad_(True)
        opt = self.adam if n < 8 else self.lbfgs
        return opt.step(self.closure)


def main():
    trainer = PinnTrainer(Field())
    for step in range(36):
        loss = trainer.step(step)
        print(f"step {step} loss {loss.item():.5g}")


main()
