"""Builds the Accelerator of a run: over exactly the ranks that were launched, or not at all."""

import logging
import math
import multiprocessing
import os
import platform
import signal
import sys
import time
import warnings
from importlib.util import find_spec
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from accelerate.utils import DataLoaderConfiguration, DDPCommunicationHookType, DistributedDataParallelKwargs

from accel_ddp import compat, phases
from accel_ddp.config.choices import choose, reasons
from accel_ddp.config.option_values import choose_ranks, parse_shares
from accel_ddp.config.train_config import TrainConfig
from accel_ddp.errors import UserError
from accel_ddp.nodes import launcher
from accel_ddp.nodes.cores import choose_num_threads
from accel_ddp.nodes.sharding_plan import take_plan
from accel_ddp.nodes.spawn import raise_file_limit
from accel_ddp.nodes.terminal import connect_output, in_notebook
from accel_ddp.nodes.topology import describe_ranks
from accel_ddp.observe.display import share_terminal
from accel_ddp.phases import LOAD
from accel_ddp.ranks import group, reporting, restarts, signals
from accel_ddp.ranks.agreement import broadcast_object, gather_everywhere, print_on_main, together
from accel_ddp.ranks.process import begin_again, ending, links, this_rank
from accel_ddp.ranks.supervise import forget_run, supervise_program
from accel_ddp.saving import restart_record, resume, run_folder
from accel_ddp.seeds import mixed
from accel_ddp.text import counted

logger = logging.getLogger(__name__)


def start(cfg: TrainConfig) -> Accelerator:
    """Return an Accelerator over exactly the ranks that were launched, or raise UserError on every rank.

    It also chooses the output folder, locks it for this run, and seeds the initial weights. Call it once, before you build the model.
    """
    # The order of the steps matters.
    _become_supervised(cfg)  # first, so that the end of this process is reported whatever fails below
    trackers = _check_options(cfg)  # on this rank alone, before it waits for others
    use_gpu = _connect(cfg)  # from here on the monitors watch this rank, and ranks can agree
    before, given = _choose_output_dir(cfg)  # the same on every rank, so it needs the connection
    resume.take_saved_options(cfg)  # before the first choice of a value for `auto`
    _choose_precision(cfg, use_gpu)
    _choose_workers(cfg)
    _check_device(cfg, use_gpu)  # the ranks have agreed on GPUs or CPUs
    _configure_torch(cfg, use_gpu)  # before anything is computed
    _open_output_dir(cfg, trackers, before, given)
    if not cfg.evaluate_only:
        share_terminal(cfg)  # after the messages about the output folder, which the panel would hide
    accelerator = _build(cfg, trackers, use_gpu)  # its folder for trackers is the output folder
    if not cfg.evaluate_only:
        _print_description(cfg, accelerator)
    torch.manual_seed(mixed(cfg.seed, "start"))  # last, for weights that are not pretrained
    return accelerator


def _become_supervised(cfg: TrainConfig) -> None:
    """Connect the output of this rank, and let messages and an exit code follow from how it ends."""
    if in_notebook():
        forget_run()
        AcceleratorState._reset_state(reset_partial_state=True)
    elif multiprocessing.parent_process() is not None and not ending.is_supervised:
        begin_again()  # `notebook_launcher` has set the rank after it has forked a kernel that may have imported this package
    raise_file_limit()  # first, because the monitor and the data workers inherit it
    connect_output()  # for a program without `run`
    reporting.configure()
    supervise_program(cfg)


