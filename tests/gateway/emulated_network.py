"""An emulated network between a server and its clients: rate, delay, queue and loss of each path.

Server and clients are in network namespaces of their own. The packets between them pass through two
TUN devices and this process, which delays them. So the kernel's TCP on both sides sees real round
trips, acknowledgements and losses. This needs Linux and root privileges. The namespaces and devices
are removed at the end.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import os
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

SERVER: Final = "10.213.0.1"
_CLIENTS: Final = "10.213.1.{}"
_CLONE_NEWNET: Final = 0x4000_0000
_TUNSETIFF: Final = 0x4004_54CA
_IFF_TUN_NO_PI: Final = 0x1001
_MTU: Final = 1500
_libc: Final = ctypes.CDLL(None, use_errno=True)

T = TypeVar("T")


class Namespace:
    """A network namespace, which exists as long as its thread.

    Attributes:
        thread: the system's id of the thread.
    """

    def __init__(self) -> None:
        """Create the namespace, with its own loopback device.

        Raises:
            OSError: the system or its rights do not allow it.
        """
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="namespace")
        try:
            self.thread = self.run(_unshare)
            self.ip("link", "set", "lo", "up")
        except BaseException:
            self._thread.shutdown()
            raise

    def run(self, function: Callable[..., T], *args: Any) -> T:
        """Return the result of a function that runs inside, such as one that opens a socket."""
        return self._thread.submit(function, *args).result()

    def ip(self, *command: str) -> None:
        """Run a command of `ip`.

        Raises:
            OSError: the command is missing or fails.
        """
        self.run(_run, ("ip", *command))

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Place sockets that this thread opens into the namespace while the context lasts."""
        with ExitStack() as files:
            own = files.enter_context(Path("/proc/thread-self/ns/net").open("rb"))
            path = Path(f"/proc/self/task/{self.thread}/ns/net")
            inside = files.enter_context(path.open("rb"))
            _set_namespace(inside.fileno())
            try:
                yield
            finally:
                _set_namespace(own.fileno())

    def close(self) -> None:
        """Leave the namespace, which ends with its last socket."""
        self._thread.shutdown()


@dataclass(slots=True)
class PathConditions:
    """The present conditions of the path to a client, which may change at any time.

    Attributes:
        bytes_s: rate towards the client in bytes per second, including headers of packets.
        delay_s: delay of each direction, in seconds.
        queue_bytes: size of the queue before the slow link, which drops further packets.
        passes: whether packets pass. Otherwise, all are lost.
        packets, num_bytes: packets with data that have passed to the client, and all bytes.
    """

    bytes_s: float = 1e9
    delay_s: float = 0.0
    queue_bytes: int = 64 << 10
    passes: bool = True
    packets: int = 0
    num_bytes: int = 0
    busy_until_s: float = 0.0

    def due_s(self, size: int, now_s: float) -> float | None:
        """Return when a packet to the client arrives, or None if it is lost."""
        start_s = max(self.busy_until_s, now_s)
        if not self.passes or (start_s - now_s) * self.bytes_s > self.queue_bytes:
            return None
        self.busy_until_s = start_s + size / self.bytes_s
        return self.busy_until_s + self.delay_s


