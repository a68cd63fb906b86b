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
    # gloo has no bf16; and PowerSGD hangs over it with several buckets, as its collectives are started by callbacks, in
    # another order on each rank (seen with torch 2.13).
    hooks = ["bf16", "fp16", "powersgd"] if is_gpu else ["fp16"]
    usual = {"gradient_as_bucket_view": True, "comm_hook": "none", "bucket_cap_mb": 0, "again": False}  # 0: the best so far
    sizes = search.buckets_to_try(course.gradient_bytes)
    todo = [{**usual, "bucket_cap_mb": size} for size in sizes]
    # A hook halves what each bucket sends, so that what each costs whatever its size counts for more, and larger ones may be
    # best though they were not without it: on one H200 as two nodes the bf16 hook took 106 ms with 25 MB, 70 with 100.
    todo += [{**usual, "comm_hook": hooks[0], "bucket_cap_mb": size} for size in sizes if size >= 25]
    todo += [{**usual, "comm_hook": hook} for hook in hooks[1:]]
    todo.append({**usual, "gradient_as_bucket_view": False})
    # Once more: the default, which may have been unlucky, and the best, which may have been lucky. "": the best hook so far.
    todo += [{**usual, **more, "again": True} for more in ({"bucket_cap_mb": 25}, {}, {"comm_hook": ""})]
    configs = dict(enumerate(todo))
    entries = await what_fits(course, best, len(configs))
    tokens = course.wish.tokens or (1024 if is_gpu else 128)
    precision = f" in {course.wish.autocast}" if course.wish.autocast else ""
    text = f"a step of DDP with these gradients{precision}, {tokens} tokens for each rank, under {best.words}:"
    await course.all.say(f"{text}\n{results.DDP_HEADING}")
    done: dict[int, dict[str, Any]] = {}
    alone, current = 0.0, -1

    async def show(number: int, result: dict[str, Any]) -> None:
        done[number] = result
        default = min(times().get(search.DEFAULT, [math.nan]))
        await course.all.say(results.ddp_row(configs[number], result, alone, default))

    async def hear(one: dict[str, Any]) -> None:
        nonlocal alone, current, tokens
        if one["at"] == "config":
            current = one["number"]
            configs[current] |= {"bucket_cap_mb": one["bucket"], "comm_hook": one["hook"]}
        elif one["at"] == "tokens" and one["tokens"] < tokens:
            tokens = one["tokens"]
            few = f"(with {tokens} tokens: more would take too long here, so communication has less to hide behind)"
            await course.all.say(few)
        elif one["at"] == "alone":
            alone = one["ms"]
        elif one["at"] == "needless":
            del configs[one["number"]]
        elif one["at"] == "timed":
            await show(one["number"], {"ms": one["ms"], "early": one["early"]})

    def times() -> dict[search.Choice, list[float]]:
        found: dict[search.Choice, list[float]] = {}
        for number, one in done.items():
            config = configs[number]
            if one.get("ms") and not one["early"] and config["gradient_as_bucket_view"]:
                found.setdefault((config["bucket_cap_mb"], config["comm_hook"]), []).append(one["ms"])
        return found

    for _ in range(STARTS):
        left = [(number, config) for number, config in configs.items() if number not in done]
        seconds_left = course.deadline - time.monotonic() - course.trials.startup
        if not left or (done and seconds_left < 5):
            break
        spec = {
            "part": "ddp", "backend": course.wish.backend, "seconds": course.wish.trial_seconds * len(left), "log": False,
            "entries": shapes.packed(entries), "dtype": course.dtype, "autocast": course.wish.autocast, "tokens": tokens,
            "configs": left, "config_seconds": min(2.0, max(0.2, seconds_left / len(left) / 3)),
            "times": [[*choice, min(each)] for choice, each in times().items()],
        }  # fmt: skip
        current = -1
        _, failed = await course.trials.on_all(best, spec, hear)
        if failed and current < 0:
            await course.all.say(f"the model could not be timed: {failed}")
            break
        if failed and current not in done:
            await show(current, {"failed": failed})
    if search.DEFAULT not in times():
        await course.all.say("DDP's default bucket could not be timed: nothing is written for the model")
        return {}
    untimed = len(configs) - len(done)
    if untimed:
        await course.all.say(f"{untimed} more were not timed: the time is used up (--minutes is longer)")
    (bucket, hook), faster = search.confirmed_choice(times())
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
