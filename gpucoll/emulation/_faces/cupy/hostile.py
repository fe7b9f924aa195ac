"""Rules of a hostile machine: permitted behaviour of a GPU, driver and NCCL, absent from the usual machine.

    EMULATED_RULES=hostile            all rules
    EMULATED_RULES=connect,handles    these rules; read at every call, so the rules can change while a process runs
    EMULATED_RULES=hostile,-handles   all rules but these

    EMULATED_CAPABILITY, EMULATED_PROCESSORS   of every GPU: 90 and 2, by the rule `capability` 80 and 108
    EMULATED_NCCL                              NCCL's version (23203), or "absent": CuPy without the library
    EMULATED_EXCLUSIVE                         a GPU admits a single process among all with the same value here
    EMULATED_PEERS                             1: GPUs have access to each other's memory
    CUDA_DEVICE_MAX_CONNECTIONS                number of hardware queues of a GPU (8; 32 at most)

The rules, and where they come from:

_connect.py, after NCCL's transport.cc (ncclTransportP2pSetup) and group.cc (groupLaunch)
    connect        ncclGroupEnd meets the peers of every new direction, a first or captured collective all ranks,
                   without a deadline
cuda/nccl.py, after init.cc (commDestroySync, commReclaim), enqueue.cc and device/common_kernel.h
    graphs_alive   ncclCommDestroy and ncclCommAbort wait until no graph is left that captured the communicator
    float8         NCCL reduces float8 from version 2.24 and compute capability 9.0 on
    rounding       NCCL rounds to the dtype after every hop around the ring, which begins behind its last
_machine.py, after the CUDA programming guide: implicit synchronization, lazy loading, streams
    synchronising  malloc, free, pinned memory, modules that come and go: the host waits while a kernel runs
    copies         a copy to ordinary host memory: before its end no thread makes a stream or an event, nor records in
                   its stream
    queues         streams share a few hardware queues, and what stands in one goes in the order it was given in
    null_stream    cudaMemset is work of the null stream, which all blocking streams follow and are followed by
    handles        the handle of a destroyed stream, event or graph is the next one's
cuda/runtime.py and _capture.py, after CuPy's runtime.pyx and CUDA's cudaStreamBeginCapture
    codes          eventQuery and streamQuery return CUDA's code: 600, 700 after a fault, 907 in a capture
    capture_modes  a capture forbids what may synchronise: to all threads, to its own, or to none
_order.py
    order          two streams that use the same bytes, one of them writing, have an order: an event, or a wait of the
                   host
cuda/__init__.py
    capability     an A100's compute capability and multiprocessors, unless variables say otherwise
_memory.py and _ipc.py, after CuPy's memory.pyx and pinned_memory.pyx
    memory         freed memory is overwritten in its stream's order; pinned memory is used memory
"""

import functools
import os
import sys

RULES = ("connect graphs_alive float8 rounding synchronising copies queues null_stream handles codes capture_modes "
         "order capability memory").split()
reported = []  # misuses that a real machine does not report and may not survive
contexts = {}  # devices used by threads of this process, each with the stack of the first use


@functools.cache
def _chosen(given):
    names = set(filter(None, given.split(",")))
    without = {name for name in names if name.startswith("-")}
    wanted = set(RULES) if "hostile" in names else names - without
    if not names <= {"hostile", *RULES, *(f"-{rule}" for rule in RULES)}:
        raise ValueError(f"EMULATED_RULES={given}: known are hostile, {', '.join(RULES)}")
    return {rule for rule in wanted if f"-{rule}" not in without}


def on(rule):
    """Return whether the machine has this rule now."""
    assert rule in RULES, rule
    return rule in _chosen(os.environ.get("EMULATED_RULES", ""))


def report(words):
    """Record a misuse without an error: in `reported`, and on the process's standard error."""
    reported.append(words)
    print(f"hostile machine: {words}", file=sys.stderr, flush=True)


def capability():
    return os.environ.get("EMULATED_CAPABILITY") or ("80" if on("capability") else "90")


def processors():
    return int(os.environ.get("EMULATED_PROCESSORS") or (108 if on("capability") else 2))


def peers():
    """Return whether GPUs have access to each other's memory, as GPUs of one host mostly have."""
    return os.environ.get("EMULATED_PEERS") == "1"


def nccl_version():
    """Return NCCL's version, or None if CuPy has no NCCL."""
    given = os.environ.get("EMULATED_NCCL") or "23203"
    return None if given == "absent" else int(given)
