"""What makes two nodes faster: a BERT-base classifier on two NCCL nodes that share one GPU and are connected over TCP.

    python benchmarks/two_nodes.py --work DIR --batches 32:32 --out nodes32.json
    python benchmarks/two_nodes.py --work DIR --batches 256:32 --env_file tuned.env       # accumulation; your own settings
    python benchmarks/two_nodes.py --work DIR --tiny --rows "plain DDP" padding-free --no_share      # on a CPU, over gloo
    python benchmarks/two_nodes.py --work DIR --tiny --hidden 256 --link 100mbit --no_share --steps 60 --warm 0 \\
        --batches 16:8 --rows "plain DDP" "local steps of 20" "local steps of 20, bfloat16"            # as root, over a slow link

Each node is one rank, started by its own `accelerate launch` with its own NCCL_HOSTID, over the loopback interface. With --link, two
network namespaces are connected by a cable of that rate (tc tbf), in each direction. Data and model come from synthetic.py. Rates are
read from rank 0's log.jsonl, after the warm-up. Those of local steps are from one synchronization to another.

The share of communication is 1 - (step without communication / step). The step without communication is measured with two runs of
one rank each, with the same options and half the batch, *at the same time on the same GPU*. They share the GPU as the two nodes do,
but never wait for each other. Nodes with their own GPUs would compute faster, so that the share would be larger there. Compiled
kernels are cached between runs, because only steady states are compared. --profile records the last steps, which are not timed,
and shows how long NCCL's kernels ran and how much of that time the rank computed at the same time.

Without NVIDIA MPS the kernels of two processes take turns on the GPU, so that one rank's NCCL kernel waits while the other rank
computes. With it (`nvidia-cuda-mps-control -d`, before this script) they run at the same time, as on two GPUs of half the size.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import synthetic
import vs_trainer

# The default of --env_file: settings that were fast for two nodes over the loopback interface.
TUNED = "NCCL_MIN_NCHANNELS=8 NCCL_SOCKET_NTHREADS=2 NCCL_NSOCKS_PERTHREAD=4 NCCL_ALGO=Ring NCCL_PROTO=Simple"
PROFILED = 5  # steps at the end of a run


@dataclasses.dataclass
class Row:
    compile: str = "off"
    padding_free: str = "off"
    hook: str = "none"
    is_tuned: bool = False
    bucket: int = 25  # MB; DDP's default
    nodes: int = 2
    sync: int = 0  # local steps between two synchronizations
    sync_dtype: str = "float32"

    def computing(self) -> tuple[str, str]:
        """Return the options on which the computation of a rank depends."""
        return self.compile, self.padding_free


ROWS = {
    "one node alone": Row(nodes=1),
    "plain DDP": Row(),
    "bf16 hook": Row(hook="bf16"),
    "fp16 hook": Row(hook="fp16"),
    "powersgd hook": Row(hook="powersgd"),
    "tuned NCCL": Row(is_tuned=True),
    "padding-free": Row(padding_free="on"),
    "padding-free, CUDA graphs": Row(padding_free="on", compile="auto"),  # a run of so few steps is not compiled
    "padding-free, CUDA graphs, tuned, bf16 hook": Row(padding_free="on", compile="auto", is_tuned=True, hook="bf16"),
    "padding-free, CUDA graphs, tuned, bf16 hook, buckets of 100 MB": Row(
        padding_free="on", compile="auto", is_tuned=True, hook="bf16", bucket=100
    ),
    "local steps of 20": Row(sync=20),
    "local steps of 20, bfloat16": Row(sync=20, sync_dtype="bfloat16"),
    "padding-free, CUDA graphs, local steps of 20": Row(padding_free="on", compile="auto", sync=20),
    "padding-free, CUDA graphs, local steps of 20, bfloat16": Row(
        padding_free="on", compile="auto", sync=20, sync_dtype="bfloat16"
    ),
    "all, local steps of 20, bfloat16": Row(compile="on", padding_free="on", is_tuned=True, sync=20, sync_dtype="bfloat16"),
    "all, float32 gradients": Row(compile="on", padding_free="on", is_tuned=True),
    "all, bf16 hook": Row(compile="on", padding_free="on", is_tuned=True, hook="bf16"),
    "all, bf16 hook, buckets of 100 MB": Row(compile="on", padding_free="on", is_tuned=True, hook="bf16", bucket=100),
}


def read_env(path: Path | None) -> dict[str, str]:
    """Return the variables of a file with one NAME=VALUE per line, also after `export`. Without a file, return TUNED."""
    lines = path.read_text().splitlines() if path else TUNED.split()
    lines = [line.strip().removeprefix("export ").strip() for line in lines]
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class Bench:
    def __init__(self, options: argparse.Namespace):
        self.options, self.work, self.began = options, options.work.resolve(), time.monotonic()
        os.environ |= vs_trainer.environment(self.work)
        import torch

        self.precision = "bf16" if torch.cuda.device_count() else "no"
        families, jobs = (
            (synthetic.TINY_FAMILIES, vs_trainer.TINY_JOBS) if options.tiny else (synthetic.FAMILIES, vs_trainer.JOBS)
        )
        self.family, self.job = families["bert"], jobs["bert32"]
        if options.items:
            self.family = dataclasses.replace(self.family, rows=options.items)
        if options.hidden:
            shape = {"hidden_size": options.hidden, "num_hidden_layers": 4, "intermediate_size": 4 * options.hidden}
            self.family = dataclasses.replace(self.family, shape={**self.family.shape, **shape})
        self.data = synthetic.make_data(self.work, "bert", self.family)
        self.model = synthetic.make_model(self.work, "bert", self.family, 0)
        self.tuned = read_env(options.env_file)
        vs_trainer.fill_our_cache(self.job, self.words(Row(), 32, 32, options.steps)[1:])

    def words(self, row: Row, batch: int, micro: int, steps: int, profile: str = "off") -> list[str]:
        extra = f"--comm_hook {row.hook} --bucket_cap_mb {row.bucket} --log_every 1"
        extra += f" --global_batch_size {batch} --micro_batch_size {min(micro, batch)}"
        extra += f" --compile {row.compile} --padding_free {row.padding_free} --profile {profile}"
        extra += f" --sync_every {row.sync} --sync_dtype {row.sync_dtype}" if row.sync else ""
        # A later option overrides an earlier one.
        return vs_trainer.our_command(self.job, self.family, self.data, self.model, self.precision, steps, 0, extra)

    def result(self, name: str, row: Row, batch: int, micro: int, apart: bool = False) -> dict[str, Any] | None:
        """Return the result of an earlier call, or run it. Return None if this call has no time left."""
        folder = self.work / "two_nodes" / f"{name.replace(' ', '_').replace(',', '')}-{batch}-{micro}"
        env = self.tuned if row.is_tuned else {}
        # All steps are needed to capture each length as a CUDA graph, to compile, and for separate runs to train at the same time.
        steps, warm = self.options.steps, self.options.warm
        steps, warm = (steps // 2, warm // 2) if row.compile == "off" and not apart and not row.sync else (steps, warm)
        last = steps - PROFILED if self.options.profile and not apart else steps
        profile = f"{last + 1}-{steps}" if last < steps else "off"
        command = self.words(row, batch // 2 if apart else batch, micro, steps, profile)
        spec = {"command": command, "env": env, "apart": apart, "nodes": row.nodes, "warm": warm, "link": self.options.link}
        if (folder / "result.json").exists():
            result = json.loads((folder / "result.json").read_text())
            if result["spec"] == spec and not (result["failed"] and self.options.retry):
                return result
        if self.options.limit and time.monotonic() - self.began > self.options.limit:
            print(f"{name}, batch {batch}: not started because of --limit", flush=True)
            return None
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        began = time.monotonic()
        result = {"spec": spec, "failed": self.run(spec, folder), "seconds": time.monotonic() - began}
        if not result["failed"]:
            result["seconds_per_step"] = seconds_per_step(sorted(folder.glob("run*/log.jsonl")), warm, last, row.sync)
            for summary in folder.glob("run0/profile/**/summary.json"):
                result["profile"] = json.loads(summary.read_text())["overall"]
            if not result["seconds_per_step"]:
                result["failed"] = "the runs did not train at the same time; use more --steps"
        for run in folder.glob("run*"):
            shutil.rmtree(run)  # it contains a checkpoint
        (folder / "result.json").write_text(json.dumps(result))
        what = result["failed"] or f"{result['seconds_per_step'] * 1e3:.1f} ms per step"
        print(f"{name}, batch {batch}: {what} (the run took {result['seconds']:.0f} s)", flush=True)
        return result

    def run(self, spec: dict[str, Any], folder: Path) -> str:
        """Run the nodes, and return why they failed, or "" if they did not."""
        env = {**os.environ, **spec["env"], "TORCHINDUCTOR_CACHE_DIR": str(self.work / "cache" / "inductor")}
        env |= {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1" if self.precision == "no" else "4"}
        port, started = str(free_port()), []
        for node in range(2 if spec["apart"] else spec["nodes"]):
            command = [sys.executable, *spec["command"], "--output_dir", str(folder / f"run{node if spec['apart'] else 0}")]
            if spec["nodes"] == 2 and not spec["apart"]:
                launch = ["-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/2node.yaml"]
                command[1:1] = [*launch, "--main_process_port", port, "--machine_rank", str(node)]
                if self.options.link:
                    at = command.index("--machine_rank")
                    command[at:at] = ["--main_process_ip", address(0)]
                    command = ["ip", "netns", "exec", namespace(node), *command]
            with (folder / f"node{node}.txt").open("w") as log:
                own = {**env, "NCCL_HOSTID": f"node{node}"}
                own |= {"NCCL_SOCKET_IFNAME": "cable", "GLOO_SOCKET_IFNAME": "cable"} if self.options.link else {}
                started.append(subprocess.Popen(command, env=own, cwd=vs_trainer.ROOT, stdout=log, stderr=subprocess.STDOUT))
        deadline = time.monotonic() + self.options.timeout
        try:
            codes = [process.wait(max(1, deadline - time.monotonic())) for process in started]
        except subprocess.TimeoutExpired:
            for process in started:
                process.terminate()  # a launcher ends its rank
            for process in started:
                process.wait(60)
            return f"more than {self.options.timeout:.0f} s"
        bad = next((node for node, code in enumerate(codes) if code), None)
        return "" if bad is None else f"{codes}: {vs_trainer.reason_in(folder / f'node{bad}.txt')}"


def seconds_per_step(logs: list[Path], warm: int, end: int, sync: int = 0) -> float:
    """Return the seconds per step after the warm-up and until step `end`, or 0 if there are too few steps.

    For several runs it is their mean over the time in which all of them were past the warm-up and still running. Local steps are
    logged at the next synchronization, so only those at a multiple of `sync` have their own time.
    """
    events = [[e for e in vs_trainer.read_events(log.parent) if e["event"] == "update"] for log in logs]
    is_timed = lambda step: warm <= step <= end and step % max(1, sync) == 0
    times = [{e["step"]: e["time"] for e in some if is_timed(e["step"])} for some in events]
    first, last = max(min(found.values()) for found in times), min(max(found.values()) for found in times)
    spans = []
    for found in times:
        inside = sorted((moment, step) for step, moment in found.items() if first <= moment <= last)
        if len(inside) < (2 if sync else 5):
            return 0.0
        spans.append((inside[-1][0] - inside[0][0]) / (inside[-1][1] - inside[0][1]))
    return sum(spans) / len(spans)


def namespace(node: int) -> str:
    return f"two-nodes-{os.getpid()}-{node}"


def address(node: int) -> str:
    return f"10.78.0.{node + 1}"


@contextlib.contextmanager
def cable(rate: str) -> Iterator[None]:
    """Connect two network namespaces by a cable of this rate, and remove them at the end. Without a rate, do nothing."""
    nodes = (0, 1) if rate else ()
    run = lambda words: subprocess.run(words.split(), check=True)
    try:
        for node in nodes:
            run(f"ip netns add {namespace(node)}")
        if rate:
            run(f"ip link add cable netns {namespace(0)} type veth peer name cable netns {namespace(1)}")
        for node in nodes:
            inside = f"ip -n {namespace(node)}"
            run(f"{inside} addr add {address(node)}/24 dev cable")
            run(f"{inside} link set cable up")
            run(f"{inside} link set lo up")
            run(f"ip netns exec {namespace(node)} tc qdisc add dev cable root tbf rate {rate} burst 256kb latency 100ms")
        yield
    finally:
        for node in nodes:
            subprocess.run(["ip", "netns", "delete", namespace(node)], check=False)


def main(options: argparse.Namespace) -> None:
    bench, found = Bench(options), []
    rows = {name: row for name, row in ROWS.items() if not options.rows or name in options.rows}
    for batch, micro in [map(int, entry.split(":")) for entry in options.batches]:
        plain = bench.result("plain DDP", ROWS["plain DDP"], batch, micro)
        apart: dict[tuple[str, str], float] = {}
        for name, row in rows.items():
            result = bench.result(name, row, batch, micro)
            if not result:
                continue
            if row.computing() not in apart and row.nodes == 2 and not result["failed"] and not options.no_share:
                alone = bench.result(f"apart {' '.join(row.computing())}", dataclasses.replace(
                    row, hook="none", is_tuned=False, nodes=1), batch, micro, apart=True)  # fmt: skip
                if alone and not alone["failed"]:
                    apart[row.computing()] = alone["seconds_per_step"]
            line = {"batch": batch, "micro": micro, "name": name, "failed": result["failed"]}
            if not result["failed"]:
                seconds = result["seconds_per_step"]
                line |= {"samples_per_second": batch / seconds, "seconds_per_step": seconds}
                if plain and not plain["failed"]:
                    line["ratio"] = plain["seconds_per_step"] / seconds
                line |= {name: result["profile"][name] for name in ("communication", "overlapped") if "profile" in result}
                if row.nodes == 2 and row.computing() in apart:
                    line |= {"seconds_without": apart[row.computing()], "share": 1 - apart[row.computing()] / seconds}
            found.append(line)
            if options.out:
                options.out.parent.mkdir(parents=True, exist_ok=True)
                whole = {"machine": vs_trainer.about_the_machine(), "tuned": bench.tuned, "rows": found}
                options.out.write_text(json.dumps(whole, indent=1))
    print(
        "\n| batch | | samples/s | ratio to plain DDP | ms per step | ms without communication | share of communication "
        "| NCCL, ms | of it hidden |"
    )
    print("|---" * 9 + "|")
    for line in found:
        first = f"| {line['batch']} ({line['micro']} at once) | {line['name']} |"
        if line["failed"]:
            print(first, "| | | | | | failed:", line["failed"].replace("|", "/"), "|")
            continue
        ratio = f"{line['ratio']:.2f}" if "ratio" in line else ""
        without = f"{line['seconds_without'] * 1e3:.1f} | {line['share']:.0%}" if "share" in line else " | "
        seen = (
            f"{line['communication'] * 1e3:.1f} | {line['overlapped'] / line['communication']:.0%}"
            if line.get("communication")
            else " | "
        )
        print(first, f"{line['samples_per_second']:.1f} | {ratio} | {line['seconds_per_step'] * 1e3:.1f} | {without} | {seen} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--work", type=Path, default=Path("runs/vs_trainer"), help="folder as in vs_trainer.py; complete runs are kept"
    )
    parser.add_argument("--batches", nargs="+", default=["32:32", "256:32"], help="global batch : largest micro-batch of a rank")
    parser.add_argument("--rows", nargs="+", choices=ROWS, help="default: all")
    parser.add_argument("--steps", type=int, default=120, help="half as many without CUDA graphs")
    parser.add_argument("--warm", type=int, default=80, help="steps before the measured ones; half as many without CUDA graphs")
    parser.add_argument("--env_file", type=Path, help="NCCL settings as `accel-ddp tune` writes them; default: TUNED")
    parser.add_argument("--no_share", action="store_true", help="do not measure the share of communication")
    parser.add_argument("--profile", action="store_true", help="record the last steps: how much communication is hidden")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and texts, for a CPU")
    parser.add_argument("--out", type=Path, help="a .json file for all results")
    parser.add_argument("--limit", type=float, default=0, help="seconds after which no further run is started")
    parser.add_argument("--timeout", type=float, default=300, help="seconds that one run may take")
    parser.add_argument("--retry", action="store_true", help="repeat runs that failed in an earlier call")
    parser.add_argument(
        "--hidden", type=int, default=0, help="hidden size of a model of 4 layers, instead of --tiny's or BERT-base's"
    )
    parser.add_argument("--items", type=int, default=0, help="training texts to generate; default: 25,600, with --tiny 1,024")
    parser.add_argument("--link", default="", help="rate of the link between the nodes, for example 1gbit; needs root")
    given = parser.parse_args()
    with cable(given.link):
        main(given)
