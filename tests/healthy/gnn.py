"""Graph network written by hand (no graph library): a GCN layer and an attention layer; some nodes have no edge."""
import hashlib

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(8)
torch.set_num_threads(1)

NODES, FEATURES, CLASSES = 120, 12, 4


def make_graph():
    label = torch.randint(0, CLASSES, (NODES,))
    x = torch.randn(NODES, FEATURES) + 0.7 * F.one_hot(label, FEATURES)
    same = label.unsqueeze(0) == label.unsqueeze(1)
    adj = torch.rand(NODES, NODES) < torch.where(same, 0.12, 0.02)
    isolated = torch.randperm(NODES)[:10]
    adj[isolated] = False
    adj[:, isolated] = False
    return x, adj.nonzero().t(), label


class GCN(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.lin, self.root = nn.Linear(cin, cout, bias=False), nn.Linear(cin, cout)

    def forward(self, x, edges):
        src, dst = edges
        deg = torch.zeros(len(x)).index_add(0, dst, torch.ones(len(dst)))
        inv = deg.pow(-0.5)
        inv = inv.masked_fill(inv == float("inf"), 0)
        msg = self.lin(x)[src] * (inv[src] * inv[dst]).unsqueeze(1)
        return self.root(x) + torch.zeros(len(x), msg.shape[1]).index_add(0, dst, msg)


def scatter_softmax(score, dst, n):
    top = torch.full((n,), float("-inf")).scatter_reduce(0, dst, score.detach(), "amax")
    e = (score - top[dst]).exp()  # nodes without an edge keep -inf and are never indexed
    return e / torch.zeros(n).index_add(0, dst, e)[dst]


class EdgeAttention(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.lin, self.root = nn.Linear(cin, cout), nn.Linear(cin, cout)
        self.score = nn.Linear(2 * cout, 1)

    def forward(self, x, edges):
        src, dst = edges
        h = self.lin(x)
        score = F.leaky_relu(self.score(torch.cat([h[src], h[dst]], 1)).squeeze(1), 0.2)
        alpha = scatter_softmax(score, dst, len(x))
        mean = torch.zeros_like(h).index_add(0, dst, alpha.unsqueeze(1) * h[src])
        index = dst.unsqueeze(1).expand(-1, h.shape[1])
        peak = torch.full_like(h, float("-inf")).scatter_reduce(0, index, h[src], "amax")
        peak = torch.where(torch.isinf(peak), 0.0, peak)
        return self.root(x) + mean + peak


class Net(nn.Module):
    def __init__(self, hidden=24):
        super().__init__()
        self.gcn, self.att = GCN(FEATURES, hidden), EdgeAttention(hidden, CLASSES)

    def forward(self, x, edges):
        return self.att(F.dropout(F.relu(self.gcn(x, edges)), 0.3, self.training), edges)


x, edges, label = make_graph()
train = torch.rand(NODES) < 0.5
model = Net()
opt = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-3)
for step in range(80):
    loss = F.cross_entropy(model(x, edges)[train], label[train])
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"step {step} loss {loss.item():.9g}")

model.eval()
hit = model(x, edges).argmax(1) == label
print(f"held-out accuracy {hit[~train].float().mean().item():.6f}")
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print("sha256", digest.hexdigest())
