"""Faults for schedules: each changes a random step in the plans (rounds of steps) of all ranks, if possible."""

from gpucoll.core.schedule import Copy, Recv, RecvReduce, Reduce, Send, Slice


def pick(random_, plans, kind):
    """Return the round and index of a random step of `kind`, or None."""
    places = [(steps, index) for plan in plans for steps in plan for index, step in enumerate(steps)
              if isinstance(step, kind)]
    return random_.choice(places) if places else None


def drop(random_, plans, size):
    place = pick(random_, plans, Send | Recv | RecvReduce | Copy | Reduce)
    return place and (place[0].pop(place[1]), True)[1]


def twice(random_, plans, size):
    place = pick(random_, plans, Send | Recv | RecvReduce | Copy | Reduce)
    return place and (place[0].insert(place[1], place[0][place[1]]), True)[1]


def wrong_peer(random_, plans, size):
    steps, index = pick(random_, plans, Send | Recv | RecvReduce) or (None, 0)
    if steps and size > 2:
        steps[index] = steps[index]._replace(peer=(steps[index].peer + random_.randrange(1, size)) % size)
        return True


def copy_for_reduce(random_, plans, size):
    steps, index = pick(random_, plans, RecvReduce | Reduce) or (None, 0)
    if steps:
        steps[index] = (Recv if isinstance(steps[index], RecvReduce) else Copy)(*steps[index])
        return True


def receive_after_reduction(random_, plans, size):
    """Insert a Recv into a chunk already reduced in the round: message and sender exist, but the order is wrong."""
    steps, index = pick(random_, plans, RecvReduce | Reduce) or (None, 0)
    if steps:
        owner = next(rank for rank, plan in enumerate(plans) if any(one is steps for one in plan))
        peer, target = (owner + 1) % size, steps[index].dst
        steps.insert(index + 1, Recv(target, peer))
        plans[peer].insert(0, [Send(Slice("input", target.first), owner)])
        return True


NEED_REDUCTIONS = copy_for_reduce, receive_after_reduction
FAULTS = [drop, wrong_peer, twice, copy_for_reduce, receive_after_reduction]
