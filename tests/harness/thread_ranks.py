"""Threads as ranks: a program on each; the first error is raised, with its rank."""

import threading

import gpucoll as gc
from harness.pace import seconds


def all_on_threads(everyone, program, errors=None):
    """Run `program(one)` on a thread for each of `everyone`; return the results in order, or raise the first error."""
    results, errors = [None] * len(everyone), [] if errors is None else errors

    def run(rank, one):
        try:
            results[rank] = program(one)
        except BaseException as error:
            error.add_note(f"on rank {rank} of {len(everyone)}")
            errors.append(error)

    threads = [threading.Thread(target=run, args=pair, name=f"rank {pair[0]}") for pair in enumerate(everyone)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def on_threads(size, program, *arguments, timeout=None, **options):
    """Run `program(comm, *arguments)` on a thread for each rank; each thread closes its communicator.

    No thread hangs: if a thread raises, the waits of the others end. With `timeout` None any wait ends after a minute,
    with an error naming the awaited ranks.
    """
    return gc.run_local(lambda comm: program(comm, *arguments), size, timeout=timeout or seconds(60), **options)
