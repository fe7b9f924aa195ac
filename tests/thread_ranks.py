"""Threads as ranks: a program on each, the first error raised, which says whose it is."""

import threading

import gpucoll as gc
from pace import seconds


def all_on_threads(everyone, program):
    """Run `program(one)` on a thread for each of `everyone`; the results in their order, or the first error."""
    results, errors = [None] * len(everyone), []

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
    """Run `program(comm, *arguments)` on a thread for each rank, which closes its communicator.

    No thread hangs: a wait ends with an error that names the ranks waited for, after a minute if `timeout` is None.
    """
    def whole(comm):
        with comm:
            return program(comm, *arguments)

    return all_on_threads(gc.init_local(size, timeout=timeout or seconds(60), **options), whole)
