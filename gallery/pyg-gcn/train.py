"""torch_geometric: the GCN layer of the tutorial, on batches of small directed graphs.

With --bug, self-loops are not added: a node that nobody points to has degree 0.
"""

import argparse
import os

import torch
import torch.nn.functional as F
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import MessagePassing, global_mean_pool
from torch_geometric.utils import add_self_loops, degree


class GCNConv(MessagePassing):
    def __init__(self, in_channels, out_channels, loops):
        super().__init__(aggr="add")
        self.lin = torch.nn.Linear(in_channels, out_channels, bias=False)
        self.bias = torch.nn.Parameter(torch.zeros(out_channels))
        self.loops = loops

    def forward(self, x, edge_index):
        if self.loops:
            edge_index, _ = add_self_loops(edge_index, num_nodes=x.size(0))
        x = self.lin(x)
        row, col = edge_index
        deg = degree(col, x.size(0), dtype=x.dtype)
        deg_inv_sqrt = deg.pow(-0.5)
        norm = deg_inv_sqrt[row] * deg_inv_sqrt[col]
        return self.propagate(edge_index, x=x, norm=norm) + self.bias

    def message(self, x_j, norm):
        return norm.view(-1, 1) * x_j


class Net(torch.nn.Module):
    def __init__(self, loops):
        super().__init__()
        self.conv1 = GCNConv(6, 32, loops)
        self.conv2 = GCNConv(32, 32, loops)
        self.out = torch.nn.Linear(32, 2)

    def forward(self, data):
        x = F.relu(self.conv1(data.x, data.edge_index))
        x = F.relu(self.conv2(x, data.edge_index))
        return self.out(global_mean_pool(x, data.batch))


def make_graphs(n=160):
    """Rings with chords; a few of them get a node that only points outwards."""
    g = torch.Generator().manual_seed(0)
    graphs = []
    for i in range(n):
        nodes = int(torch.randint(6, 12, (1,), generator=g))
        ring = torch.arange(nodes)
        edges = [ring, (ring + 1) % nodes]
        chords = torch.randint(0, nodes, (2, 4), generator=g)
        edge_index = torch.cat([torch.stack(edges), chords], 1)
        if i % 50 == 45:
            edge_index = torch.cat([edge_index, torch.tensor([[nodes], [0]])], 1)
            nodes += 1
        x = torch.randn(nodes, 6, generator=g)
        graphs.append(Data(x=x, edge_index=edge_index, y=(x[:, 0].mean() > 0).long().view(1)))
    return graphs


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bug", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    os.makedirs("checkpoints", exist_ok=True)
    loader = DataLoader(make_graphs(), batch_size=8)
    model = Net(loops=not args.bug)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)

    def train():
        model.train()
        total = 0
        for data in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data), data.y)
            loss.backward()
            optimizer.step()
            total += loss.item() * data.num_graphs
        return total / len(loader.dataset)

    for epoch in range(3):
        print(f"Epoch: {epoch:03d}, Loss: {train():.4f}")
        torch.save(model.state_dict(), f"checkpoints/{epoch}.pt")
    torch.save(model.state_dict(), "final.pt")


if __name__ == "__main__":
    main()
