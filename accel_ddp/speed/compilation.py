"""Compiled layers: where compiled code is cached, and the process that compiles while training runs.

All layers of a stack share one compiled function. A cache file holds what torch has compiled for one key: the code of this package,
versions, the device, and the model's layers and their arguments. Its content is code, so it is read only if its user wrote it.
`python -m accel_ddp.speed.compilation` is the other process. It gets a layer and its arguments without the values of the weights.
"""

import contextlib
import fcntl
import hashlib
import io
import json
import logging
import math
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accel_ddp import compat
from accel_ddp.nodes.spawn import MODULE, clean_environment, die_with_parent
from accel_ddp.records.files import replace_file
from accel_ddp.saving.state_tensors import versions
from accel_ddp.speed import padding_free
from accel_ddp.speed.layer_calls import plain_class

log = logging.getLogger(__name__)

# Estimates for one H200 (docs/speed.md). A step is chosen once and stored, so an estimate costs time and not exactness.
# Until the process beside a training has filled the cache: 13 to 20 s of imports and 14 to 18 s of compiling.
COMPILE_SECONDS = 40.0
SWITCH_SECONDS = 5.0  # for which all ranks wait to load compiled code: 4.8 s were measured
SAVED = 0.2  # of the time of a step, at least
PATIENCE = 300.0  # seconds for which ranks wait at the switch, and this process for another one that compiles the same


def choose_step(total_steps: int, seconds: float, is_cached: bool) -> int | None:
    """Return the first step to compute with compiled layers, or None if that saves no time. `seconds` is the time of a step."""
    first = 0 if is_cached else math.ceil(COMPILE_SECONDS / seconds)
    return first if (total_steps - first) * seconds * SAVED > SWITCH_SECONDS else None


