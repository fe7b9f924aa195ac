"""Parameter server and workers of "Parameter Server and All-Reduce".

Mended: rank 0 is the server and the other ranks are the workers, in place of one process for both; a linear model with
gradients written out in place of torch.nn; the data are made here, as the document gives no train_loader.
"""

import numpy

import gpucoll.distributed as dist

SERVER = 0


class ParameterServer:
    def __init__(self, parameters, lr=0.05):
        self.parameters = parameters
        self.lr = lr

    def get_weights(self):
        dist.broadcast(self.parameters, src=SERVER)

    def update_model(self):
        grads = numpy.zeros_like(self.parameters)
        dist.reduce(grads, dst=SERVER, op=dist.ReduceOp.SUM)
        self.parameters -= self.lr * grads / (dist.get_world_size() - 1)


class Worker:
    def __init__(self, parameters):
        self.parameters = parameters

    def pull_weights(self):
        dist.broadcast(self.parameters, src=SERVER)

    def push_gradients(self, batch_idx, data, target):
        error = data @ self.parameters - target
        grads = 2 * data.T @ error / len(target)
        dist.reduce(grads, dst=SERVER, op=dist.ReduceOp.SUM)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    wanted = numpy.array([1.0, -2.0, 3.0])
    ps = ParameterServer(numpy.zeros(3))
    worker = Worker(numpy.zeros(3))
    data = numpy.random.default_rng(rank).standard_normal((64, 3))
    for batch_idx in range(200):
        if rank == SERVER:
            ps.get_weights()
            ps.update_model()
        else:
            worker.pull_weights()
            worker.push_gradients(batch_idx, data, data @ wanted)
    if rank == SERVER:
        print(f"weights {ps.parameters.round(3)}")
    print("Done Training")


main()
