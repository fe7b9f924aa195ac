"""The environment of programs on emulated GPUs."""

import os
from pathlib import Path

from gpucoll.emulation import FACES

HERE = Path(__file__).parents[1]


def environment(**variables):
    """Return environment variables that make `import cupy` find eight emulated GPUs.

    The GPUs of two test processes differ: a GPU that ranks share has the peer kernels of one communicator only.
    """
    places = [str(FACES), str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"EMULATED_GPUS": "8", "EMULATED_BUS": str(16 * (1 + os.getpid() % 4000)),
            "PYTHONPATH": os.pathsep.join(places), **variables}
