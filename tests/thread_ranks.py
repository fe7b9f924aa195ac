"""Threads as ranks: a program on each, the first error raised."""

import threading

import gpucoll as gc


def all_on_threads(everyone, program):
    """Run `program(one)` on a thread for each of `everyone`; the results in their order, or the first error."""
    results, errors = [None] * len(everyone), []

    def run(rank, one):
        try:
            results[rank] = program(one)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(everyone)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def on_threads(size, program, *, timeout=30, **options):
    """Run `program(comm)` on a thread for each rank, which closes its communicator."""
    def whole(comm):
        with comm:
            return program(comm)

    return all_on_threads(gc.init_local(size, timeout=timeout, **options), whole)
