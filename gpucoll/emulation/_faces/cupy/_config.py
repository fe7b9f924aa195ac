"""The configuration of an NCCL communicator, with NCCL's struct inside."""

import ctypes
import struct

UNSET = -(1 << 31)  # NCCL_CONFIG_UNDEF_INT
LAYOUT = "NIIiiiiPiiPiiii"  # ncclConfig_t of NCCL 2.27


class NcclConfig(bytes):
    """As in CuPy, the object has NCCL's struct inside, and CuPy itself sets one field."""

    def __new__(cls, split_share=0):
        return super().__new__(cls, struct.pack(LAYOUT, struct.calcsize(LAYOUT), 0xCAFEBEEF, 22700, *4 * [UNSET], 0,
                                                split_share, UNSET, 0, *4 * [UNSET]))

    split_share = property(lambda self: self.fields().get("splitShare", 0))

    def fields(self):
        """Return the fields set by the program, by NCCL's names; an address stands for a text."""
        names = ("blocking", "cgaClusterSize", "minCTAs", "maxCTAs", "netName", "splitShare", "trafficClass",
                 "commName", "collnetEnable", "CTAPolicy", "shrinkShare", "nvlsCTAs")
        given = zip(names, struct.unpack(LAYOUT, self)[3:], strict=True)
        return {name: ctypes.string_at(value).decode() if name.endswith("Name") else value
                for name, value in given if value not in (UNSET, 0)}
