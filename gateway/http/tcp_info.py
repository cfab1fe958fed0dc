"""Statistics of a TCP connection on Linux (`TCP_INFO`).

For encrypted connections, bytes are those after encryption. The rate of a path is that of its
acknowledged bytes. TCP's delivery rate is not used, because Linux computes it as if packets had the
full size, and those of a stream are small.
"""

from __future__ import annotations

import socket
import struct
import sys
from typing import Any, Final, NamedTuple

_FIELDS: Final = struct.Struct("=68xI28xI16xQ20xI16xQQQ")
"""From `struct tcp_info` in Linux's `tcp.h`: rtt, total_retrans, bytes_acked, min_rtt, busy_time,
rwnd_limited and sndbuf_limited. Linux 4.10 and newer have all of them."""

_UNKNOWN_RTT: Final = 0xFFFF_FFFF


class TcpInfo(NamedTuple):
    """Statistics of a connection since its beginning. Times are in seconds.

    Attributes:
        retransmits: number of retransmitted segments.
        acked_bytes: bytes that the client has acknowledged.
        min_rtt_s: shortest round trip of the last minutes, or the smoothed one before it is known.
        busy_s: time with unacknowledged data.
        rwnd_s, sndbuf_s: parts of this time in which the client's receive window and this node's
            send buffer were the limit.
    """

    retransmits: int
    acked_bytes: int
    min_rtt_s: float
    busy_s: float
    rwnd_s: float
    sndbuf_s: float


def tcp_info(connection: Any) -> TcpInfo | None:
    """Return the statistics of a connection, or None if the system has none.

    Args:
        connection: a socket, or the `socket` of an event loop's transport.
    """
    if sys.platform != "linux" or connection.family not in {socket.AF_INET, socket.AF_INET6}:
        return None
    try:
        found = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _FIELDS.size)
    except OSError:
        return None  # closed
    if len(found) < _FIELDS.size:
        return None
    rtt_us, retransmits, acked, least_us, busy_us, rwnd_us, sndbuf_us = _FIELDS.unpack(found)
    rtt_s = (rtt_us if least_us == _UNKNOWN_RTT else least_us) / 1e6
    return TcpInfo(retransmits, acked, rtt_s, busy_us / 1e6, rwnd_us / 1e6, sndbuf_us / 1e6)
