"""REINFORCE for a packing game; illegal moves are masked out of the policy, entropy bonus from the second phase on."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(26)
torch.set_num_threads(1)
BINS = 6


class Packing:
    """A stream of items goes into bins of capacity 1; a bin that cannot take the item is not a legal move."""

    def __init__(self, n, g):
        self.fill = torch.zeros(n, BINS)
        self.g = g
        self.draw()

    def draw(self):
        self.item = 0.1 + 0.3 * torch.rand(len(self.fill), 1, generator=self.g)

    def observe(self):
        return torch.cat([self.fill, self.item], dim=1)

    def legal(self):
        fits = self.fill + self.item <= 1
        fits[:, -1] = True  # the last bin is the overflow container
        return fits

    def put(self, a):
        spill = (a == BINS - 1).float()
        self.fill[torch.arange(len(a)), a] += self.item.squeeze(1) * (1 - spill)
        self.draw()
        return 1 - 1.5 * spill


class Policy(nn.Module):
    def __init__(self, hidden=48):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(BINS + 1, hidden), nn.Tanh(), nn.Linear(hidden, BINS))

    def forward(self, obs, legal):
        logits = self.net(obs).masked_fill(~legal, float("-inf"))
        return F.log_softmax(logits, dim=-1)


def play(policy, env, moves):
    log_probs, rewards, entropies = [], [], []
    for _ in range(moves):
        logp = policy(env.observe(), env.legal())
        probs = logp.exp()
        a = torch.multinomial(probs.detach().nan_to_num(1.0), 1, generator=env.g).squeeze(1)
        entropies.append(-(probs * logp).sum(-1))
        log_probs.append(logp.gather(1, a[:, None]).squeeze(1))
        rewards.append(env.put(a))
    return torch.stack(log_probs), torch.stack(rewards), torch.stack(entropies)


def update(policy, opt, env, moves, beta):
    logp, rewards, entropy = play(policy, env, moves)
    returns = rewards.flip(0).cumsum(0).flip(0)
    advantage = (returns - returns.mean(1, keepdim=True)) / moves
    loss = -(logp * advantage).mean()
    if beta > 0:
        loss = loss - beta * entropy.mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    return loss.item()


g = torch.Generator().manual_seed(5)
policy = Policy()
opt = torch.optim.Adam(policy.parameters(), lr=3e-3)
for step in range(40):
    beta = 0.0 if step < 15 else 0.01
    print(f"step {step} loss {update(policy, opt, Packing(24, g), 12, beta):.4f}")
