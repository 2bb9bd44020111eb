"""Rating prediction by matrix factorisation in plain functional style: torch.func.grad and a hand-written update."""
import torch
from torch.func import grad_and_value

torch.manual_seed(6)
torch.set_num_threads(1)
USERS, ITEMS, RANK = 60, 40, 6


def init_params(g, scale=0.3):
    return {
        "user": scale * torch.randn(USERS, RANK, generator=g),
        "item": scale * torch.randn(ITEMS, RANK, generator=g),
        "user_bias": torch.zeros(USERS),
        "item_bias": torch.zeros(ITEMS),
        "mean": torch.zeros(()),
    }


def predict(params, users, items):
    p, q = params["user"][users], params["item"][items]
    dot = (p * q).sum(-1)
    return params["mean"] + params["user_bias"][users] + params["item_bias"][items] + dot


def objective(params, users, items, ratings, reg):
    error = predict(params, users, items) - ratings
    penalty = sum(v.pow(2).sum() for v in params.values())
    return error.pow(2).sum() + reg * penalty


def ratings_table(g, n=3000):
    """Stars from 1 to 5 with a low-rank structure."""
    taste = torch.randn(USERS, 3, generator=g) @ torch.randn(3, ITEMS, generator=g)
    users = torch.randint(0, USERS, (n,), generator=g)
    items = torch.randint(0, ITEMS, (n,), generator=g)
    stars = (3 + 0.8 * taste[users, items] + 0.3 * torch.randn(n, generator=g)).round().clamp(1, 5)
    return users, items, stars


class Batches:
    def __init__(self, table, size, g):
        self.table, self.size, self.g = table, size, g

    def __iter__(self):
        n = len(self.table[0])
        while True:
            idx = torch.randint(0, n, (self.size,), generator=self.g)
            yield tuple(col[idx] for col in self.table)


def descend(params, grads, lr):
    return {k: v - lr * grads[k] for k, v in params.items()}


def main(steps=60, lr=0.02, reg=1e-3):
    g = torch.Generator().manual_seed(10)
    table = ratings_table(g)
    params = init_params(g)
    loss_and_grad = grad_and_value(objective)
    for step, (users, items, stars) in zip(range(steps), Batches(table, 64, g)):
        grads, loss = loss_and_grad(params, users, items, stars, reg)
        params = descend(params, grads, lr)
        print(f"step {step} loss {loss.item() / len(stars):.4g}")


if __name__ == "__main__":
    main()