def _check_options(cfg: TrainConfig) -> list[str]:
    _check_accelerate_config()
    if cfg.mixed_precision == "auto":  # an option takes precedence over the accelerate config, and that over the hardware
        cfg.mixed_precision = launcher.find_stated_precision() or "auto"
    links.sharding = links.sharding or take_plan(this_rank.num_ranks)
    if links.sharding:
        cfg.validate_sharded()  # for a program without `run`
        if links.sharding.activation_checkpointing:
            cfg.gradient_checkpointing = True
    elif not (
        cfg.keep_gathered == type(cfg).keep_gathered or "keep_gathered" in reasons(cfg)
        or this_rank.num_ranks == 1 or cfg.evaluate_only
    ):  # fmt: skip
        instead = "Leave it out, or use an accelerate config with FSDP: accelerate_configs/fsdp.yaml"
        raise UserError(f"--keep_gathered {cfg.keep_gathered}: is an option of FSDP, but this run uses DDP. {instead}.")
    launcher.check_requested_world()
    cfg.split(this_rank.num_ranks)
    parse_shares(cfg.balance, this_rank.num_ranks)
    choose_ranks(cfg.profile_ranks, this_rank.num_ranks)  # raises UserError if one of them does not exist
    return _tracker_names(cfg)


def _connect(cfg: TrainConfig) -> bool:
    """Connect this rank to its launcher, its monitor and the other ranks. Return whether all of them use GPUs."""
    if "TORCHELASTIC_RUN_ID" in os.environ or launcher.find_accelerate_request() is not None:
        # A launcher that is killed, or a launcher of a single process that gets SIGTERM, leaves its ranks running unseen.
        signals.die_with_parent(signal.Signals[f"SIG{cfg.stop_signal}"])
    if this_rank.num_ranks > 1:
        use_gpu = group.connect(cfg, resume.settings_of_run(cfg))
    else:
        use_gpu = torch.cuda.is_available() and not launcher.cpu_is_wanted()
        group.connect_single_rank(cfg)
    phases.enter(LOAD)
    return use_gpu


def _build(cfg: TrainConfig, trackers: list[str], use_gpu: bool) -> Accelerator:
    if this_rank.num_ranks == 1:
        # Accelerate would create a process group for one rank of torchrun, and wrap its model with DDP on a CPU.
        os.environ.pop("LOCAL_RANK", None)
    hook = {"none": "no", "powersgd": "power_sgd"}.get(cfg.comm_hook, cfg.comm_hook)  # Accelerate's names
    accelerator = Accelerator(
        log_with=trackers or None,
        project_dir=cfg.output_dir,
        gradient_accumulation_steps=1,  # `train_step` counts micro-batches itself; Accelerate must not divide again
        mixed_precision=cfg.mixed_precision,
        step_scheduler_with_optimizer=False,
        # Our sampler yields the micro-batches of all ranks, and Accelerate gives each rank its slice of them.
        dataloader_config=DataLoaderConfiguration(split_batches=True, non_blocking=use_gpu, use_seedable_sampler=False),
        kwargs_handlers=[
            DistributedDataParallelKwargs(
                find_unused_parameters=cfg.find_unused_parameters,
                static_graph=cfg.static_graph,
                gradient_as_bucket_view=cfg.gradient_as_bucket_view,
                bucket_cap_mb=cfg.bucket_cap_mb,
                broadcast_buffers=cfg.broadcast_buffers == "on",  # auto: `models.prepare` decides when it sees the model
                comm_hook=DDPCommunicationHookType(hook),
                # torch compresses from step 1,000 on by default, which is after the end of many runs.
                comm_state_option={"start_powerSGD_iter": 10} if cfg.comm_hook == "powersgd" else {},
            )
        ],
    )
    if accelerator.num_processes != this_rank.num_ranks:
        raise UserError(
            f"The launcher started {this_rank.num_ranks} ranks, but Accelerate sees {accelerator.num_processes}. Each would train "
            "alone. Start with one of accelerate_configs/*.yaml, or with torchrun."
        )
    accelerator.sharding_plan = links.sharding
    return accelerator


