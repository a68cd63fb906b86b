"""Finds the main node by a broadcast in the local network, for nodes that cannot use the main address.

If the main address is wrong on every node, node 0 finds this out by itself, and the others would wait for an address that is not
node 0's. Networks of clouds do not deliver broadcasts. There the other nodes report after their own time limit.
"""

import asyncio
import contextlib
import hmac
import ipaddress
import os
import select
import socket
import time

from accel_ddp.net.messages import make_proof

_NONCE = 16  # bytes
_QUERY, _ANSWER = b"accel-ddp query", b"accel-ddp answer"
_ANSWER_SECONDS = 0.3


class Responder(asyncio.DatagramProtocol):
    """Answers queries for the coordinator of a run. A query without the token of the run and its main address is ignored."""

    def __init__(self, token: bytes, main_address: str):
        self.token, self.main_address = token, main_address.encode()
        self.transport: asyncio.DatagramTransport | None = None

    async def open(self, port: int) -> None:
        """Listen on a UDP port. Without it the run works as well, so that nothing is raised."""
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().create_datagram_endpoint(lambda: self, local_addr=("0.0.0.0", port))

    def close(self) -> None:
        if self.transport:
            self.transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def datagram_received(self, data: bytes, sender: tuple) -> None:
        nonce, proof = data[:_NONCE], data[_NONCE:]
        if self.transport and hmac.compare_digest(proof, make_proof(self.token, _QUERY, self.main_address, nonce)):
            self.transport.sendto(make_proof(self.token, _ANSWER, self.main_address, nonce), sender)


def find_coordinator(token: bytes, main_address: str, port: int) -> str:
    """Return the IP address of the coordinator that answers a broadcast, or an empty string."""
    nonce = os.urandom(_NONCE)
    query = nonce + make_proof(token, _QUERY, main_address.encode(), nonce)
    expected = make_proof(token, _ANSWER, main_address.encode(), nonce)
    with contextlib.ExitStack() as stack:
        sockets = []
        for ip, broadcast in _broadcast_addresses():
            with contextlib.suppress(OSError):  # an interface that is just going down
                sock = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
                sock.bind((ip, 0))
                sock.sendto(query, (broadcast, port))
                sockets.append(sock)
        deadline = time.monotonic() + _ANSWER_SECONDS
        while sockets and (left := deadline - time.monotonic()) > 0:
            for sock in select.select(sockets, [], [], left)[0]:
                with contextlib.suppress(OSError):
                    data, sender = sock.recvfrom(256)
                    if hmac.compare_digest(data, expected):
                        return sender[0]
    return ""


def _broadcast_addresses() -> list[tuple[str, str]]:
    """Return (address, broadcast address) of each interface that leads to other hosts of a local network."""
    import psutil

    from accel_ddp.doctor.host import external_interfaces

    entries = psutil.net_if_addrs()
    found = []
    for name in external_interfaces():
        for entry in entries.get(name, []):
            if entry.family == socket.AF_INET and entry.netmask:
                network = ipaddress.ip_network(f"{entry.address}/{entry.netmask}", strict=False)
                found.append((entry.address, str(network.broadcast_address)))
    return found
