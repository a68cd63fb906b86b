"""On the main node: trial after trial, told to all nodes, and in the end the best of them in files.

A trial that hangs, fails or is refused is ended on every node, named in the table, and the next one comes.
"""

import asyncio
import json
import math
import shlex
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from accel_ddp.tune import ddp, results, search, shapes
from accel_ddp.tune.results import Trial
from accel_ddp.tune.together import Conductor, Ended
from accel_ddp.tune.trials import END_SECONDS, FIRST_SECONDS, Trials

SHAPES_MODULE = "accel_ddp.gradient_shapes"  # started as a subprocess, because it is in a higher layer and imports torch
FOR_SETTINGS = 0.6  # of the time, where there is a model to be timed too


@dataclass(kw_only=True)
class Wish:
    """What is to be tuned, the same on every node."""

    minutes: float
    trial_seconds: float
    backend: str
    tries: list[dict[str, str]] = field(default_factory=list)
    model: dict[str, Any] = field(default_factory=dict)  # options of a recipe; empty: no model
    model_bytes: int = 0
    tokens: int = 0  # of each rank in a step; 0: by the device
    autocast: str = ""  # dtype of mixed precision
    launch: str = "accelerate launch"  # how the user starts, for the last words
    out: str = "accelerate_configs"  # of this node


