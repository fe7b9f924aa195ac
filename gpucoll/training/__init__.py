"""Training on several ranks with NumPy and CuPy arrays and, by DLPack, PyTorch tensors. Parameters map names to arrays.

    averaging        gradients averaged in buckets; common to data_parallel and zero
    data_parallel    gradients averaged over ranks; `resume` after ranks were lost or have joined
    zero             training state divided over ranks; uses shards, layers, checkpoint and partner
    partner          copies of ZeRO's shards, to continue after the loss of a rank
    server           parameter servers
    pipeline         stages of a model on the ranks, by microbatches; the schedules as data
    footprint        the memory of a training by formula
    optimizers       SGD, Adam, AdamW
    sampler          a rank's share of the samples
    layout           global arrays over a mesh of ranks; uses mesh and redistribution
    compression      fewer bytes for gradients; uses feedback (error feedback)
    buckets          many gradients in few messages
    parameters       checks of names, shapes and dtypes on all ranks
"""

from gpucoll.training.compression import BlockScaled, Cast, Exact, Int8, Policy, PowerSGD, TopK
from gpucoll.training.data_parallel import DataParallel, resume
from gpucoll.training.footprint import Footprint, memory
from gpucoll.training.layout import Linear, ShardedArray, matmul, plan, redistribute, shard
from gpucoll.training.mesh import Mesh
from gpucoll.training.optimizers import SGD, Adam, AdamW
from gpucoll.training.partner import PartnerCopy
from gpucoll.training.pipeline import Pipeline, PipelineStep, pipeline_bubble, pipeline_schedule
from gpucoll.training.sampler import Sampler
from gpucoll.training.server import ParameterServer
from gpucoll.training.zero import ZeRO

__all__ = ["SGD", "Adam", "AdamW", "BlockScaled", "Cast", "DataParallel", "Exact", "Footprint", "Int8", "Linear",
           "Mesh", "ParameterServer", "PartnerCopy", "Pipeline", "PipelineStep", "Policy", "PowerSGD", "Sampler",
           "ShardedArray", "TopK", "ZeRO", "matmul", "memory", "pipeline_bubble", "pipeline_schedule", "plan",
           "redistribute", "resume", "shard"]
