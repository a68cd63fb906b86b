"""Which settings to try next. Pure: a setting is a dictionary of environment variables, a score is milliseconds.

NCCL reads its variables once per process, so each trial costs the start of fresh ones: known-good sets come first, then
one change at a time from the best of them, a dozen in all.
"""

import math
from collections.abc import Generator, Iterable

Settings = dict[str, str]

THREADS, SOCKETS, BUFFER = "NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD", "NCCL_BUFFSIZE"
CHANNELS, ALGORITHM, PROTOCOL = "NCCL_MIN_NCHANNELS", "NCCL_ALGO", "NCCL_PROTO"
TUNED = (THREADS, SOCKETS, BUFFER, CHANNELS, ALGORITHM, PROTOCOL)

MIB = 1 << 20
SIZES = (1 * MIB, 25 * MIB, 256 * MIB)  # a small model, a bucket of DDP, much at once
BETTER = 0.97  # of the best so far: less is noise
CLEARLY_WORSE = 1.5  # times the best so far: the rest of such a trial is not worth its time

# Measured by us on one H200 as two nodes over TCP (25 / 256 MiB): default 18.1 / 144.5 ms, the first 5.9 / 59.4, the second
# 6.5 / 47.2. Threads and sockets without larger buffers were no faster than the default there, so they are not among these.
KNOWN_GOOD: tuple[Settings, ...] = (
    {THREADS: "4", SOCKETS: "4", BUFFER: "16777216"},
    {THREADS: "2", SOCKETS: "4", CHANNELS: "8", ALGORITHM: "Ring", PROTOCOL: "Simple"},
    {BUFFER: "16777216"},
    {THREADS: "4", SOCKETS: "4", BUFFER: "8388608", CHANNELS: "8"},
)
# Of each coordinate, what it may be; {} leaves it to NCCL. The product of threads and sockets may not be above 64. LL128 is
# never asked for: where it is not safe it corrupts data. Ring knows every collective.
COORDINATES: tuple[tuple[Settings, ...], ...] = (
    ({CHANNELS: "8"}, {CHANNELS: "16"}, {}),
    ({ALGORITHM: "Ring", PROTOCOL: "Simple"}, {}),
    ({BUFFER: "16777216"}, {BUFFER: "8388608"}, {}),
    ({THREADS: "4", SOCKETS: "4"}, {THREADS: "2", SOCKETS: "4"}, {}),
)
# Tree is for many nodes. Alone it would leave other collectives without an algorithm (NCCL issue 317), and so would
# `allreduce:tree` from NCCL 2.31 on (vLLM pull request 58179); this form names one for each.
TREE: Settings = {ALGORITHM: "ring,tree;allreduce:tree"}


def words(settings: Settings) -> str:
    return " ".join(f"{name}={value}" for name, value in settings.items()) or "default"


def score(milliseconds: dict[int, float], gradient_bytes: int = 0) -> float:
    """What is compared: of a model whose gradients fit into one bucket, their own size; else the geometric mean of the sizes
    from a bucket on, so that neither a bucket nor a large message counts alone."""
    if 0 < gradient_bytes < SIZES[1] and gradient_bytes in milliseconds:
        return milliseconds[gradient_bytes]
    judged = [ms for size, ms in milliseconds.items() if size >= SIZES[1]] or list(milliseconds.values())[-1:]
    return math.exp(sum(map(math.log, judged)) / len(judged)) if judged else math.inf


def walk(nodes: int, default: float, most: int = 12) -> Generator[Settings, float | None, None]:
    """Yields settings to try, is sent the score of each, None where it failed. `default`: the score without any."""
    best, best_score, tried = {}, default, [{}]
    for settings in KNOWN_GOOD:
        if settings in tried or len(tried) > most:
            continue
        tried.append(settings)
        got = yield settings
        if got is not None and got < best_score:
            best, best_score = settings, got
    for choices in COORDINATES:
        if nodes > 2 and ALGORITHM in choices[0]:
            choices = (*choices, TREE)
        names = {name for choice in choices for name in choice}
        for choice in choices:
            settings = {name: value for name, value in best.items() if name not in names} | choice
            settings = {name: settings[name] for name in TUNED if name in settings}  # in one order, for the eye
            if settings in tried or len(tried) > most:
                continue
            tried.append(settings)
            got = yield settings
            if got is not None and got < best_score * BETTER:
                best, best_score = settings, got


def interface_choices(interfaces: list[dict[str, str]]) -> list[list[str]]:
    """For each choice, the interface of every node: those in one network, or else of one name, where there are two or more.

    `interfaces`: of each node, name -> network ("10.0.0.0/24").
    """
    first, *others = interfaces
    networks = [network for network in dict.fromkeys(first.values()) if all(network in one.values() for one in others)]
    if len(networks) > 1:
        return [[next(name for name, its in one.items() if its == network) for one in interfaces] for network in networks]
    names = [name for name in first if all(name in one for one in others)]
    return [[name] * len(interfaces) for name in names] if len(names) > 1 else []


def buckets_to_try(gradient_bytes: int, sizes: Iterable[int] = (5, 10, 25, 50, 100, 200)) -> list[int]:
    """In MiB, DDP's default first. Of those that would put all gradients into one bucket, only the smallest."""
    kept = []
    for size in sorted(sizes):
        if size == 25 or not kept or kept[-1] * MIB < gradient_bytes:
            kept.append(size)
    return sorted(kept, key=lambda size: size != 25)


Choice = tuple[int, str]  # bucket_cap_mb, comm_hook
DEFAULT: Choice = (25, "none")  # DDP's own
WORTH_ROUNDING = 0.9  # of the time without a hook: a hook rounds, so noise is no reason for it


def _fastest(milliseconds: dict[Choice, float]) -> Choice | None:
    """Of those that are as fast but for noise, the one of the smallest buckets, which hides most where a step computes longer."""
    limit = min(milliseconds.values(), default=0.0) / BETTER
    return min((choice for choice, ms in milliseconds.items() if ms < limit), default=None)


def best_exact(milliseconds: dict[Choice, float]) -> Choice:
    """Of those without a hook DDP's default, unless another is faster by more than noise."""
    exact = {choice: ms for choice, ms in milliseconds.items() if choice[1] == "none"}
    fastest = _fastest(exact) or DEFAULT
    return fastest if exact.get(fastest, 0.0) < exact.get(DEFAULT, math.inf) * BETTER else DEFAULT


def best_choice(milliseconds: dict[Choice, float]) -> Choice:
    """The best without a hook, unless one that only rounds is clearly faster. Of two that are, bf16: it has float32's range."""
    exact = best_exact(milliseconds)
    limit = milliseconds.get(exact, 0.0) * WORTH_ROUNDING
    faster = {choice: ms for choice, ms in milliseconds.items() if choice[1] in ("bf16", "fp16") and ms < limit}
    limit = min(faster.values(), default=0.0) * 1.05
    safer = {choice: ms for choice, ms in faster.items() if choice[1] == "bf16" and ms < limit}
    return _fastest(safer) or _fastest(faster) or exact


def confirmed_choice(times: dict[Choice, list[float]]) -> tuple[Choice, float]:
    """The best, and how many times as fast as the default it is. The best of many is partly the luckiest: of its times the
    longest counts, and of the default's the shortest."""
    least = {choice: min(each) for choice, each in times.items()}
    candidates = {DEFAULT, best_exact(least), best_choice(least)}
    judged = {choice: least[choice] if choice == DEFAULT else max(times[choice]) for choice in candidates}
    chosen = best_choice(judged)
    return chosen, least[DEFAULT] / judged[chosen]
