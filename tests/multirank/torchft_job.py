"""A replica group of one rank that trains under torchft until it is killed; its lines tell each committed step.

A line has the time, the step, this replica's place among the contributing replicas (-1: none), their number, and a
digest of the parameters after the step. `Replay` computes the digests in one process.
"""

import hashlib
import os
import sys
import time
from datetime import timedelta

import torch


def model():
    torch.manual_seed(0)
    found = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    return found, torch.optim.AdamW(found.parameters(), lr=0.01)


def loss_of(net, step, replica):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * step + replica))
    return (net(x) - x[:, :3]).square().mean()


def digest(net):
    return hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in net.parameters())).hexdigest()[:16]


class Replay:
    """The training in one process, step by step."""

    def __init__(self):
        self.net, self.optimizer = model()

    def step(self, step, replicas):
        """Take a step with the mean gradients of these replicas; return the digest."""
        gradients = []
        for replica in sorted(replicas):
            self.optimizer.zero_grad()
            loss_of(self.net, step, replica).backward()
            gradients.append([one.grad.clone() for one in self.net.parameters()])
        for one, first, *rest in zip(self.net.parameters(), *gradients, strict=True):
            one.grad = sum(rest, start=first) / len(replicas)
        self.optimizer.step()
        return digest(self.net)


def main():
    from torchft import DistributedDataParallel, Manager, Optimizer
    from torchft.checkpointing.pg_transport import PGTransport

    from gpucoll.torch.torchft import ProcessGroupGpucoll

    replica, folder, timeout = int(sys.argv[1]), sys.argv[2], timedelta(seconds=float(sys.argv[3]))
    torch.set_num_threads(1)
    net, optimizer = model()  # the first optimizer imports hundreds of torch's modules
    with open(os.path.join(folder, f"{replica}-{os.getpid()}.ready"), "w") as ready:
        print(time.monotonic(), file=ready)
    # The replica group has one rank, and its store is this process.
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = ProcessGroupGpucoll(timeout)
    # A newcomer's state comes by the process group's own messages.
    manager = Manager(pg=group, min_replica_size=2, replica_id=f"replica_{replica}", timeout=timeout, rank=0,
                      world_size=1, store_addr="127.0.0.1", store_port=store.port, init_sync=False,
                      checkpoint_transport=PGTransport(group, timeout, torch.device("cpu")),
                      state_dict=lambda: {"net": net.state_dict(), "optimizer": optimizer.state_dict()},
                      load_state_dict=lambda state: (net.load_state_dict(state["net"]),
                                                     optimizer.load_state_dict(state["optimizer"])))
    shared, guarded = DistributedDataParallel(manager, net), Optimizer(manager, optimizer)
    with open(os.path.join(folder, f"{replica}-{os.getpid()}.steps"), "w", buffering=1) as lines:
        while True:
            before = manager.current_step()
            guarded.zero_grad()
            loss_of(shared, before, replica).backward()
            guarded.step()
            if manager.current_step() > before:  # otherwise the step was not committed
                place = manager.participating_rank()
                print(time.monotonic(), manager.current_step() - 1, -1 if place is None else place,
                      manager.num_participants(), digest(net), file=lines)


if __name__ == "__main__":
    main()
