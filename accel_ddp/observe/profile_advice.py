"""Recommendations from a profile: the option to set, what it could save, and the numbers behind it."""

from typing import Any, NamedTuple

from accel_ddp.text import counted

NOTABLE = 0.05  # fraction of a step; less is not worth an option
_PRODUCTS = ("gemm", "cutlass", "xmma", "matmul", "nvjet", "conv", "wgrad", "dgrad")  # in the names of kernels on tensor cores


class Recommendation(NamedTuple):
    """One option to try. `saves` is what it saves at most, in seconds per step."""

    option: str
    saves: float
    text: str


def recommend(run: dict[str, Any], overall: dict[str, Any], operations: list[dict[str, Any]]) -> list[Recommendation]:
    """Return the recommendations, with the one that could save the most first."""
    found = [
        *_communication(run, overall), *_data(run, overall), *_host(run, overall), *_computation(run, overall, operations),
        *_copies(run, overall),
    ]  # fmt: skip
    step = overall["step_seconds"]
    return sorted((one for one in found if one.saves >= 0.02 * step), key=lambda one: -one.saves)


def _of(seconds: float, step: float) -> str:
    return f"{seconds / step:.0%} of a step ({_number(seconds)} of {_number(step)} ms)".replace("%", " %")


def ms(seconds: float) -> str:
    return f"{_number(seconds)} ms"


def _number(seconds: float) -> str:
    """Return milliseconds with three digits, and without an exponent."""
    return f"{seconds * 1000:,.0f}" if seconds >= 0.1 else f"{seconds * 1000:.3g}"


def _communication(run: dict[str, Any], overall: dict[str, Any]) -> list[Recommendation]:
    step, network, options = overall["step_seconds"], overall["network"], run["options"]
    if run["num_ranks"] < 2 or network < NOTABLE * step:
        return []
    found = []
    why = f"exposed communication takes {_of(network, step)}, also on the rank that waits least"
    on_gpu = overall["kind"] == "gpu"
    hook = "bf16" if on_gpu else "fp16"
    megabytes = run["gradient_bytes"] / (1 << 20)
    if options.get("comm_hook") == "none" and megabytes > 1:  # fewer bytes do not help where the latency is what takes time
        text = (
            f"{why}. --comm_hook {hook} halves the {megabytes:.4g} MB of gradients and saves up to {ms(network / 2)}. It rounds the "
            "gradients."
        )
        found.append(Recommendation(f"--comm_hook {hook}", network / 2, text))
    buckets, cap = overall["collectives"] - 2, options.get("bucket_cap_mb", 25)  # two all-reduces are those of counts and loss
    smaller = max(1, int(min(cap, megabytes) / 4))
    if 0 < buckets <= 3 and megabytes > 2 * smaller and overall["overlapped"] < 0.5 * overall["communication"]:
        saves = min(network, overall["breakdown"]["backward"]) * (1 - 1 / (buckets + 1))
        text = (
            f"{why}. The {megabytes:.4g} MB of gradients travel in {counted(round(buckets), 'all-reduce')}, of which the last "
            f"begins after the backward pass. --bucket_cap_mb {smaller} makes smaller ones, which overlap with it. That saves up to "
            f"{ms(saves)}."
        )
        found.append(Recommendation(f"--bucket_cap_mb {smaller}", saves, text))
    elif buckets > 40:
        text = (
            f"{why}. The gradients travel in {buckets:.0f} all-reduces. --bucket_cap_mb {cap * 2} makes fewer of them, each of which "
            f"has a latency, and saves up to {ms(network / 4)}."
        )
        found.append(Recommendation(f"--bucket_cap_mb {cap * 2}", network / 4, text))
    if run["num_nodes"] > 1:
        text = f"{why}. `accel-ddp tune` measures which {'NCCL and ' * on_gpu}DDP settings are the fastest on these nodes."
        found.append(Recommendation("accel-ddp tune", network / 3, text))
    fixed = network + overall["parts"]["optimizer"] * (not on_gpu)
    batch = options.get("global_batch_size", 0)
    what = "communicates" if on_gpu else "communicates and updates the weights"
    text = (
        f"{why}. It does not grow with the batch: --global_batch_size {2 * batch} with the same --micro_batch_size {what} half "
        f"as often and saves up to {ms(fixed / 2)} per {batch} items. It changes what is learned, so that --lr may need a change."
    )
    found.append(Recommendation(f"--global_batch_size {2 * batch}", fixed / 2, text))
    return found


