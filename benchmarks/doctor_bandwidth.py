"""The bandwidth that `accel-ddp doctor` reports, compared with a plain loop of all-reduces. The goal is a difference within 5 %.

    python benchmarks/doctor_bandwidth.py --rounds 5

There are two nodes on this machine. With a GPU they use NCCL over TCP, each with its own NCCL_HOSTID, and otherwise gloo. The
doctor and the plain loop take turns. The ratio is computed within each round, so that a machine that slows down slows both.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time

PLAIN_LOOP = """
import os, statistics, sys, time, torch, torch.distributed as dist
gpu, size = sys.argv[1] == "nccl", int(sys.argv[2])
device = torch.device("cuda", 0) if gpu else torch.device("cpu")
dist.init_process_group(sys.argv[1], device_id=device if gpu else None)
wait = torch.cuda.synchronize if gpu else (lambda: None)
buffer = torch.zeros(size // 4, device=device)
spans = []
for i in range(int(sys.argv[3]) + 10):
    began = time.perf_counter()
    dist.all_reduce(buffer)
    wait()
    if i >= 10:
        spans.append(time.perf_counter() - began)
spans = torch.tensor(spans, dtype=torch.float64, device=device)
dist.all_reduce(spans, op=dist.ReduceOp.MAX)
if dist.get_rank() == 0:
    print("seconds", statistics.median(spans.tolist()))
dist.destroy_process_group()
"""


def free_port() -> str:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return str(sock.getsockname()[1])


def run_two_nodes(words: list[str], port: str) -> str:
    """Run the command on both nodes and return what node 0 prints. Raise an error if one of them fails."""
    started = []
    for node in (0, 1):
        env = {
            **os.environ, "NCCL_HOSTID": f"node{node}", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "RANK": str(node),
            "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        }  # fmt: skip
        command = [sys.executable, *words]
        started.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    outputs = [process.communicate(timeout=300) for process in started]
    assert all(process.returncode == 0 for process in started), outputs
    return outputs[0][0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    ratios = []
    for number in range(1, rounds + 1):
        port, began = free_port(), time.monotonic()
        report = json.loads(run_two_nodes(["-m", "accel_ddp.doctor", "--json", "--main_process_port", port], port))
        took = time.monotonic() - began
        figures = report["collective"]
        largest = figures["bandwidth"][-1]
        plain = ["-c", PLAIN_LOOP, figures["backend"], str(largest["bytes"]), str(largest["times"])]
        seconds = float(run_two_nodes(plain, free_port()).split()[1])
        ratios.append(seconds / largest["seconds"])
        print(
            f"round {number}: {largest['bytes'] // 10**6} MB over {figures['backend']} ({figures['transport']}): "
            f"doctor {largest['seconds'] * 1e3:.2f} ms, plain loop {seconds * 1e3:.2f} ms, ratio of bandwidths {ratios[-1]:.3f}; "
            f"the whole doctor took {took:.1f} s"
        )
    print(f"median ratio {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


if __name__ == "__main__":
    main()
