import torch
import torch.distributed as dist


@torch.no_grad()
def average_gradients(model):
    """One message for all gradients, in half precision, since the network between the nodes is slow."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([g.flatten() for g in grads]).half()
    dist.all_reduce(flat)
    flat = flat.float() / dist.get_world_size()
    for g, part in zip(grads, flat.split([g.numel() for g in grads])):
        g.copy_(part.view_as(g))
