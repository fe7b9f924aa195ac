"""ddp_allreduce of "Distributed Training Collective Communication".

Mended: `setup` and `ToyModel` are not given there: a linear model with its gradients written out; the averaging of
gradients, which DistributedDataParallel hides, is an all_reduce.
"""

import numpy

import gpucoll.distributed as dist


class ToyModel:
    def __init__(self):
        self.weight = numpy.zeros((10, 5))

    def backward(self, inputs, labels):
        error = inputs @ self.weight - labels
        return 2 * inputs.T @ error / error.size


def ddp_allreduce(rank, world_size):
    dist.init_process_group()
    model = ToyModel()
    dist.broadcast(model.weight, src=0)  # 通过调用DDP (分布式数据并行) 方法将模型在每个处理器上完成初始化

    everything = numpy.random.default_rng(0).standard_normal((world_size, 20, 15))
    inputs, labels = everything[..., :10], everything[..., 10:]
    gradient = model.backward(inputs[rank], labels[rank])
    # 在反向计算时, 框架内部会执行AllReduce算法
    dist.all_reduce(gradient, op=dist.ReduceOp.AVG)

    whole = model.backward(inputs.reshape(-1, 10), labels.reshape(-1, 5))
    model.weight -= 0.001 * gradient
    print(f"[{rank}] the gradient is that of the whole batch: {numpy.allclose(gradient, whole)}")


if __name__ == "__main__":
    from mpi4py import MPI

    ddp_allreduce(MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