class EmulatedNetwork:
    """A server's namespace and a clients' namespace with a path for each client.

    Attributes:
        server: namespace with the address `SERVER`.
        paths: conditions of the paths, by number of the client.
    """

    def __init__(self, paths: Mapping[int, PathConditions]) -> None:
        """Create the namespaces.

        Args:
            paths: conditions by number of the client, 1 to 254.

        Raises:
            OSError: the system or its rights do not allow it.
        """
        self.paths = paths
        self._by_address = {socket.inet_aton(_CLIENTS.format(n)): p for n, p in paths.items()}
        with ExitStack() as stack:
            self.server, self._clients = Namespace(), Namespace()
            stack.callback(self.server.close)
            stack.callback(self._clients.close)
            self._server_side = _device(self.server, (SERVER,))
            stack.callback(os.close, self._server_side)
            self._client_side = _device(self._clients, [_CLIENTS.format(n) for n in paths])
            stack.callback(os.close, self._client_side)
            self._close = stack.pop_all().close

    @contextmanager
    def running(self) -> Iterator[None]:
        """Pass packets in the running event loop while the context lasts, and then remove all."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._server_side, self._pass_to_clients)
        loop.add_reader(self._client_side, self._pass_to_server)
        try:
            yield
        finally:
            loop.remove_reader(self._server_side)
            loop.remove_reader(self._client_side)
            self._server_side, self._client_side = -1, -1
            self._close()

    async def connect(self, number: int, port: int, window_bytes: int = 0) -> socket.socket:
        """Return a connection of a client to a port of the server.

        Args:
            number: number of the client.
            window_bytes: size of its receive buffer, or 0 for the default.
        """
        connection = self._clients.run(socket.socket, socket.AF_INET, socket.SOCK_STREAM)
        connection.setblocking(False)
        if window_bytes:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window_bytes)
        connection.bind((_CLIENTS.format(number), 0))
        await asyncio.get_running_loop().sock_connect(connection, (SERVER, port))
        return connection

    def _pass_to_clients(self) -> None:
        loop = asyncio.get_running_loop()
        for packet in _packets(self._server_side):
            path, now_s = self._by_address.get(packet[16:20]), loop.time()
            due_s = None if path is None else path.due_s(len(packet), now_s)
            if path is not None and due_s is not None:
                loop.call_at(due_s, self._deliver, path, packet)

    def _deliver(self, path: PathConditions, packet: bytes) -> None:
        path.packets += _has_data(packet)
        path.num_bytes += len(packet)
        _write(self._client_side, packet)

    def _pass_to_server(self) -> None:
        loop = asyncio.get_running_loop()
        for packet in _packets(self._client_side):
            path = self._by_address.get(packet[12:16])
            if path is not None and path.passes:
                loop.call_later(path.delay_s, self._answer, packet)

    def _answer(self, packet: bytes) -> None:
        _write(self._server_side, packet)


def _has_data(packet: bytes) -> bool:
    """Return whether an IPv4 packet of TCP has data."""
    header_bytes = 4 * (packet[0] & 15)
    return len(packet) > header_bytes + 4 * (packet[header_bytes + 12] >> 4)


def _packets(device: int) -> Iterator[bytes]:
    """Yield the packets that wait in a device, without those of IPv6."""
    with suppress(BlockingIOError):
        while True:
            packet = os.read(device, _MTU + 64)
            if packet[0] >> 4 == 4:
                yield packet


def _write(device: int, packet: bytes) -> None:
    if device >= 0:
        os.write(device, packet)


def _device(namespace: Namespace, addresses: tuple[str, ...] | list[str]) -> int:
    """Create a TUN device with these addresses in a namespace, and return its descriptor."""
    device = namespace.run(_open_tun)
    for address in addresses:
        namespace.ip("addr", "add", f"{address}/32", "dev", "path0")
    namespace.ip("link", "set", "path0", "mtu", str(_MTU), "up")
    namespace.ip("route", "add", "default", "dev", "path0")
    return device


def _open_tun() -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", b"path0", _IFF_TUN_NO_PI))
    return device


def _run(command: tuple[str, ...]) -> None:
    ran = subprocess.run(command, capture_output=True, check=False)
    if ran.returncode:
        raise OSError(f"{' '.join(command)}: {ran.stderr.decode().strip()}")


def _unshare() -> str:
    """Move the present thread into a new namespace, and return the id of the thread."""
    if _libc.unshare(_CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "a network namespace is not permitted")
    return str(threading.get_native_id())


def _set_namespace(descriptor: int) -> None:
    if _libc.setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "the network namespace cannot be entered")


class TokenBucketLink:
    """A link between two namespaces whose direction to the client is a token bucket of the kernel.

    Attributes:
        server: namespace with the address `SERVER`.
    """

    def __init__(self, bytes_s: int, queue_s: float = 4.0) -> None:
        """Create the namespaces.

        Args:
            bytes_s: rate towards the client, in bytes per second.
            queue_s: seconds for which a packet may wait before it is dropped.

        Raises:
            OSError: the system or its rights do not allow it.
        """
        self.server, self._client = Namespace(), Namespace()
        names = ("link0", "type", "veth", "peer", "name", "link1", "netns")
        self.server.ip("link", "add", *names, self._client.thread)
        for namespace, device, address in (
            (self.server, "link0", SERVER),
            (self._client, "link1", _CLIENTS.format(1)),
        ):
            namespace.ip("addr", "add", f"{address}/16", "dev", device)
            namespace.ip("link", "set", device, "up")
        limits = ("rate", f"{8 * bytes_s}bit", "burst", "1600", "latency", f"{queue_s}s")
        self.server.run(_run, ("tc", "qdisc", "add", "dev", "link0", "root", "tbf", *limits))

    async def connect(self, port: int) -> socket.socket:
        """Return a connection of the client to a port of the server."""
        connection = self._client.run(socket.socket, socket.AF_INET, socket.SOCK_STREAM)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, (SERVER, port))
        return connection

    def close(self) -> None:
        """Remove the link."""
        self.server.close()
        self._client.close()
