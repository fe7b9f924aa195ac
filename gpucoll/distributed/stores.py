"""torch's key-value store over TCP, on the store by which ranks meet."""

from __future__ import annotations

import datetime
import secrets
import time
from collections.abc import Sequence
from typing import Any

from gpucoll.errors import CollectiveTimeout
from gpucoll.launch.places import text_of
from gpucoll.transport.connections import Frame, connect
from gpucoll.transport.kvstore import StoreClient, StoreServer, kept
from gpucoll.transport.process import PROCESS
from gpucoll.transport.rendezvous import becomes

STORE_PATIENCE = datetime.timedelta(seconds=300)


class TCPStore:
    r"""Keys and bytes at `host_name` and `port`, held by the process with `is_master`; any process may join.

    ``set get add wait check delete_key`` are torch's. A store serves the programs of a trusted network: its address is
    the only secret. The process that holds it waits at its end for the others to end.

    Parameters
    ----------
    host_name : str
        The host of the process with `is_master`.
    port : int
        The port there.
    world_size : int or None, optional
        The processes that join, to wait for; None: any number.
    is_master : bool, optional
        This process holds the store.
    timeout : timedelta, optional
        The deadline of every wait.
    wait_for_workers : bool, optional
        Wait for `world_size` processes.
    \*\*ignored : object
        The other arguments of torch have no effect.

    Examples
    --------
    >>> import gpucoll.distributed as dist
    >>> store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    >>> store.set("key", "value")
    >>> other = dist.TCPStore("127.0.0.1", store.port)
    >>> other.get("key"), other.add("count", 2)
    (b'value', 2)
    >>> other.close()
    >>> store.close()
    """

    def __init__(self, host_name: str, port: int, world_size: int | None = None, is_master: bool = False,
                 timeout: datetime.timedelta = STORE_PATIENCE, wait_for_workers: bool = True, **ignored: Any) -> None:
        self.timeout = timeout
        self.host: str = host_name
        token = text_of((host_name, port))
        self._server = _OpenServer.at((host_name, port), 0, token) if is_master else None
        self.port: int = port if self._server is None or self._server.hub is None else self._server.hub.port
        if self._server is not None:
            self._server.token = token = text_of((host_name, self.port))  # the system may have chosen the port
            kept(self._server)
        seconds, deadline = timeout.total_seconds(), time.monotonic() + timeout.total_seconds()
        self._client: StoreClient | None = None

        def joins() -> bool:
            try:
                connection = connect((host_name, self.port), seconds)
            except OSError:
                return False
            connection.join(secrets.token_hex(16), 0, token, max(0.1, deadline - time.monotonic()))
            self._client = StoreClient(connection, seconds, host_name)
            kept(self._client)
            return True

        if not becomes(joins, seconds, 0.01):
            raise CollectiveTimeout(f"TCPStore: waited {seconds:g} s for a store at {token}; one process makes it with "
                                    "is_master=True")
        if world_size and wait_for_workers:
            self.add("gpucoll came", 1)
            self._await(lambda: self.add("gpucoll came", 0) >= world_size, timeout, f"{world_size} processes")

    def _await(self, done: Any, timeout: datetime.timedelta | None, what: str) -> None:
        seconds = (timeout or self.timeout).total_seconds()
        if not becomes(done, seconds, 0.005):
            raise CollectiveTimeout(f"TCPStore: waited {seconds:g} s for {what}")

    def _call(self, call: str, key: str, value: bytes = b"") -> Frame:
        assert self._client is not None
        return self._client._call(call, f"user {key}", value, self.timeout.total_seconds())

    def set(self, key: str, value: str | bytes) -> None:
        """Set the value of `key`.

        Parameters
        ----------
        key : str
            The key.
        value : str or bytes
            The value.

        Examples
        --------
        >>> import gpucoll.distributed as dist
        >>> store = dist.TCPStore("127.0.0.1", 0, is_master=True)
        >>> store.set("key", "value")
        >>> store.get("key")
        b'value'
        >>> store.close()
        """
        self._call("set", key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """Return the value of `key`, once it is set; CollectiveTimeout after the store's timeout.

        Parameters
        ----------
        key : str
            The key.

        Returns
        -------
        bytes
            The value.

        Examples
        --------
        >>> import gpucoll.distributed as dist
        >>> store = dist.TCPStore("127.0.0.1", 0, is_master=True)
        >>> store.set("key", "value")
        >>> store.get("key")
        b'value'
        >>> store.close()
        """
        self.wait([key])
        return self._call("get", key)[1]

    def add(self, key: str, amount: int) -> int:
        """Add to the number at `key`, 0 at first, and return the sum.

        Parameters
        ----------
        key : str
            The key.
        amount : int
            The summand.

        Returns
        -------
        int
            The sum.

        Examples
        --------
        >>> import gpucoll.distributed as dist
        >>> store = dist.TCPStore("127.0.0.1", 0, is_master=True)
        >>> store.set("key", "value")
        >>> store.add("count", 2)
        2
        >>> store.close()
        """
        return int(self._call("add", key, str(amount).encode())[1])

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are set.

        Parameters
        ----------
        keys : sequence of str
            The keys.

        Returns
        -------
        bool
            The answer.

        Examples
        --------
        >>> import gpucoll.distributed as dist
        >>> store = dist.TCPStore("127.0.0.1", 0, is_master=True)
        >>> store.set("key", "value")
        >>> store.check(["key"])
        True
        >>> store.close()
        """
        return all(self._call("get", key)[0].get("found") is True for key in keys)

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        """Wait until all keys are set; CollectiveTimeout after `timeout`, by default the store's.

        Parameters
        ----------
        keys : sequence of str
            The keys.
        timeout : timedelta or None, optional
            The deadline; None is the store's.

        Examples
        --------
        >>> import gpucoll.distributed as dist
        >>> store = dist.TCPStore("127.0.0.1", 0, is_master=True)
        >>> store.set("key", "value")
        >>> store.wait(["key"])
        >>> store.close()
        """
        self._await(lambda: self.check(keys), timeout, f"the keys {', '.join(keys)}")

    def delete_key(self, key: str) -> bool:
        """Delete `key`; return whether it was set.

        Parameters
        ----------
        key : str
            The key.

        Returns
        -------
        bool
            Whether it was set.

        Examples
        --------
        >>> import gpucoll.distributed as dist
        >>> store = dist.TCPStore("127.0.0.1", 0, is_master=True)
        >>> store.set("key", "value")
        >>> store.delete_key("key")
        True
        >>> store.close()
        """
        was_set = self.check([key])
        self._call("delete", key)
        return was_set

    def close(self) -> None:
        """Leave the store; the process that holds it waits for the others to leave.

        Examples
        --------
        >>> import gpucoll.distributed as dist
        >>> store = dist.TCPStore("127.0.0.1", 0, is_master=True)
        >>> store.set("key", "value")
        >>> store.close()
        """
        for one in (self._client, self._server):
            if one is not None:
                PROCESS.stores.pop(one, None)
                one.close()


class _OpenServer(StoreServer):
    """A store for processes without numbers, with sums."""

    def answer(self, name: Any, frame: Frame) -> Frame:
        head, value = frame
        if head.get("call") != "add":
            return super().answer(name, ({"wait": 0.0, **head}, value))
        with self._changed:
            found = str(int(self.get(head["key"]) or b"0") + int(value)).encode()
            self.set(head["key"], found)
        return {"number": head.get("number"), "gone": []}, found
