"""Point to point of "Parameter Server and All-Reduce", for two ranks.

Mended: arrays in place of tensors.
"""

import numpy

import gpucoll.distributed as dist

dist.init_process_group("gloo")
# 현재 nccl은 send, recv를 지원하지 않음

if dist.get_rank() == 0:
    tensor = numpy.random.default_rng().standard_normal((2, 2), dtype=numpy.float32)
    request = dist.isend(tensor, dst=1)
elif dist.get_rank() == 1:
    tensor = numpy.zeros((2, 2), numpy.float32)
    request = dist.irecv(tensor, src=0)
else:
    raise RuntimeError("wrong rank")

request.wait()

print(f"rank {dist.get_rank()}: {tensor}")
