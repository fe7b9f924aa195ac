"""The names and capabilities that torch requires of a process group."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ProcessGroup


class Names(ProcessGroup):
    """The names, capabilities and no-ops that torch requires of a group."""

    supports_splitting = supports_coalescing = False
    _name = _desc = ""

    def getBackendName(self) -> str:
        return "gpucoll"

    name = _get_backend_name = getBackendName

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._desc

    def setGroupDesc(self, desc: str) -> None:
        self._desc = desc

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._desc

    _device_types = property(lambda self: [torch.device(kind) for kind in ("cpu", "cuda")[:1 + self._has_cuda]])
    _has_cuda = property(lambda self: torch.cuda.is_available())

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: every group counts calls from the first call."""

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Do nothing: the first call on a device connects the device."""
