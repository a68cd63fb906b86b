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

from accel_ddp.nodes.messages import make_proof, printable

_NONCE, _PROOF = 16, 32  # bytes
_QUERY, _SAME, _OTHER = b"accel-ddp query", b"accel-ddp same", b"accel-ddp other"
_MOST_SEEKERS = 64
_ANSWER_SECONDS = 0.3


class Responder(asyncio.DatagramProtocol):
    """Answers nodes that look for a coordinator with its token. `seekers` are those that have another main address."""

    def __init__(self, token: bytes, main_address: str):
        self.token, self.main_address = token, main_address.encode()
        self.transport: asyncio.DatagramTransport | None = None
        self.seekers: dict[str, str] = {}  # address of a node -> the main address that it was given

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
        nonce, proof, wanted = data[:_NONCE], data[_NONCE : _NONCE + _PROOF], data[_NONCE + _PROOF :]
        if not hmac.compare_digest(proof, make_proof(self.token, _QUERY, nonce, wanted)) or not self.transport:
            return
        if wanted != self.main_address and len(self.seekers) < _MOST_SEEKERS:
            self.seekers[sender[0]] = printable(wanted.decode(errors="replace"))
        self.transport.sendto(make_proof(self.token, _SAME if wanted == self.main_address else _OTHER, nonce), sender)


def find_coordinator(token: bytes, main_address: str, port: int) -> tuple[str, bool]:
    """Return the IP address of a coordinator with this token that answers a broadcast, and whether its main address is the same.

    The address is empty if there is none. A coordinator with another main address may belong to another run of the same script.
    """
    nonce, wanted = os.urandom(_NONCE), main_address.encode()
    query = nonce + make_proof(token, _QUERY, nonce, wanted) + wanted
    same, other = (make_proof(token, kind, nonce) for kind in (_SAME, _OTHER))
    found = ""
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
                    if hmac.compare_digest(data, same):
                        return sender[0], True
                    if hmac.compare_digest(data, other):
                        found = sender[0]
    return found, False


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