def compiled(function: Callable[..., Any], on_compiled: Callable[[], None] = lambda: None) -> Callable[..., Any]:
    """Return the function with compiled code. Its choices depend on the shapes of the call that compiles and on the device, but not on
    measured times. `on_compiled` is called after each call that has compiled."""
    found: list[Callable[..., Any]] = []

    def call(first: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not found:
            columns = first.shape[-1]
            options = compat.compile_options(first.numel() // columns, columns)
            found.append(torch.compile(function, dynamic=True, options=options))
        before = compat.compiled_graphs()
        result = found[0](first, *args, **kwargs)
        if compat.compiled_graphs() > before:
            on_compiled()
        return result

    return call


# ---- the cache file


def find_risk(path: Path, found: os.stat_result | None = None) -> str:
    """Return why compiled code in this file or folder must not be executed, and what to type; "" if it may be."""
    found = found or path.stat()
    if found.st_uid != os.geteuid():
        return f"{path} belongs to another user, and its content would be executed. Choose another --cache_dir."
    if found.st_mode & 0o022:
        return f"other users can write to {path}, and its content would be executed. Run: chmod go-w {path}"
    return ""


def read_code(path: Path) -> tuple[bytes | None, str]:
    """Return the content of a cache file. If it cannot be used, return None and the reason, which is "" if there is no file."""
    try:
        if risk := find_risk(path.parent):
            return None, risk
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:  # what is checked is what is read
            if risk := find_risk(path, os.fstat(file.fileno())):
                return None, risk
            data = file.read()
    except FileNotFoundError:
        return None, ""
    except OSError as error:
        return None, f"{path} cannot be read: {error.strerror}."
    if hashlib.sha256(data[32:]).digest() != data[:32]:
        return None, f"{path} is damaged. The layers are compiled again."
    return data[32:], ""


def write_code(path: Path, code: bytes) -> str:
    """Write a cache file that only its user can change. Return why that failed, or ""."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if risk := find_risk(path.parent):
            return risk
        replace_file(path, hashlib.sha256(code).digest() + code, has_rivals=True)
        path.chmod(0o600)
    except OSError as error:
        return f"{path} cannot be written: {error.strerror}."
    return ""


# ---- what is compiled


class Compilation:
    """The calls that are compiled in one run, the place of their code in the cache, and the process that compiles them."""

    def __init__(self, cache_dir: str, device: torch.device, model: nn.Module):
        self.folder = Path(cache_dir).expanduser() / "compiled"
        self.device = torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device
        config = getattr(model, "config", None)
        self._model = config.to_dict() if hasattr(config, "to_dict") else {}
        self._model.pop("_name_or_path", None)
        self.calls: dict[str, bytes] = {}  # description -> the call without the values of weights
        self.unsent = ""  # why another process cannot compile them
        with contextlib.suppress(OSError):  # there is no folder yet
            self.unsent = find_risk(self.folder)
        self.process: subprocess.Popen | None = None
        self._work: tempfile.TemporaryDirectory | None = None  # see `_private_folder`

    def recording(self, target: Any, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return `call`, which also stores each new kind of its calls. `target`: the layer or function that will be compiled."""

        def record(*args: Any, **kwargs: Any) -> Any:
            about = _describe(target, args, kwargs)
            if about not in self.calls:
                self.calls[about] = b""
                try:
                    _Pickler(file := io.BytesIO()).dump((_without_wrapper(target), args, kwargs, _modes(self.device)))
                    self.calls[about] = file.getvalue()
                except Exception as error:  # of any class that a layer may contain
                    self.unsent = f"{type(error).__name__}: {error}"
            return call(*args, **kwargs)

        return record

    @property
    def path(self) -> Path:
        """The cache file. Code is compiled for the number of a GPU too, because torch writes it into the code."""
        on_gpu = self.device.type == "cuda"
        device = [torch.cuda.get_device_name(self.device), *torch.cuda.get_device_capability(self.device)] if on_gpu else ["CPU"]
        settings = _settings() | ({"threads": 0} if on_gpu else {})
        facts = [_versions(), device, self.device.index, settings, self._model, sorted(self.calls)]
        return self.folder / f"{hashlib.sha256(json.dumps(facts, default=str, sort_keys=True).encode()).hexdigest()[:32]}.bin"

    def is_cached(self) -> bool:
        return read_code(self.path)[0] is not None

    def start(self) -> None:
        """Start a process that compiles with low priority and ends with this one. Of several for one file, one compiles."""
        work = self._private_folder()
        job = {"calls": [*self.calls.values()], "settings": _settings(), "device": str(self.device)}
        (work / "job").write_bytes(pickle.dumps(job))
        paths = os.pathsep.join(path for path in sys.path if path)
        env = clean_environment() | {"TORCHINDUCTOR_CACHE_DIR": str(work / "other"), "PYTHONPATH": paths}
        words = [sys.executable, *MODULE, __name__, str(work / "job"), str(self.path)]
        with (work / "log").open("w") as out:
            options = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out, "preexec_fn": die_with_parent}
            options["start_new_session"] = True  # Ctrl-C stops the run, which ends this process when it has saved
            self.process = subprocess.Popen(words, env=env, **options)

    def wait(self) -> str:
        """Wait for the other process. Return why it failed, or ""."""
        if self.process is None:
            return ""
        try:
            code = self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.close()
            return f"it did not finish within {PATIENCE:.0f} s"
        self.process = None
        if code == 0:
            return ""
        lines = (self._private_folder() / "log").read_text(errors="replace").strip().splitlines()
        return (lines[-1] if lines else f"the compiling process exited with code {code}")[:300]

    def load(self) -> None:
        """Let torch find the code of the cache file, and nothing else. It warns about a file that is not used."""
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(self._private_folder() / "own")
        compat.compile_options()
        code, reason = read_code(self.path)
        if code is not None and torch.compiler.load_cache_artifacts(code) is None:
            reason = f"{self.path} was not accepted by torch. The layers are compiled again."
        if reason:
            log.warning("%s", reason)
        self._compiled_before = compat.compiled_graphs()

    def store(self) -> None:
        """Write the cache file if torch has compiled something since `load`."""
        found = torch.compiler.save_cache_artifacts() if compat.compiled_graphs() > self._compiled_before else None
        if found and (reason := write_code(self.path, found[0])):
            log.warning("compiled layers are not cached: %s", reason)

    def close(self) -> None:
        """End the other process."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def _private_folder(self) -> Path:
        """Return a folder that only this process uses, and that is removed at its end. torch itself does not check its cache."""
        if self._work is None:
            space = socket.gethostname()
            # Other hosts and containers, whose processes are not seen here, may share the folder.
            with contextlib.suppress(OSError):
                space = f"{space} {os.stat('/proc/self/ns/pid').st_ino}"
            prefix = f"accel_ddp_compiled_{hashlib.sha256(space.encode()).hexdigest()[:8]}"
            for left in Path(tempfile.gettempdir()).glob(f"{prefix}_*"):  # of processes that were killed
                with contextlib.suppress(OSError, ValueError):
                    if left.stat().st_uid == os.geteuid() and not Path(f"/proc/{int(left.name.split('_')[4])}").exists():
                        shutil.rmtree(left)
            self._work = tempfile.TemporaryDirectory(prefix=f"{prefix}_{os.getpid()}_", ignore_cleanup_errors=True)
        return Path(self._work.name)


def _versions() -> dict[str, str]:
    """Return a digest of this package's code too."""
    files = sorted([*Path(__file__).parent.glob("*.py"), Path(compat.__file__)])
    return versions() | {"code": hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()}


def _settings() -> dict[str, Any]:
    """Return the settings of this process that compiled code depends on."""
    return {
        "matmul": torch.get_float32_matmul_precision(), "cudnn_tf32": torch.backends.cudnn.allow_tf32,
        "deterministic": torch.are_deterministic_algorithms_enabled(), "threads": torch.get_num_threads(),
    }  # fmt: skip


def _modes(device: torch.device) -> dict[str, Any]:
    kind = device.type
    return {
        "autocast": torch.is_autocast_enabled(kind), "dtype": torch.get_autocast_dtype(kind),
        "cached": torch.is_autocast_cache_enabled(), "grad": torch.is_grad_enabled(),
    }  # fmt: skip


def _describe(target: Any, args: tuple, kwargs: dict[str, Any]) -> str:
    about = lambda x: f"{tuple(x.shape)} {x.dtype} {x.stride()} {x.requires_grad}" if isinstance(x, Tensor) else repr(x)
    own = [f"{name} {about(tensor)}" for name, tensor in _tensors_of(target)]
    given = [about(leaf) for leaf in compat.flatten((args, kwargs))[0]]
    modes = next((_modes(x.device) for x in args if isinstance(x, Tensor)), {})
    kind = f"{type(target).__qualname__} {target!r} {target.training}" if isinstance(target, nn.Module) else target.__qualname__
    return "\n".join([kind, *own, *given, str(modes)])


def _tensors_of(target: Any) -> list[tuple[str, Tensor]]:
    return [*target.named_parameters(), *target.named_buffers()] if isinstance(target, nn.Module) else []


# ---- sending calls to the other process


def _without_wrapper(target: Any) -> Any:
    """Return a layer as it was before `LayerCalls` or `PackedLayers`."""
    if isinstance(target, nn.Module):
        state = {name: value for name, value in vars(target).items() if name not in ("forward", "_dispatch")}
        target = plain_class(target).__new__(plain_class(target))
        target.__dict__.update(state)
    return target


class _Pickler(pickle.Pickler):
    """Writes float tensors as shapes. Other tensors keep their values, because kernels use them as places."""

    def persistent_id(self, thing: Any) -> Any:
        if not isinstance(thing, Tensor):
            return None
        if type(thing) not in (Tensor, nn.Parameter) or 0 in thing.stride():
            raise pickle.PicklingError(f"an expanded tensor, or one of type {type(thing).__name__}")
        if not thing.is_floating_point():
            return "values", thing.cpu().numpy()
        kind = "parameter" if isinstance(thing, nn.Parameter) else "tensor"
        return kind, tuple(thing.shape), thing.stride(), thing.dtype, thing.requires_grad


class _Unpickler(pickle.Unpickler):
    device: torch.device

    def persistent_load(self, pid: Any) -> Tensor:
        if pid[0] == "values":
            return torch.from_numpy(pid[1]).to(self.device)
        kind, shape, stride, dtype, needs_gradient = pid
        tensor = torch.empty_strided(shape, stride, dtype=dtype, device=self.device).normal_(0, 0.02)
        if kind == "parameter":
            return nn.Parameter(tensor, needs_gradient)
        return tensor.requires_grad_(needs_gradient).clone() if needs_gradient else tensor  # like the output of a layer


def compile_call(data: bytes, device: torch.device) -> None:
    """Compile a call that was stored by `recording`, forward and backward."""
    reader = _Unpickler(io.BytesIO(data))
    reader.device = device
    target, args, kwargs, modes = reader.load()
    function = compiled(target.forward if isinstance(target, nn.Module) else target)
    with torch.set_grad_enabled(modes["grad"]):
        with torch.autocast(device.type, modes["dtype"], modes["autocast"], modes["cached"]):
            out = function(*args, **kwargs)
        found = [x for x in compat.flatten(out)[0] if isinstance(x, Tensor) and x.requires_grad]
        wanted = [x for x in (*args, *[x for _, x in _tensors_of(target)]) if isinstance(x, Tensor) and x.requires_grad]
        if found and wanted:
            torch.autograd.grad(found, wanted, [torch.zeros_like(x) for x in found], allow_unused=True)


def main(job: str, path: str) -> None:
    """Fill a cache file. Another process that compiles for the same file is faster."""
    os.nice(10)
    given = pickle.loads(Path(job).read_bytes())
    device, settings = torch.device(given["device"]), given["settings"]
    torch.set_float32_matmul_precision(settings["matmul"])
    torch.backends.cudnn.allow_tf32 = settings["cudnn_tf32"]
    torch.use_deterministic_algorithms(settings["deterministic"])
    torch.set_num_threads(settings["threads"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    padding_free.register()
    Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with os.fdopen(os.open(Path(path).with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)) as lock:
        end = time.monotonic() + PATIENCE / 2
        while time.monotonic() < end:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.2)
            except OSError:  # without locks, each process compiles
                break
        if read_code(Path(path))[0] is not None:
            return
        began = time.monotonic()
        for call in given["calls"]:
            compile_call(call, device)
        found = torch.compiler.save_cache_artifacts()
        if reason := "torch has compiled nothing" if found is None else write_code(Path(path), found[0]):
            sys.exit(reason)
        print(f"compiled in {time.monotonic() - began:.1f} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
