"""What happens once per process: an Accelerator for this world, a folder for the run, and words for how it ended."""

import contextlib
import fcntl
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, DDPCommunicationHookType, DistributedDataParallelKwargs

from accel_ddp import checkpoint, snapshot, stop, world
from accel_ddp.config import TrainConfig, as_plain_dict, tell_the_launcher
from accel_ddp.environment.launcher import check_requested_world, cpu_is_wanted, find_accelerate_request
from accel_ddp.environment.topology import is_local_main
from accel_ddp.errors import UserError
from accel_ddp.seeds import mixed
from accel_ddp.world import HOST, LOCAL_RANKS, NUM_RANKS, RANK


def start(cfg: TrainConfig) -> Accelerator:
    """An Accelerator over exactly the ranks that were launched, or a UserError on every rank."""
    _refuse_what_we_do_not_train()
    check_requested_world()
    if "TORCHELASTIC_RUN_ID" in os.environ or find_accelerate_request():
        # A launcher that is killed, and that of a single process also by SIGTERM, leaves its ranks to train on, unseen.
        world.end_with_the_parent(signal.Signals[f"SIG{cfg.stop_signal}"])
    trackers = _known_trackers(cfg.report_to)
    cfg.split(NUM_RANKS)
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no") if cfg.mixed_precision == "auto" else cfg.mixed_precision
    use_gpu = world.meet(cfg, precision) if NUM_RANKS > 1 else torch.cuda.is_available() and not cpu_is_wanted()
    if not use_gpu:
        os.environ["ACCELERATE_USE_CPU"] = "true"  # what Accelerate reads; with it N ranks without GPUs are one world
        if os.environ.get("OMP_NUM_THREADS", "1") == "1":  # `accelerate launch` sets 1, also for a single process
            torch.set_num_threads(max(1, world.num_cores() // LOCAL_RANKS))
    _refuse_what_the_device_cannot(cfg, precision, use_gpu)
    # torch 2.13 renames a DDP option that Accelerate passes on.
    warnings.filterwarnings("ignore", message=".*broadcast_buffers.*", category=FutureWarning)
    if cfg.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it is first used
        torch.use_deterministic_algorithms(True)
    if use_gpu:
        torch.backends.cudnn.allow_tf32 = cfg.tf32  # of convolutions, where torch's default is to
        if cfg.tf32:
            torch.set_float32_matmul_precision("high")

    hook = {"none": "no", "powersgd": "power_sgd"}.get(cfg.comm_hook, cfg.comm_hook)  # Accelerate's names
    default = f"runs/{Path(sys.argv[0]).stem}/{time.strftime('%Y%m%d-%H%M%S')}"
    if world.RESTARTS and not cfg.resume:
        cfg.resume = "auto"  # started again by the launcher after a failure: the user has typed nothing new
        default = world.lasting.get("output_dir").decode() if world.lasting and world.lasting.check(["output_dir"]) else ""
    given = cfg.output_dir or (str(_run_folder(Path(cfg.resume))) if cfg.resume not in ("", "auto") else "")
    cfg.output_dir = world.agreed(given or default)
    if RANK == 0 and world.lasting:
        world.lasting.set("output_dir", cfg.output_dir)
    with world.together("open the output folder"):
        if cfg.resume and not (given or (world.RESTARTS and default)):
            raise UserError("--resume needs the folder of the run: --resume --output_dir runs/...")
        if RANK == 0:  # only the main rank writes there; on the other nodes the folder need not exist
            _require_trackers(trackers)
            _claim_output_dir(cfg)
            _require_hub(cfg)
        stop.remove_file(cfg.output_dir)
    accelerator = Accelerator(
        log_with=trackers or None,
        project_dir=cfg.output_dir,
        gradient_accumulation_steps=1,  # `update` counts micro-batches itself; Accelerate must not divide again
        mixed_precision=precision,
        step_scheduler_with_optimizer=False,
        # Our sampler yields whole micro-batches of all ranks; Accelerate hands each rank its slice of them.
        dataloader_config=DataLoaderConfiguration(split_batches=True, non_blocking=use_gpu, use_seedable_sampler=False),
        kwargs_handlers=[
            DistributedDataParallelKwargs(
                find_unused_parameters=cfg.find_unused_parameters,
                static_graph=cfg.static_graph,
                gradient_as_bucket_view=cfg.gradient_as_bucket_view,
                bucket_cap_mb=cfg.bucket_cap_mb,
                broadcast_buffers=bool(cfg.broadcast_buffers),  # None is settled by the model, in models.ready
                comm_hook=DDPCommunicationHookType(hook),
                # torch's default is to compress from step 1,000 on, which is after the end of many runs.
                comm_state_option={"start_powerSGD_iter": 10} if cfg.comm_hook == "powersgd" else {},
            )
        ],
    )
    if accelerator.num_processes != NUM_RANKS:
        raise UserError(
            f"The launcher started {NUM_RANKS} ranks but Accelerate sees {accelerator.num_processes}: each would train "
            "alone. Start with one of accelerate_configs/*.yaml, or with torchrun."
        )
    world.say(describe(cfg, accelerator, precision))
    torch.manual_seed(mixed(cfg.seed, "start"))  # of weights that are not pretrained
    return accelerator


def _run_folder(path: Path) -> Path:
    """Of `--resume PATH`, which may be a checkpoint or the folder of a run."""
    return path.parent if snapshot.is_step(path) or (path / snapshot.MANIFEST).is_file() else path


def _claim_output_dir(cfg: TrainConfig) -> None:
    """A run that is there already is never written over, and two never write into one folder."""
    folder = Path(cfg.output_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _lock(folder)
        ours = [name for name in ("config.json", "log.jsonl", "model") if (folder / name).exists()]
        ours += [path.name for path in snapshot.all_of(folder)[-1:]]
        if ours == ["config.json", "log.jsonl"] and (folder / "log.jsonl").stat().st_size == 0:
            ours = []  # of a run that was refused before it began
        candidates = snapshot.candidates(cfg)
        comes_from = Path(cfg.resume) if cfg.resume not in ("", "auto") else folder
        is_foreign = _run_folder(comes_from).resolve() != folder.resolve() and not snapshot.is_of_one_run(comes_from, folder)
        if ours and (not cfg.resume or is_foreign):
            raise UserError(
                f"--output_dir {folder} holds another run ({', '.join(ours)}). Go on with it: --resume alone; or choose another "
                "folder."
            )
        if candidates:  # before a model is loaded; the data are compared when they are there
            checkpoint.refuse_changed_options(cfg, snapshot.run_of(candidates[-1]))
        snapshot.sweep(folder)
        snapshot.write_json(folder / "config.json", as_plain_dict(cfg))
    except OSError as error:
        raise UserError(f"--output_dir {folder}: cannot be written on {HOST}: {error.strerror}.") from error


_locks: list[Any] = []  # open files: a lock lasts as long as its process, and not a moment longer


def _lock(folder: Path) -> None:
    file = (folder / ".lock").open("a+")
    deadline = time.monotonic() + 5  # a run that was killed a moment ago may still have a data worker
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                file.seek(0)
                raise UserError(
                    f"--output_dir {folder} is in use by another run ({file.read().strip() or 'just starting'}). "
                    "Wait for its end (after a Ctrl-C it may still be saving), or choose another folder."
                ) from None
            time.sleep(0.2)
        except OSError:  # a disk that cannot lock
            print(f"{folder}: this disk has no locks; nothing keeps a second run out of the folder.", file=sys.stderr)
            break
    file.truncate(0)
    file.write(f"pid {os.getpid()} on {HOST}")
    file.flush()
    _locks.append(file)


def _known_trackers(report_to: str) -> list[str]:
    """The names in `--report_to`, or a UserError: Accelerate would leave out an unknown one without a word."""
    names = [name.strip() for name in report_to.split(",") if name.strip()]
    for name in names:
        if name not in ("wandb", "tensorboard", "trackio"):
            raise UserError(f"--report_to {name}: is none of wandb, tensorboard, trackio.")
    return names


def _require_trackers(names: list[str]) -> None:
    for name in names:
        if find_spec(name) is None:
            raise UserError(f"--report_to {name}: the package is not installed on {HOST}. pip install {name}")


def _require_hub(cfg: TrainConfig) -> None:
    """Before hours of training, not after them."""
    if cfg.push_to_hub:
        from huggingface_hub import get_token

        if not get_token():
            raise UserError(
                f"--push_to_hub {cfg.push_to_hub}: {HOST} has no token of the hub. Run `hf auth login`, or set HF_TOKEN."
            )


def describe(cfg: TrainConfig, accelerator: Accelerator, precision: str) -> str:
    """The arithmetic of the run, for a person to check."""
    micro, count = cfg.split(NUM_RANKS)
    nodes = NUM_RANKS // LOCAL_RANKS
    split = f"{micro} per micro-batch x {count} micro-batch{'es' * (count > 1)}"
    if cfg.micro_batch_size == "auto":
        split = f"{micro}, in as few micro-batches as fit"
    device = torch.cuda.get_device_name() if accelerator.device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    # Nobody sees that a step of two nodes is spent waiting: 84 % of it in benchmarks/README.md.
    is_tuned = "ACCEL_DDP_TUNED" in os.environ or cfg.comm_hook != "none" or cfg.bucket_cap_mb != TrainConfig.bucket_cap_mb
    whose = "NCCL and DDP" if accelerator.device.type == "cuda" else "DDP"
    hint = f"\nbetween the nodes: the defaults of {whose}; `accel-ddp tune` finds what is faster here (see the README)"
    return (
        f"{cfg.global_batch_size} items per step = {nodes} node{'s' * (nodes > 1)} x {LOCAL_RANKS} "
        f"rank{'s' * (LOCAL_RANKS > 1)} x {split}   "
        f"({device}; mixed precision: {precision}){hint * (nodes > 1 and not is_tuned)}"
    )


def supervise(main: Callable[[Any], object], cfg: TrainConfig) -> int:
    """Run `main(cfg)`; return the exit code, after saying in words what went wrong."""
    stop.listen(cfg)
    try:
        try:
            main(cfg)
        except SystemExit as ended:
            if ended.code:
                raise
        if world.unsaved:
            return _leave(world.unsaved)
        if world.store:
            _part()
            if not world.stop_listening():
                sys.stdout.flush(), sys.stderr.flush()
                os._exit(0)
        if dist.is_initialized():  # torchrun makes a group also of one rank
            dist.destroy_process_group()
        return 0
    except world.Stopped as stopped:
        return _leave(str(stopped))
    except SystemExit as ended:  # of the user's own code: not without a word
        _leave(world.first_failure(f"rank {RANK} on {HOST} ended itself: sys.exit({ended.code!r})."))
        return ended.code if isinstance(ended.code, int) else 1
    except UserError as error:
        said = str(error).rpartition("UserError: ")[2].strip()  # a DataLoader's worker puts its traceback before it
        text = f"{world.unsaved} And: {said}" if world.unsaved else f"error: {said}"
        world.first_failure(text)
        return _leave(text)
    except Exception as error:
        if _is_lost_connection(error):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher's, for the one that is lost
            if gone := world.who_is_gone():
                return _leave(world.first_failure(gone))
        if not _is_out_of_memory(error):
            text = f"rank {RANK} on {HOST} failed: {type(error).__name__}: {error}"
            first = world.first_failure(text)
            if first == text:
                traceback.print_exception(error)
            return _leave(first)
        micro = cfg.split(NUM_RANKS)[0]
        advice = (
            f"--micro_batch_size {micro // 2} (--global_batch_size stays the same)" if micro > 1 else "--gradient_checkpointing"
        )
        text = (
            f"error: rank {RANK} on {HOST} is out of memory with --micro_batch_size {micro}. Lower it: {advice}; or use "
            f"--gradient_checkpointing, --mixed_precision bf16, shorter items. ({str(error).splitlines()[0]})"
        )
        return _leave(world.first_failure(text))


def _part() -> None:
    """Wait until every rank has come through its last collective: one that ended earlier would cut it off from the others,
    and a launcher waits 300 s for a node that failed at the end."""
    world.store.add("done", 1)
    deadline = time.monotonic() + 60
    while world.store.add("done", 0) < NUM_RANKS and time.monotonic() < deadline:
        time.sleep(0.02)
    if RANK == 0:
        time.sleep(0.2)  # rank 0 may host the store, which the others have just asked


def _leave(text: str) -> int:
    """Say why, once per node, let the launcher's report say it too, and leave together with the others.

    The launcher ends all ranks as soon as it sees one end; those on their way to the same error get a moment.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher's answer to another rank's end; ours is near
    world.leave()
    store = world.store if text != world.failure_heard else None  # heard some time ago: the store may be gone with its host
    try:
        # Who is lost was said by the thread that heard of it.
        first = world.is_first_on_node(text) if store else is_local_main() and not text.startswith("lost:")
    except Exception:  # the store's host is gone: better twice than not at all
        first, store = True, None
    if first:
        print(text, file=sys.stderr, flush=True)
    tell_the_launcher(text)
    with contextlib.suppress(Exception):
        deadline = time.monotonic() + (2 if text.startswith("lost:") else 5)
        leaving = store.add("leaving", 1) if store else NUM_RANKS
        while leaving < NUM_RANKS and time.monotonic() < deadline:
            time.sleep(0.05)
            leaving = store.add("leaving", 0)
        if RANK == 0 and NUM_RANKS > 1:
            time.sleep(0.3)  # rank 0 may host the store, which the others have just asked
    return world.exit_code(text)


def _is_lost_connection(error: BaseException) -> bool:
    words = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited", "NCCL error")
    return isinstance(error, dist.DistNetworkError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    )


def _is_out_of_memory(error: BaseException) -> bool:
    words = ("can't allocate memory", "CUDA out of memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(word in str(error) for word in words)


def _refuse_what_we_do_not_train() -> None:
    for variable, what in {"ACCELERATE_USE_FSDP": "FSDP", "ACCELERATE_USE_DEEPSPEED": "DeepSpeed"}.items():
        if os.environ.get(variable, "").lower() in ("1", "true"):
            raise UserError(
                f"The accelerate config asks for {what}; these recipes train with DDP. Use distributed_type: MULTI_GPU."
            )
    if int(os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")) != 1:
        raise UserError(
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS is set. Here accumulation follows from --global_batch_size and "
            "--micro_batch_size: unset it."
        )


def _refuse_what_the_device_cannot(cfg: TrainConfig, precision: str, use_gpu: bool) -> None:
    if precision not in ("no", "bf16", "fp16"):
        raise UserError(f"The accelerate config asks for mixed_precision {precision}; these recipes have no, bf16 and fp16.")
    if precision == "bf16" and use_gpu and torch.cuda.get_device_capability()[0] < 8:
        raise UserError(f"bf16 needs an Ampere GPU or newer, not {torch.cuda.get_device_name()}. Use --mixed_precision fp16.")
    if precision == "fp16" and not use_gpu:
        raise UserError("--mixed_precision fp16 needs a GPU; on CPU Accelerate would train in float32. Use bf16 or no.")
    if cfg.comm_hook == "bf16" and not use_gpu:
        raise UserError("--comm_hook bf16 needs NCCL, that is GPUs. Use --comm_hook fp16 or none.")
    if cfg.comm_hook == "powersgd" and not use_gpu:
        raise UserError(
            "--comm_hook powersgd needs NCCL, that is GPUs: over gloo its collectives are started in another order on each rank, "
            "which hangs. Use --comm_hook fp16 or none."
        )
    if cfg.sync_batchnorm and not use_gpu:
        raise UserError("--sync_batchnorm needs GPUs: torch has no CPU version of it.")
    if cfg.static_graph and cfg.split(NUM_RANKS)[1] > 1 and NUM_RANKS > 1:
        raise UserError(
            "--static_graph cannot be combined with several micro-batches per update: DDP learns the graph from a first "
            f"step that must synchronise. Use --micro_batch_size {cfg.global_batch_size // NUM_RANKS} or leave it out."
        )
