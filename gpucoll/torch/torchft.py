"""A process group for torchft: training goes on while replica groups fail and return. Needs the package `torchft`.

torchft's lighthouse agrees on the replica groups of a step. Whenever the replica groups change, torchft configures the
process group anew, with another store address, rank and size.
"""

from __future__ import annotations

import datetime
from typing import Any

from torch.distributed import DistBackendError, Store
from torch.distributed import Work as Handle  # type: ignore[attr-defined, unused-ignore]
from torchft.process_group import ProcessGroupWrapper

from gpucoll import internal
from gpucoll.torch.group import TorchProcessGroup


class ProcessGroupGpucoll(ProcessGroupWrapper):  # type: ignore[misc, unused-ignore]  # torchft has no types
    """A process group to pass to ``torchft.Manager(pg=...)``, in place of ``ProcessGroupGloo`` or ``ProcessGroupNCCL``.

    The deadline for ranks to meet and for every call is the constructor's ``timeout``, a timedelta. After a failed
    collective the handle's `wait` returns False, the handle's future has the error, and `errored` returns the error
    until the next configuration: torchft then takes the step again. Messages between two ranks raise the error.

    Examples
    --------
    >>> from gpucoll.torch.torchft import ProcessGroupGpucoll
    >>> ProcessGroupGpucoll.getBackendName(None)
    'torchft-gpucoll'
    """

    _error: Exception | None = None

    def getBackendName(self) -> str:
        return "torchft-gpucoll"

    def errored(self) -> Exception | None:
        """Return the first error since the last configuration, or None.

        On a GPU, wait for the calls before.

        Returns
        -------
        Exception or None
            The error.

        Examples
        --------
        >>> import datetime
        >>> from gpucoll.torch.torchft import ProcessGroupGpucoll
        >>> print(ProcessGroupGpucoll(datetime.timedelta(seconds=60)).errored())
        None
        """
        group = self._pg  # torchft configures and asks in two threads
        if self._error is None and group is not None:
            group.synchronize()
            for comm in (group._comm, group._points):
                if (failure := internal.waits_of(comm).failure) is not None:
                    self._note(failure, group)
        return self._error

    def send(self, tensors: Any, dst_rank: int, tag: int) -> Any:
        """Send a tensor to rank `dst_rank`; the handle raises errors."""
        return self.parent.send(tensors, dst_rank, tag)

    def recv(self, tensors: Any, src_rank: int, tag: int) -> Any:
        """Receive a tensor from rank `src_rank`; the handle raises errors."""
        return self.parent.recv(tensors, src_rank, tag)

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Set the deadline of later calls, and of later configurations."""
        super().set_timeout(timeout)
        if self._pg is not None:
            self._pg.set_timeout(timeout)

    def shutdown(self) -> None:
        """End the calls under way, and close the connections to the other replica groups without waiting for these."""
        self.abort(errored=False)

    def _create_pg(self, store: Store, rank: int, world_size: int) -> TorchProcessGroup:
        self._error = None
        return TorchProcessGroup(store, rank, world_size, self._timeout)

    def _wrap_work(self, work: Any, opts: Any) -> Any:
        return _ReportedWork(work, self, self._pg)

    def _note(self, error: Exception, group: Any) -> None:
        # An error of an earlier configuration does not concern the group in use.
        if self._error is None and group is self._pg:
            self._error = DistBackendError(f"aborted: {error}")  # torchft's word
            self._error.__cause__ = error


class _ReportedWork(Handle):  # type: ignore[misc, unused-ignore]
    """The handle of a collective: `wait` reports an error to the group and returns False.

    torchft 0.2 asks for the future of a handle after `wait`, and an exception of `wait` would end the replica.
    """

    def __init__(self, work: Any, group: ProcessGroupGpucoll, made_by: Any) -> None:
        super().__init__()
        self._work, self._group, self._made_by = work, group, made_by

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Wait for the end of the call; return whether the results are valid."""
        try:
            return bool(self._work.wait(timeout))
        except Exception as error:
            self._group._note(error, self._made_by)
            return False

    synchronize = block_current_stream = wait


def _asked_of_work(name: str) -> Any:
    return lambda self: getattr(self._work, name)()


for _name in ("is_completed", "is_success", "exception", "result", "get_future"):
    setattr(_ReportedWork, _name, _asked_of_work(_name))
