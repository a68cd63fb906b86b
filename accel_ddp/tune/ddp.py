"""Which bucket size and communication hook make a DDP step of the model shortest."""

import math
import time
from typing import TYPE_CHECKING, Any

from accel_ddp.tune import results, search, shapes
from accel_ddp.tune.results import Trial

if TYPE_CHECKING:
    from accel_ddp.tune.course import Course

STARTS = 3  # each config that kills its processes costs one more


async def tuned(course: "Course", best: Trial) -> dict[str, Any]:
    """The bucket size and hook that make a step of this model shortest, with the best settings."""
    is_gpu = course.connected["backend"] == "nccl"
    hooks = ["bf16", "fp16", "powersgd"] if is_gpu else ["fp16", "powersgd"]
    plain = {"gradient_as_bucket_view": True, "comm_hook": "none"}
    usual = {**plain, "bucket_cap_mb": 0, "again": False}  # 0: the best so far
    configs = [{**usual, "bucket_cap_mb": size} for size in search.buckets_to_try(course.gradient_bytes)]
    configs += [{**usual, "comm_hook": hook} for hook in hooks]
    configs.append({**usual, "gradient_as_bucket_view": False})
    configs += [{**usual, "bucket_cap_mb": 25, "again": True}, {**usual, "again": True}]  # the first may have been unlucky
    entries = await what_fits(course, best, len(configs))
    tokens = course.wish.tokens or (1024 if is_gpu else 128)
    precision = f" in {course.wish.autocast}" if course.wish.autocast else ""
    text = f"a step of DDP with these gradients{precision}, {tokens} tokens for each rank, under {best.words}:"
    await course.all.say(f"{text}\n{results.DDP_HEADING}")
    done: dict[int, dict[str, Any]] = {}
    alone, current = 0.0, -1

    async def show(number: int, result: dict[str, Any]) -> None:
        done[number] = result
        await course.all.say(results.ddp_row(configs[number], result, alone, by_bucket().get(25, math.nan)))

    async def hear(one: dict[str, Any]) -> None:
        nonlocal alone, current, tokens
        if one["at"] == "config":
            current = one["number"]
            configs[current]["bucket_cap_mb"] = one["bucket"]
        elif one["at"] == "tokens" and one["tokens"] < tokens:
            tokens = one["tokens"]
            few = f"(with {tokens} tokens: more would take too long here, so communication has less to hide behind)"
            await course.all.say(few)
        elif one["at"] == "alone":
            alone = one["ms"]
        elif one["at"] == "done before":
            configs.pop(one["number"])  # the last
        elif one["at"] == "timed":
            await show(one["number"], {"ms": one["ms"], "early": one["early"]})

    def by_bucket() -> dict[int, float]:
        """The best time of each size without a hook."""
        times: dict[int, float] = {}
        for number, one in done.items():
            config = configs[number]
            if "failed" not in one and not one["early"] and config | plain == config:
                times[config["bucket_cap_mb"]] = min(one["ms"], times.get(config["bucket_cap_mb"], math.inf))
        return times

    for _ in range(STARTS):
        left = [(number, config) for number, config in enumerate(configs) if number not in done]
        seconds_left = course.deadline - time.monotonic() - course.trials.startup
        if not left or (done and seconds_left < 5):
            break
        spec = {
            "part": "ddp", "backend": course.wish.backend, "seconds": course.wish.trial_seconds * len(left), "log": False,
            "entries": shapes.packed(entries), "dtype": course.dtype, "autocast": course.wish.autocast, "tokens": tokens,
            "configs": left, "config_seconds": min(2.0, max(0.2, seconds_left / len(left) / 3)),
            "by_bucket": {str(size): ms for size, ms in by_bucket().items()},
        }  # fmt: skip
        current = -1
        _, failed = await course.trials.on_all(best, spec, hear)
        if failed and current < 0:
            await course.all.say(f"the model could not be timed: {failed}")
            break
        if failed and current < len(configs) and current not in done:
            await show(current, {"failed": failed})
    times = by_bucket()
    if 25 not in times:
        await course.all.say("DDP's default bucket could not be timed: nothing is written for the model")
        return {}
    untimed = len(configs) - len(done)
    if untimed:
        await course.all.say(f"{untimed} more were not timed: the time is used up (--minutes is longer)")
    bucket = search.best_bucket(times)
    by_hook = {"none": times[bucket]}
    for number, one in done.items():
        if configs[number]["comm_hook"] != "none" and "failed" not in one and not one["early"]:
            by_hook[configs[number]["comm_hook"]] = one["ms"]
    hook = search.best_hook(by_hook)
    faster = times[25] / by_hook[hook]
    return {"comm_hook": hook, "bucket_cap_mb": bucket, "gradient_as_bucket_view": True, "faster": faster}


async def what_fits(course: "Course", best: Trial, configs: int) -> list[list[Any]]:
    """The gradients, or as many of the first as can be sent often enough in the time that is left."""
    largest = max(best.milliseconds)
    step = course.gradient_bytes * best.milliseconds[largest] / largest / 1000
    most = max(10.0, course.deadline - time.monotonic()) * 0.7 / (configs * 8)
    if step <= most:
        return course.entries
    kept = shapes.first_of(course.entries, int(shapes.count(course.entries) * most / step))
    size = results.size_words(shapes.count(kept) * course.bytes_each)
    await course.all.say(
        f"all gradients would take {step:.1f} s a step; the first {size} of them are timed (--minutes is longer)"
    )
    return kept
