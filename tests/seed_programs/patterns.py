"""Every pattern of "Kommunikationsmuster", one after the other.

Mended: arrays in place of tensors; a float result for integer data (scatter); a too short result list and
`dim.all_to_all` (all_to_all); integer results for data with fractions (all_to_all); `reduce` without `dst`; tabs.
"""

import numpy

import gpucoll.distributed as dist

dist.init_process_group()


def create_data(worker_id: int | None = None, dim: int = 4) -> numpy.ndarray:
    worker_id = worker_id if worker_id is not None else dist.get_rank()
    data = numpy.arange(dim) + worker_id * dim
    if dist.get_backend() == "nccl":
        import cupy

        data = cupy.asarray(data)
    return data


def show(pattern, data):
    print(f"{pattern} [{dist.get_rank()}] {data}")


data = create_data()
dist.broadcast(data, src=0)
show("broadcast", data)

data = create_data()
dist.reduce(data, dst=0, op=dist.ReduceOp.SUM)
show("reduce", data)

data = create_data()
dist.all_reduce(data, op=dist.ReduceOp.SUM)
show("all_reduce", data)

data = create_data()
result = ([numpy.zeros_like(data) for _ in range(dist.get_world_size())]
          if dist.get_rank() == 0
          else None)
dist.gather(data, dst=0, gather_list=result)
show("gather", result)

data = create_data()
result = [numpy.zeros_like(data) for _ in range(dist.get_world_size())]
dist.all_gather(result, data)
show("all_gather", result)

dim = 4
data = ([create_data(worker_id=i, dim=dim) for i in range(dist.get_world_size())]
        if dist.get_rank() == 0
        else None)
result = numpy.zeros(dim, int)  # was: zeros(dim), of floats
dist.scatter(result, data)
show("scatter", result)

dim = 4
data = [create_data(dim=dim) + i / dist.get_world_size()
        for i in range(dist.get_world_size())]
result = [numpy.zeros(dim) for _ in range(dist.get_world_size())]  # was: a list of one
dist.all_to_all(result, data)  # was: dim.all_to_all
show("all_to_all", result)

dist.barrier()

even_ranks = {i for i in range(dist.get_world_size()) if i % 2 == 0}
group = dist.new_group(ranks=even_ranks)
if dist.get_rank() % 2 == 0:  # only group needs to participate
    data = create_data()
    dist.reduce(data, dst=0, op=dist.ReduceOp.SUM, group=group)  # was: without dst
    show("group", data)