def _configure_torch(cfg: TrainConfig, use_gpu: bool) -> None:
    # torch 2.13 renames a DDP option that Accelerate passes on.
    warnings.filterwarnings("ignore", message=".*broadcast_buffers.*", category=FutureWarning)
    if not use_gpu:
        os.environ["ACCELERATE_USE_CPU"] = "true"  # with it Accelerate treats N ranks without GPUs as one world
        if platform.machine() == "aarch64" and cfg.mixed_precision == "no":
            # oneDNN uses the Arm Compute Library here. For the small matrices of attention it takes 9 times as long as OpenBLAS, and
            # for large ones as long or longer. all-MiniLM-L6-v2 trains 1.5 times as fast without it on 2 Neoverse N1 cores.
            torch.backends.mkldnn.enabled = False
    if threads := cfg.num_threads if use_gpu else choose_num_threads(cfg.num_threads, this_rank.local_ranks):
        torch.set_num_threads(threads)
        if not use_gpu and this_rank.num_ranks > 1:
            os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # without it Accelerate sets another number, after a warning
    if cfg.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it is first used
        torch.use_deterministic_algorithms(True)
    if use_gpu:
        torch.backends.cudnn.allow_tf32 = cfg.tf32  # for convolutions, where torch's default is True
        if cfg.tf32:
            torch.set_float32_matmul_precision("high")


def _choose_precision(cfg: TrainConfig, use_gpu: bool) -> None:
    """Set `--mixed_precision auto` to the same value on every rank: bf16 if every GPU has it. This is a collective."""
    if cfg.mixed_precision != "auto":
        return
    if not use_gpu:  # as ever, which needs no line
        cfg.mixed_precision = "no"
        return
    lacking = "" if torch.cuda.get_device_capability()[0] >= 8 else f"{torch.cuda.get_device_name()} of {this_rank.host}"
    without = next(filter(None, gather_everywhere(lacking)), "")
    reason = f"{without} has no bf16, so every rank computes in float32" if without else "every GPU has it; no: float32"
    choose(cfg, "mixed_precision", "no" if without else "bf16", reason)


def _choose_workers(cfg: TrainConfig) -> None:
    """Set `--local_workers 0` to the number of nodes, and check that the ranks can be divided among the workers."""
    if not cfg.sync_every or cfg.evaluate_only:
        return
    if not cfg.local_workers and len(links.nodes) == 1:
        raise UserError(
            f"--sync_every {cfg.sync_every}: each node is a worker, but there is one node only, which has nobody to synchronize with. "
            "Use --local_workers 2 or more, or leave --sync_every out."
        )
    if not cfg.local_workers:
        counts = [number for _, number in links.nodes]
        if len(set(counts)) > 1:  # workers have equal numbers of ranks, so one of them would be on two nodes
            raise UserError(
                f"--sync_every {cfg.sync_every}: each node is a worker, but the nodes have different numbers of ranks "
                f"({', '.join(map(str, counts))}). Use --local_workers {sum(counts) // math.gcd(*counts)}, or the same number on each."
            )
        choose(cfg, "local_workers", len(links.nodes), "one per node")
    cfg.validate_local_steps()  # with the precision of the accelerate config
    cfg.split(this_rank.num_ranks)


def _choose_output_dir(cfg: TrainConfig) -> tuple[str, str]:
    """Set `cfg.output_dir` to the same folder on every rank. Return the folder of the attempt before, and that of the options.

    A launcher that has restarted the ranks after a failure continues the run of the attempt before. After a restart, a replaced main
    node knows only its command line, so the folder comes from any node that stored it.
    """
    default = f"runs/{Path(sys.argv[0]).stem}/{time.strftime('%Y%m%d-%H%M%S')}"
    given = cfg.output_dir or resume.folder_of_resume(cfg)
    before = _find_earlier_folder(given)
    before, cfg.resume = broadcast_object((before, restart_record.resume_of_restart(cfg, before)))
    if not before:
        links.earlier_run = {}
    cfg.output_dir = broadcast_object(before or given or default)
    folder = os.path.abspath(cfg.output_dir)
    links.by_hand = "" if cfg.evaluate_only else restarts.how_to_resume(folder)
    links.tell_monitor({"output_dir": folder, "by_hand": links.by_hand, "is_watched": this_rank.is_main})
    return before, given


