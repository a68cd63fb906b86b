"""The whole tuning from the main node: all-reduce trials, DDP trials, and the files with the best values.

A trial that hangs or fails is ended on every node and shown in the table, and the tuning continues with the next trial.
"""

import asyncio
import json
import shlex
import sys
import time

from accel_ddp.measure import tune_results
from accel_ddp.measure.trials import TrialRunner, TuneCoordinator, TuningEnded
from accel_ddp.measure.tune_options import OWN_RANKS, TuneOptions
from accel_ddp.measure.tune_results import DdpConfig, Entries, Gradients, Transport, Trial
from accel_ddp.measure.tune_settings import DdpTuner, SettingsTuner
from accel_ddp.nodes.spawn import MODULE
from accel_ddp.nodes.topology import describe_ranks
from accel_ddp.records.tuned_settings import DEFAULT_BUCKET, make_file, model_key
from accel_ddp.text import counted, format_bytes, plural

SHAPES_MODULE = "accel_ddp.memory.gradient_shapes"  # started as a subprocess, because it is in a higher layer and imports torch
SHAPES_SECONDS = 180.0  # torch may be read from a slow network disk
WRITE_SECONDS = 15.0


class Tuner:
    def __init__(self, coordinator: TuneCoordinator, options: TuneOptions, ranks_of_nodes: list[int], main_ip: str):
        self.coordinator, self.options, self.ranks_of_nodes = coordinator, options, ranks_of_nodes
        self.nodes, self.exact_bucket = coordinator.nodes, DEFAULT_BUCKET  # without a hook, which later runs use
        self.runner = TrialRunner(coordinator, sum(ranks_of_nodes), main_ip, options.trial_seconds)
        self.show = coordinator.print_on_all

    async def run(self) -> None:
        """Tune, and end the agents of all nodes with an exit code, whatever happens."""
        try:
            await self.coordinator.wait_for_members()
            await self.tune()
            await self._end(0, "")
        except TuningEnded as ended:
            await self._end(ended.code, ended.text)
        except Exception as error:  # a bug here must not leave the other nodes waiting
            await self._end(1, f"the tuning failed: {type(error).__name__}: {error}")
            raise

    async def _end(self, code: int, text: str) -> None:
        await self.coordinator.send_to_all({"do": "close", "code": code, "text": text})

    async def tune(self) -> None:
        """Measure, and write the best values to files. Raises TuningEnded if the tuning cannot be completed."""
        began, minutes = time.monotonic(), self.options.minutes
        await self.show(
            f"tuning {sum(self.ranks_of_nodes)} ranks on {counted(self.nodes, 'node')} "
            f"({self.coordinator.hosts}), for at most {minutes:g} {plural(minutes, 'minute')} (--minutes)"
        )
        gradients = await self.read_gradients()
        settings_tuner = SettingsTuner(self.runner, self.options, gradients, began)
        default, transport = await settings_tuner.measure_default()
        best = await settings_tuner.tune(default, transport)
        ddp_best = None
        if gradients.entries:
            ddp_tuner = DdpTuner(self.runner, self.options, gradients, transport.is_nccl, deadline=began + minutes * 60)
            ddp_best = await ddp_tuner.tune(best)
            self.exact_bucket = ddp_tuner.exact_bucket()
        await self.conclude(default, best, ddp_best, transport)

    async def read_gradients(self) -> Gradients:
        options = self.options
        if not options.model and not options.model_bytes:
            await self.show("bucket sizes and communication hooks are not tuned: there is no recipe, --model or --model_bytes")
            return Gradients([])
        entries = tune_results.entries_of_size(options.model_bytes) if options.model_bytes else await self._read_entries()
        is_lora = bool(options.model.get("lora_r"))  # adapters are trained in float32
        gradients = Gradients(entries, "float32" if is_lora else options.model.get("dtype", "auto").replace("auto", "float32"))
        await self.show(f"gradients: {tune_results.count_elements(entries):,} elements, {format_bytes(gradients.bytes)}")
        return gradients

    async def _read_entries(self) -> Entries:
        """Return the shapes of the model's parameters, which a subprocess finds. Raises TuningEnded if it does not."""
        name = self.options.model["model"]
        await self.show(f"reading the parameter shapes of --model {name} ...")
        command, pipe = [sys.executable, *MODULE, SHAPES_MODULE, json.dumps(self.options.model)], asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe, start_new_session=True)
        try:
            stdout, stderr = await asyncio.wait_for(process.communicate(), SHAPES_SECONDS)
            answer = json.loads(stdout.decode().strip().splitlines()[-1])
        except asyncio.TimeoutError:
            raise TuningEnded(2, f"--model {name}: reading its config took more than {SHAPES_SECONDS:.0f} s.") from None
        except (ValueError, IndexError):
            last = (stderr.decode(errors="replace").strip().splitlines() or ["no error message"])[-1]
            answer = {"error": f"--model {name}: reading its parameter shapes failed: {last}."}
        finally:
            if process.returncode is None:
                process.kill()
        if "error" in answer:
            text = "Alternatively give only the size of its gradients in bytes, for example --model_bytes 440000000."
            raise TuningEnded(2, f"error: {answer['error']} {text}")
        return answer["entries"]

    async def conclude(self, default: Trial, best: Trial, ddp_best: tuple[DdpConfig, float] | None, transport: Transport) -> None:
        lines = [f"best settings: {best.label}, {default.score / best.score:.2f} times the default's speed"]
        if ddp_best:
            config, speedup = ddp_best
            options = f"bucket_cap_mb {config.bucket_cap_mb}, comm_hook {config.comm_hook}"
            lines.append(f"best DDP options: {options}, {speedup:.2f} times the default's speed")
        nodes = [(member.hello["host"], num) for member, num in zip(self.coordinator.members, self.ranks_of_nodes)]
        ranks = describe_ranks(nodes)
        ranks += f" ({self.coordinator.hosts})" if len(set(self.ranks_of_nodes)) == 1 else ""
        header = [f"{time.strftime('%Y-%m-%d %H:%M')}, {ranks}, {transport.device}, {transport.version}", *lines]
        files = {"tuned.env": tune_results.env_text(header, best.settings)}
        if ddp_best:
            model = self.options.model.get("model") or f"--model_bytes {self.options.model_bytes}"
            files["tuned.yaml"] = tune_results.yaml_text([*header, f"model: {model}"], config)
        if best.settings:
            lines.append("export " + " ".join(f"{name}={shlex.quote(value)}" for name, value in best.settings.items()))
        obsolete = [name for name in self.coordinator.members[0].hello["environment"] if name not in best.settings]
        if obsolete:
            lines.append(f"unset {' '.join(obsolete)}  # set in node 0's environment, but not part of the best settings")
        await self.show("\n".join(lines))
        for_runs = make_file(
            nodes, transport.device, best.settings, version=transport.version, network=self.coordinator.members[0].hello["network"],
            model=model_key(self.options.model) if self.options.model else "", bucket_cap_mb=self.exact_bucket,
            comm_hook=ddp_best[0].comm_hook if ddp_best else "none",
        )  # fmt: skip
        is_complete = await self._write(files, for_runs)
        for node in range(self.nodes):
            out = shlex.quote(str(self.coordinator.members[node].hello["out"]).rstrip("/"))
            config = f" --config {out}/tuned.yaml" if ddp_best else ""
            launch = self.options.launch.replace(OWN_RANKS, str(self.ranks_of_nodes[node]))
            text = "Later runs on these nodes use the settings and the bucket size by themselves; --tuned off ignores them.\n"
            text += f"To use the result, run on every node:\n  set -a; . {out}/tuned.env; set +a\n  {launch}{config}"
            await self.coordinator.members[node].send({"do": "print", "text": text})
        if not is_complete:
            raise TuningEnded(1, "Some files could not be written. The reasons and the best settings are printed above.")

    async def _write(self, files: dict[str, str], for_runs: dict[str, str]) -> bool:
        """Write the files on all nodes, the main node first, because they may share its disk. Return whether all are there."""
        is_complete = True
        for node in range(self.nodes):
            await self.coordinator.members[node].send({"do": "write", "files": files, "for_runs": for_runs})
            deadline = time.monotonic() + WRITE_SECONDS
            answer = {"lines": [f"could not write its files within {WRITE_SECONDS:.0f} s: its disk does not answer"]}
            while received := await self.coordinator.next_event(deadline):
                if received[0] == node and received[1].get("event") == "written":
                    answer = received[1]
                    break
            is_complete = is_complete and answer.get("is_complete", False)
            await self.show("\n".join(f"{self.coordinator.name(node)}: {line}" for line in answer["lines"]))
        return is_complete
