"""Off-policy evaluation of a maintenance policy: a value function bootstrapped on logged transitions."""
import torch
import torch.nn as nn

torch.manual_seed(15)
torch.set_num_threads(1)
GAMMA, STATES = 0.99, 7


def wear_features():
    """One row per machine state: own indicator and a shared wear term, counted double for the workshop state."""
    f = torch.zeros(STATES, STATES + 1)
    f[:, :STATES] = 2 * torch.eye(STATES)
    f[:, STATES] = 1.0
    f[STATES - 1, STATES - 1] = 1.0
    f[STATES - 1, STATES] = 2.0
    return f


class ValueFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("features", wear_features())
        self.head = nn.Linear(STATES + 1, 1, bias=False)
        nn.init.ones_(self.head.weight)

    def forward(self, s):
        return self.head(self.features[s]).squeeze(-1)


class Log:
    """The logged behaviour visits all states; the evaluated policy always sends the machine to the workshop."""

    def __init__(self, seed=0):
        self.g = torch.Generator().manual_seed(seed)

    def sample(self, n):
        s = torch.randint(0, STATES, (n,), generator=self.g)
        repair = torch.rand(n, generator=self.g) < 1 / STATES
        elsewhere = torch.randint(0, STATES - 1, (n,), generator=self.g)
        s2 = torch.where(repair, torch.full_like(s, STATES - 1), elsewhere)
        cost = 0.01 * torch.randn(n, generator=self.g)
        return s, s2, cost, repair.float() * STATES


class TDLearner:
    def __init__(self, net, lr):
        self.net = net
        self.opt = torch.optim.SGD(net.parameters(), lr=lr)

    def update(self, s, s2, cost, rho):
        with torch.no_grad():
            target = cost + GAMMA * self.net(s2)
        td = target - self.net(s)
        loss = (rho * td ** 2).mean()
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        return loss.item()


def main(steps=430):
    log = Log()
    learner = TDLearner(ValueFunction(), lr=0.25)
    for step in range(steps):
        print(f"step {step} loss {learner.update(*log.sample(64)):.4g}")


main()