def _open_output_dir(cfg: TrainConfig, trackers: list[str], before: str, given: str) -> None:
    """Claim the output folder on the main rank, and begin the attempt. This is a collective."""
    with together("open the output folder"):
        cfg.check_installed(is_sharded=links.sharding is not None)
        if cfg.resume and not (given or before):
            raise UserError("--resume needs the run folder. Use --resume --output_dir runs/...")
        if this_rank.is_main:  # only the main rank writes there; on other nodes the folder need not exist
            for name in trackers:
                if find_spec(name) is None:
                    instead = f"Run: pip install {name}"
                    raise UserError(f"--report_to {name}: the package is not installed on {this_rank.host}. {instead}")
            ending.run_folder_lock = run_folder.claim(cfg)
            links.tell_monitor({"is_claimed": True})  # it writes incidents.jsonl; before, the folder may be another run's
            _check_hub_token(cfg)
        if not before:  # a stop that was requested during the restart is still wanted
            signals.remove_stop_file(cfg.output_dir)
    if len(links.nodes) > 1:
        run_folder.refuse_run_of_other_node(cfg)
    restart_record.begin_attempt(cfg)
    if links.sharding or (cfg.sync_every and not cfg.evaluate_only):
        run_folder.require_shared(cfg, links.sharding.replicas if links.sharding else 1)


def _find_earlier_folder(given: str) -> str:
    """Return the folder of the attempt before this one, or "" if there is none or the user has typed another folder."""
    before, absolute = links.earlier_run.get("output_dir", ""), links.earlier_run.get("absolute", "")
    if given not in ("", before):
        return given if os.path.abspath(given) == absolute else ""
    # A main node that was started again may have another working directory, in which a relative path is another folder.
    return before if os.path.abspath(before) == absolute else absolute


def _tracker_names(cfg: TrainConfig) -> list[str]:
    """Return the names in `--report_to`. Raise UserError for an unknown one, and for `--log_model` without a tracker for it."""
    names = cfg.tracker_names()
    known = sorted(LOGGER_TYPE_TO_CLASS)
    for name in names:
        if name not in known:
            raise UserError(
                f"--report_to {name}: must be wandb, tensorboard or trackio, or several of them with commas. Accelerate also knows "
                f"{', '.join(one for one in known if one not in ('wandb', 'tensorboard', 'trackio'))}."
            )
    if cfg.log_model and not {"wandb", "mlflow"} & set(names):
        raise UserError("--log_model: needs --report_to wandb or --report_to mlflow, which store artifacts.")
    return names


def _check_hub_token(cfg: TrainConfig) -> None:
    """Check before hours of training that the model can be uploaded after them."""
    if cfg.push_to_hub:
        from huggingface_hub import get_token

        if not get_token():
            instead = "Run `hf auth login`, or set HF_TOKEN"
            raise UserError(f"--push_to_hub {cfg.push_to_hub}: {this_rank.host} has no Hub token. {instead}.")