def _data(run: dict[str, Any], overall: dict[str, Any]) -> list[Recommendation]:
    step, on_gpu = overall["step_seconds"], overall["kind"] == "gpu"
    # On a GPU only the time counts in which it had nothing to do, because batches are prepared while it computes.
    wait = overall["idle"]["during"]["data"] if on_gpu else overall["parts"]["data"]
    if wait < NOTABLE * step:
        return []
    now = run["options"].get("num_workers", -1)
    more = 2 * now if now > 0 else 8 if on_gpu and now < 0 else 2
    what = "the GPU waits for data during" if on_gpu else "waiting for data takes"
    before = f"with --num_workers {now}" if now >= 0 else "with the default --num_workers"
    text = f"{what} {_of(wait, step)} {before}. --num_workers {more} prepares more batches at once and saves up to {ms(wait)}."
    return [Recommendation(f"--num_workers {more}", wait, text)]


def _host(run: dict[str, Any], overall: dict[str, Any]) -> list[Recommendation]:
    """Return what helps if the GPU waits for the host to launch kernels."""
    step, options, found = overall["step_seconds"], run["options"], []
    other = overall["parts"]["other"]
    if overall["kind"] == "cpu" or overall["idle"]["during"]["other"] >= NOTABLE * step:
        every = options.get("log_every", 10)
        other = other if overall["kind"] == "cpu" else min(other, overall["idle"]["during"]["other"])
        if other >= NOTABLE * step and every < 10:
            saves = other * (1 - every / 10)
            text = f"logging and hooks take {_of(other, step)} with --log_every {every}. --log_every 10 saves up to {ms(saves)}."
            found.append(Recommendation("--log_every 10", saves, text))
    late = overall["idle"]["host_late"] if overall["kind"] == "gpu" else 0.0
    if late < NOTABLE * step:
        return found
    why = f"the GPU waits for the host to launch kernels during {_of(late, step)}"
    if not run.get("compiled") and options.get("compile") != "on":
        text = f"{why}. --compile on fuses kernels, so that the host launches fewer, and saves up to {ms(late)}."
        found.append(Recommendation("--compile on", late, text))
    micro, count = run["micro_batch_size"], run["accumulation"]
    if count % 2 == 0 and options.get("micro_batch_size") != "auto":
        text = (
            f"{why}, with {count} micro-batches of {micro} per step. --micro_batch_size {2 * micro} launches half as many kernels, "
            f"which are larger, and saves up to {ms(late / 2)}. It needs more memory."
        )
        found.append(Recommendation(f"--micro_batch_size {2 * micro}", late / 2, text))
    elif count == 1:
        batch = options.get("global_batch_size", 0)
        text = (
            f"{why}, with one micro-batch of {micro} per step. --global_batch_size {2 * batch} --micro_batch_size {2 * micro} computes "
            f"twice as many items with the same number of kernels and saves up to {ms(late / 2)} per {batch} items. It changes what "
            "is learned, so that --lr may need a change."
        )
        found.append(Recommendation(f"--global_batch_size {2 * batch}", late / 2, text))
    return found


def _computation(run: dict[str, Any], overall: dict[str, Any], operations: list[dict[str, Any]]) -> list[Recommendation]:
    step, options, found = overall["step_seconds"], run["options"], []
    if overall["kind"] == "gpu" and run["precision"] == "no":
        products = sum(one["seconds"] for one in operations if any(word in one["name"].lower() for word in _PRODUCTS))
        if products >= 0.2 * step:
            text = (
                f"matrix products in float32 take {_of(products, step)}. --mixed_precision bf16 needs about half of that and saves up "
                f"to {ms(products / 2)}. It changes what is learned by rounding."
            )
            found.append(Recommendation("--mixed_precision bf16", products / 2, text))
    if options.get("padding_free") == "off" and overall["computation"] >= 0.3 * step:
        text = (
            f"computation takes {_of(overall['computation'], step)} with --padding_free off. --padding_free auto does not compute on "
            f"padding. A batch of texts that is half padding would save {ms(overall['computation'] / 2)}."
        )
        found.append(Recommendation("--padding_free auto", overall["computation"] / 4, text))
    forward = overall["breakdown"]["forward"]
    if options.get("gradient_checkpointing") and forward >= NOTABLE * step:
        text = (
            f"--gradient_checkpointing computes the forward pass twice, which takes {_of(forward, step)}. --no_gradient_checkpointing "
            f"saves up to {ms(forward)}. It needs more memory."
        )
        found.append(Recommendation("--no_gradient_checkpointing", forward, text))
    return found


def _copies(run: dict[str, Any], overall: dict[str, Any]) -> list[Recommendation]:
    step = overall["step_seconds"]
    pageable = sum(
        kind["seconds"] for name, kind in (overall["copies"] or {"kinds": {}})["kinds"].items() if "HtoD (Pageable" in name
    )
    if run["options"].get("pin_memory") != "off" or pageable < 0.02 * step:
        return []
    text = f"copies from pageable memory to the GPU take {_of(pageable, step)}. --pin_memory on saves up to {ms(pageable / 2)}."
    return [Recommendation("--pin_memory on", pageable / 2, text)]
