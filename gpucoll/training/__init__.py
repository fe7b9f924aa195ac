"""Training loops on several ranks: NumPy and CuPy arrays, PyTorch's by DLPack. Parameters are a mapping of arrays.

    data_parallel    gradients averaged over ranks
    zero             the state of training divided over ranks; shards, layers, checkpoint are its parts
    server           parameter servers
    optimizers       SGD, Adam, AdamW
    sampler          a rank's share of the samples
    layout           global arrays over a mesh of ranks; mesh, redistribution are its parts
    compression      fewer bytes for gradients; feedback, what is lost; packing, its kernels
    buckets, parameters     many gradients in few messages; names, shapes and dtypes alike on all ranks
"""

from gpucoll.training.compression import Cast, Exact, Int8, Policy, PowerSGD, TopK
from gpucoll.training.data_parallel import DataParallel
from gpucoll.training.layout import Linear, ShardedArray, matmul, plan, redistribute, shard
from gpucoll.training.mesh import Mesh
from gpucoll.training.optimizers import SGD, Adam, AdamW
from gpucoll.training.sampler import Sampler
from gpucoll.training.server import ParameterServer
from gpucoll.training.zero import ZeRO

__all__ = ["SGD", "Adam", "AdamW", "Cast", "DataParallel", "Exact", "Int8", "Linear", "Mesh", "ParameterServer",
           "Policy", "PowerSGD", "Sampler", "ShardedArray", "TopK", "ZeRO", "matmul", "plan", "redistribute", "shard"]