def _print_description(cfg: TrainConfig, accelerator: Accelerator) -> None:
    """Print the batch arithmetic of the run, and a warning if its precision is slow here."""
    micro, count = cfg.split(this_rank.num_ranks)
    split = f"{micro} per micro-batch x {counted(count, 'micro-batch')}"
    if cfg.micro_batch_tokens:
        split = f"micro-batches of at most {cfg.micro_batch_tokens:,} tokens"
    elif cfg.micro_batch_size == "auto":
        split = f"{'items' if cfg.global_batch_tokens else micro}, in as few micro-batches as fit"
    elif cfg.global_batch_tokens:
        split = f"micro-batches of at most {cfg.micro_batch_size} items"
    on_gpu = accelerator.device.type == "cuda"
    threads = torch.get_num_threads()
    device = torch.cuda.get_device_name() if on_gpu else f"CPU, {counted(threads, 'thread')}"
    text = (
        f"{cfg.step_size:,} {'tokens' if cfg.global_batch_tokens else 'items'} per step = {describe_ranks(links.nodes)} x {split}"
    )
    text += f"   ({device}; mixed precision: {cfg.mixed_precision})"
    if cfg.sync_every:
        text += f"\n{cfg.local_workers} workers take {counted(cfg.sync_every, 'local step')} each, then average their weights."
    if links.sharding:
        text += f"\n{links.sharding.describe(this_rank.num_ranks, 'GPU' if on_gpu else 'rank')}"
    # Waiting between nodes is invisible otherwise: it takes 84 % of a step of two nodes in benchmarks/README.md.
    is_tuned = "ACCEL_DDP_TUNED" in os.environ or cfg.comm_hook != "none" or "tuned" in reasons(cfg)
    is_tuned = is_tuned or cfg.tuned != "off" or cfg.bucket_cap_mb != 25 or cfg.sync_every > 0
    if len(links.nodes) > 1 and not is_tuned and not links.sharding:
        library = "NCCL and DDP" if on_gpu else "DDP"
        text += f"\nThe nodes use the default settings of {library}. `accel-ddp tune` finds faster ones for this cluster."
    print_on_main(text)
    if cfg.mixed_precision == "bf16" and not on_gpu and this_rank.is_main and not compat.cpu_has_bf16():
        logger.warning(
            "Mixed precision bf16 is slow on this CPU, which has no instructions for bf16. A step can take 100 times as long as with "
            "--mixed_precision no."  # 7.1 instead of 0.054 s for each text of the classify recipe on Neoverse N1 cores
        )


def _check_accelerate_config() -> None:
    if int(os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")) != 1:
        raise UserError(
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS is set. Accumulation follows from --global_batch_size and --micro_batch_size "
            "here. Unset the variable, or remove gradient_accumulation_steps from the accelerate config."
        )


def _check_device(cfg: TrainConfig, use_gpu: bool) -> None:
    precision: str = cfg.mixed_precision
    if precision not in ("no", "bf16", "fp16"):
        raise UserError(f"The accelerate config asks for mixed_precision {precision}. Use no, bf16 or fp16.")
    if precision == "bf16" and use_gpu and torch.cuda.get_device_capability()[0] < 8:
        instead = "Use --mixed_precision fp16"
        raise UserError(f"--mixed_precision bf16 needs an Ampere GPU or newer, not {torch.cuda.get_device_name()}. {instead}.")
    if precision == "fp16" and links.sharding:
        raise UserError("The accelerate config has mixed_precision: fp16, which cannot be combined with FSDP here. Use bf16.")
    if precision == "fp16" and not use_gpu:
        raise UserError("--mixed_precision fp16 needs a GPU. On a CPU Accelerate would train in float32. Use bf16 or no.")
    if cfg.comm_hook == "bf16" and not use_gpu:
        raise UserError("--comm_hook bf16 needs NCCL, and so GPUs. Use --comm_hook fp16 or none.")
    if cfg.comm_hook == "powersgd" and not use_gpu:
        instead = "Over gloo each rank starts its collectives in a different order, which hangs. Use --comm_hook fp16 or none"
        raise UserError(f"--comm_hook powersgd needs NCCL, and so GPUs. {instead}.")
    if cfg.sync_batchnorm and not use_gpu:
        raise UserError("--sync_batchnorm needs GPUs, because torch has no CPU version of it. Leave it out.")
    has_several = cfg.split(this_rank.num_ranks)[1] > 1 or cfg.micro_batch_tokens or cfg.global_batch_tokens
    if cfg.static_graph and has_several and this_rank.num_ranks > 1:
        raise UserError(
            "--static_graph cannot be combined with several micro-batches per update, because DDP learns the graph from a first "
            f"step that must synchronize. Use --micro_batch_size {cfg.global_batch_size // this_rank.num_ranks}, or leave it out."
        )
