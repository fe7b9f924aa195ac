"""The environment of programs on the stand-in for CuPy."""

import os
from pathlib import Path

HERE = Path(__file__).parents[1]
STAND_IN = str(HERE / "stand_in")  # a link to gpucoll/emulation/faces


def environment(**variables):
    """Return environment variables that replace CuPy by the stand-in, on a host with eight GPUs.

    The GPUs of two test processes differ: a GPU that ranks share has the peer kernels of one communicator only.
    """
    places = [STAND_IN, str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"STAND_IN_GPUS": "8", "STAND_IN_BUS": str(16 * (1 + os.getpid() % 4000)),
            "PYTHONPATH": os.pathsep.join(places), **variables}