class Course:
    def __init__(self, conductor: Conductor, wish: Wish, local: int, ip: str):
        self.all, self.wish, self.local = conductor, wish, local
        self.nodes, self.ranks = conductor.nodes, conductor.nodes * local
        self.trials = Trials(conductor, local, ip, wish.trial_seconds)
        self.sizes = list(search.SIZES)
        self.entries: list[list[Any]] = []  # the model's parameters, see `shapes`
        self.gradient_bytes = 0
        self.connected: dict[str, Any] = {}  # what rank 0 said of its device and transport

    async def run(self) -> None:
        """Ended, always: with exit code 0, or with what went wrong."""
        try:
            await self.all.gather()
            await self.tune()
            raise Ended(0, "")
        except Ended as ended:
            await self.all.tell({"do": "end", "code": ended.args[0], "text": ended.args[1]})
        except Exception as error:  # a fault of ours must not leave the other nodes waiting
            await self.all.tell({"do": "end", "code": 1, "text": f"the tuning failed: {type(error).__name__}: {error}"})
            raise

    async def tune(self) -> None:
        self.began = time.monotonic()
        self.deadline = self.began + self.wish.minutes * 60
        hosts = ", ".join(self.all.members[node][0]["host"] for node in range(min(self.nodes, 16)))
        await self.all.say(
            f"tuning {self.ranks} ranks on {self.nodes} node{'s' * (self.nodes > 1)} ({hosts}), for {self.wish.minutes:g} "
            f"minute{'s' * (self.wish.minutes != 1)} at most (--minutes)"
        )
        await self.find_shapes()
        default = await self.reduce_trial(Trial(0, {}))
        if default.failed:
            raise Ended(
                1, f"The default settings failed: {default.failed}. Nothing can be compared with them; `accel-ddp doctor` on "
                "every node (with its collectives) looks for the reason.",
            )  # fmt: skip
        best = await self.tune_settings(default)
        config = await ddp.tuned(self, best) if self.entries else {}
        await self.conclude(default, best, config)

    async def find_shapes(self) -> None:
        if self.wish.model_bytes:
            self.entries = shapes.of_bytes(self.wish.model_bytes)
        elif self.wish.model:
            command = [sys.executable, "-m", SHAPES_MODULE, json.dumps(self.wish.model)]
            await self.all.say(f"reading the shapes of --model {self.wish.model['model']} ...")
            pipe = asyncio.subprocess.PIPE
            child = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe, start_new_session=True)
            working = asyncio.ensure_future(child.communicate())
            try:
                deadline = time.monotonic() + FIRST_SECONDS
                while not working.done():  # and hear meanwhile whether a node is lost
                    await self.all.next(time.monotonic() + 0.1)
                    if time.monotonic() > deadline:
                        raise Ended(2, f"--model {self.wish.model['model']}: its config took more than {FIRST_SECONDS:.0f} s.")
                out, err = working.result()
            finally:
                working.cancel()
                if child.returncode is None:
                    child.kill()
            try:
                found = json.loads(out.decode().strip().splitlines()[-1])
            except (ValueError, IndexError):
                last = (err.decode(errors="replace").strip().splitlines() or ["no words"])[-1]
                found = {"error": f"--model {self.wish.model['model']}: its shapes cannot be found: {last}"}
            if "error" in found:
                raise Ended(2, f"error: {found['error']} Or give the size alone: --model_bytes 440000000.")
            self.entries = found["entries"]
        if self.entries:
            parameters = shapes.count(self.entries)
            size = self.gradient_bytes = max(4, parameters * self.bytes_each // 4 * 4)
            await self.all.say(f"gradients: {parameters:,} numbers, {results.size_words(size)}")
            if size < search.SIZES[1]:  # never sends more at once
                self.sizes = sorted({*self.sizes[:2], size})
        else:
            await self.all.say("no recipe, --model or --model_bytes: buckets and communication hooks are not tuned")

    @property
    def dtype(self) -> str:
        return self.wish.model.get("dtype", "float32") if not self.wish.model.get("lora_r") else "float32"

    @property
    def bytes_each(self) -> int:
        return 4 if self.dtype == "float32" else 2

    async def tune_settings(self, default: Trial) -> Trial:
        """The fastest settings; the default where nothing is faster by more than noise."""
        said, best = self.connected, default
        ways = " and ".join(said["paths"]) or "a way that its log does not tell"
        over = f" through {', '.join(said['interfaces'])}" if said["interfaces"] else ""
        is_nccl = said["backend"] == "nccl"
        by_sockets = is_nccl and any("Socket" in path for path in said["paths"] or [said["network"]])
        if is_nccl:
            await self.all.say(f"transport: NCCL {ways}, network {said['network']}{over}")
            if not by_sockets:
                await self.all.say(f"NCCL's socket settings are not tried: {self.why_no_sockets(said)}")
        else:
            await self.all.say("NCCL's settings are not tried: without GPUs it is gloo over TCP, which has none of them")
        ends = self.began + self.wish.minutes * 60 * (FOR_SETTINGS if self.entries else 1.0)
        variable = "NCCL_SOCKET_IFNAME" if is_nccl else "GLOO_SOCKET_IFNAME"
        hellos = [self.all.members[node][0] for node in range(self.nodes)]
        several = search.interface_choices([hello["interfaces"] for hello in hellos]) if by_sockets or not is_nccl else []
        first = [Trial(0, settings, note="--try") for settings in self.wish.tries]
        if by_sockets and (mine := hellos[0]["environment"]):
            first.append(Trial(0, mine, note="as in node 0's environment"))
        if several and self.nodes > 1 and not any(hello["chosen"] for hello in hellos):
            first += [Trial(0, {}, interfaces=choice, variable=variable) for choice in several]
        steps = search.walk(self.nodes, default.score) if by_sockets else None
        expected = len(first) + (12 if by_sockets else 0)
        if expected:
            each, ends_at = self.trials.lasted, (ends - self.began) / 60
            about = f"a trial takes about {each:.0f} s: {expected} of them about {expected * each / 60:.1f} minutes"
            await self.all.say(f"{about}; no new one after {ends_at:.1f} minutes")
        measured: list[Trial] = []
        answer: float | None = None  # of the walk's last settings
        while True:
            is_first = bool(first)
            if is_first:
                trial = first.pop(0)
            else:
                try:
                    settings = steps.send(answer) if steps else None
                except StopIteration:
                    settings = None
                if settings is None:
                    break
                trial = Trial(0, settings, interfaces=best.interfaces, variable=best.variable)
            if time.monotonic() + self.trials.lasted > ends:
                await self.all.say(f"the time for settings is used up after {self.trials.number} trials (--minutes is longer)")
                break
            trial = await self.reduce_trial(trial, default, best)
            score = None if trial.failed or trial.early else trial.score
            if score is not None:
                measured.append(trial)
                best = trial if score < best.score * search.BETTER else best
            answer = None if is_first else score
        return await self.confirmed(default, best, measured, ends)

    def why_no_sockets(self, said: dict[str, Any]) -> str:
        network = f"{said['network']} {' '.join(said['paths'])}"
        if self.nodes == 1 or not any("NET" in path for path in said["paths"]):
            return "these ranks do not talk through sockets (NVLink, PCIe or shared memory)"
        if "IB" in network:
            return "InfiniBand or RoCE carries the data; sockets only open connections"
        if "OFI" in network or "Libfabric" in network:
            return "the libfabric plugin (EFA) carries the data and brings its own tuning"
        return f"the network is {said['network']}, not sockets"

    async def confirmed(self, default: Trial, best: Trial, measured: list[Trial], ends: float) -> Trial:
        """The best of many is partly the luckiest: it and the default are measured once more, of the best the worse counts, and
        where others are then ahead of it, so are they."""
        if best is default:
            return default
        ends = max(ends, self.deadline - 4 * self.trials.lasted)
        if time.monotonic() + 2 * self.trials.lasted < ends:
            default.score = min(default.score, (await self.reduce_trial(Trial(0, default.settings, note="again"), default)).score)
            others = sorted((trial for trial in measured if trial is not best), key=lambda trial: trial.score)
            candidates, best = [best, *others], default
            for at, trial in enumerate(candidates):
                if trial.score >= best.score * search.BETTER or (at and time.monotonic() + self.trials.lasted > ends):
                    break
                once_more = Trial(0, trial.settings, trial.interfaces, trial.variable, note="again")
                await self.reduce_trial(once_more, default)
                trial.score = math.inf if once_more.failed else max(trial.score, once_more.score)
                for size, ms in once_more.milliseconds.items():
                    trial.milliseconds[size] = max(ms, trial.milliseconds.get(size, ms))
                best = trial if trial.score < best.score * search.BETTER else best
        return best if best.score < default.score * search.BETTER else default

    async def reduce_trial(self, trial: Trial, default: Trial | None = None, best: Trial | None = None) -> Trial:
        """All-reduce of all sizes under the trial's settings; its row on every node."""
        known = best.milliseconds if best else {}
        spec = {
            "part": "reduce", "backend": self.wish.backend, "seconds": self.wish.trial_seconds, "log": default is None,
            "sizes": self.sizes, "best": {str(size): ms for size, ms in known.items() if size >= search.SIZES[1]},
        }  # fmt: skip
        said, trial.failed = await self.trials.on_all(trial, spec)
        trial.number = self.trials.number
        for one in said:
            if one["at"] == "measured":
                trial.milliseconds[int(one["size"])] = float(one["ms"])
                trial.early = trial.early or bool(one["early"])
        if not trial.failed and not trial.milliseconds:
            trial.failed = "it measured nothing"
        if not trial.failed:
            trial.score = search.score(trial.milliseconds, self.gradient_bytes)
        if default is None:
            if connected := self.trials.connected.get(0):
                self.connected = {**connected}
                for name in ("paths", "interfaces"):  # of all: a rank may talk to those of its own node alone
                    self.connected[name] = sorted({word for one in self.trials.connected.values() for word in one[name]})
                await self.all.say(f"{self.connected['version']}, {self.connected['device']}")
            await self.all.say(results.heading(self.sizes))
        await self.all.say(results.row(trial, self.sizes, default.score if default else trial.score))
        return trial

    async def conclude(self, default: Trial, best: Trial, config: dict[str, Any]) -> None:
        largest = max(best.milliseconds)
        was = results.number_words(default.milliseconds.get(largest, math.nan))
        ratio = f"default {was} ms; {default.score / best.score:.2f} times the default's speed over the sizes that count"
        ratio = ratio if best is not default else "that is the default"
        hosts = ", ".join(self.all.members[node][0]["host"] for node in range(min(self.nodes, 16)))
        header = [
            f"{time.strftime('%Y-%m-%d %H:%M')}, {self.nodes} nodes ({hosts}) x {self.local} ranks, {self.connected['device']}, "
            f"{self.connected['version']}",
            f"all-reduce of {results.size_words(largest)}: {results.number_words(best.milliseconds[largest])} ms; " + ratio,
        ]  # fmt: skip
        files = {node: {"tuned.env": results.env_text(header, best.of_node(node))} for node in range(self.nodes)}
        if len({one["tuned.env"] for one in files.values()}) > 1:  # other names of interfaces; the disk may be shared
            files = {node: {f"tuned.{node}.env": one["tuned.env"]} for node, one in files.items()}
        if config:
            of_model = self.wish.model.get("model") or f"--model_bytes {self.wish.model_bytes}"
            of_step = [f"model: {of_model}; a step in 1/{config['faster']:.2f} of the time with DDP's defaults"]
            text = results.yaml_text([*header, *of_step], config)
            files = {node: {**one, "tuned.yaml": text} for node, one in files.items()}
        exports = " ".join(f"{name}={shlex.quote(value)}" for name, value in best.of_node(0).items())
        lines = [f"best settings: {best.words}, {default.score / best.score:.2f} times the default's speed"]
        if config:
            lines.append(
                f"best for the model: bucket_cap_mb {config['bucket_cap_mb']}, comm_hook {config['comm_hook']}: "
                f"{config['faster']:.2f} times the default's speed"
            )
        lines += [f"export {exports}"] if exports else []
        in_the_way = [name for name in self.all.members[0][0]["environment"] if name not in best.settings]
        lines += [f"unset {' '.join(in_the_way)}  # set in node 0's environment, and not among the best"] if in_the_way else []
        await self.all.say("\n".join(lines))
        wrong = False
        for node in range(self.nodes):  # the main node first: on a shared disk the others find its files
            await self.all.tell({"do": "write", "files": files[node]}, only=node)
            deadline = time.monotonic() + END_SECONDS
            while (heard := await self.all.next(deadline)) and not (heard[0] == node and "wrote" in heard[1]):
                pass
            wrote = heard[1]["wrote"] if heard else ["said nothing about its files: its disk does not answer"]
            wrong = wrong or any(not line.startswith("wrote") and "already" not in line for line in wrote)
            await self.all.say("\n".join(f"{self.all.name(node)}: {line}" for line in wrote))
        names = "tuned.$NODE_RANK.env" if "tuned.env" not in files[0] else "tuned.env"
        for node in range(self.nodes):
            out = shlex.quote(str(self.all.members[node][0]["out"]).rstrip("/"))
            more = f" --config {out}/tuned.yaml" if config else ""
            text = f"use it, on every node:\n  set -a; . {out}/{names}; set +a\n  {self.wish.launch}{more}"
            await self.all.tell({"do": "say", "text": text}, only=node)
        if wrong:
            raise Ended(1, "some files could not be written, see above; the settings are in the lines before")
