"""Each private interface of torch and accelerate still does what `accel_ddp.compat` says. An upgrade of torch is tested here."""

import ast
import contextlib
import copy
import functools
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from accel_ddp import compat

PACKAGE = Path(__file__).parents[1] / "accel_ddp"


@pytest.fixture(scope="module")
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def uses_private_names(code: str, private: set[str]) -> list[str]:
    """Return the imports of private names of torch and accelerate in `code`, and the uses of attributes in `private`."""
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            home = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            names = [f"{home}{alias.name}" for alias in node.names]
            is_found = any(name.startswith(("torch.", "accelerate.")) and "._" in name for name in names)
        elif isinstance(node, ast.Attribute):
            is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            text = ast.unparse(node)
            is_torch = text.startswith(("torch.", "nn.", "dist.")) and node.attr.startswith("_") and not node.attr.endswith("__")
            is_found = (node.attr in private and not is_own) or (is_torch and text != "torch.ops.aten._to_copy")
        else:
            is_found = isinstance(node, ast.Constant) and node.value in private
        if is_found:
            found.append(ast.unparse(node))
    return found


def test_private_interfaces_of_torch_and_accelerate_are_used_in_one_module_only():
    tree = ast.parse((PACKAGE / "compat.py").read_text())
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    private = {name for name in attributes | strings if name.startswith("_") and name.isidentifier() and not name.endswith("__")}
    assert {"_sync_buffers", "_pcontext"} <= private
    allowed = {
        "step_trace": ["from torch.utils._python_dispatch import TorchDispatchMode"],  # documented under this name
    }
    for path in PACKAGE.rglob("*.py"):
        if path.name != "compat.py":
            assert uses_private_names(path.read_text(), private) == allowed.get(path.stem, []), path


def test_every_entry_names_its_version_and_has_a_test():
    functions = [node for node in ast.parse((PACKAGE / "compat.py").read_text()).body if isinstance(node, ast.FunctionDef)]
    tests = Path(__file__).read_text()
    for function in functions:
        assert re.search(r"(torch|accelerate|transformers|Python)\s\d\.\d", ast.get_docstring(function)), function.name
        assert f"compat.{function.name}(" in tests, f"{function.name} has no test"


# ---- modules and tensors


def test_parameters_and_buffers_can_be_replaced_by_plain_tensors():
    norm = nn.BatchNorm1d(2)
    compat.own_parameters(norm)["weight"] = torch.full((2,), 3.0)
    compat.own_buffers(norm)["running_mean"] = torch.full((2,), 5.0)
    assert norm.weight.tolist() == [3, 3]
    assert norm.running_mean.tolist() == [5, 5]


def test_the_tensors_of_a_model_can_be_mapped():
    model = nn.BatchNorm1d(2)
    compat.map_tensors(model, lambda tensor: tensor + 1)
    assert model.weight.tolist() == [2, 2]
    assert model.running_var.tolist() == [2, 2]


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(2), nn.BatchNorm3d(2), nn.SyncBatchNorm(2)])
def test_batch_norm_of_every_kind_is_found(norm):
    assert compat.has_batch_norm(nn.Sequential(nn.Linear(2, 2), norm))
    assert not compat.has_batch_norm(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)))


def test_views_have_the_storage_of_their_tensor_also_if_it_is_empty_or_fake():
    for tensor in (torch.zeros(4), torch.zeros(0)):
        assert compat.storage_key(tensor) == compat.storage_key(tensor.view(-1))
        assert compat.storage_key(tensor) != compat.storage_key(tensor.clone())
    with compat.fake_mode():
        fake, other = torch.zeros(4), torch.zeros(4)
        assert compat.storage_key(fake[1:]) == compat.storage_key(fake) != compat.storage_key(other)


def test_a_modification_in_place_changes_the_version():
    tensor = torch.zeros(2)
    before = compat.version_of(tensor)
    assert compat.version_of(tensor + 1) == before == compat.version_of(tensor)
    tensor.add_(1)
    assert compat.version_of(tensor) != before


def test_many_tensors_are_copied_and_moved_at_once():
    targets = [torch.zeros(2), torch.zeros(3)]
    compat.copy_all(targets, [torch.ones(2), torch.full((3,), 2.0)])
    assert [t.tolist() for t in targets] == [[1, 1], [2, 2, 2]]
    compat.move_all(targets, [torch.full((2,), 3.0), torch.zeros(3)], torch.tensor(0.25))
    assert [t.tolist() for t in targets] == [[1.5, 1.5], [1.5, 1.5, 1.5]]


def test_a_flat_tensor_is_split_into_views():
    flat = torch.arange(6.0)
    first, second = compat.split_like(flat, [torch.empty(2, 2), torch.empty(2)])
    assert first.tolist() == [[0, 1], [2, 3]]
    assert second.tolist() == [4, 5]
    flat += 1
    assert second.tolist() == [5, 6]


def test_the_norm_of_many_tensors_has_the_bits_of_torch():
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(n, 3, generator=generator) for n in range(1, 40)]
    for given in (tensors, [t.to(torch.bfloat16) for t in tensors], [tensors[0], tensors[1].double()], []):
        assert torch.equal(compat.norm_of(given), torch.nn.utils.get_total_norm(given))


def test_nested_arguments_are_flattened_and_restored():
    tree = ((torch.zeros(1), None), {"a": [1, "b"], "c": True})
    leaves, structure = compat.flatten(tree)
    assert leaves[1:] == [None, 1, "b", True]
    assert structure.unflatten(leaves) == tree


# ---- operators


def test_flash_attention_accepts_its_arguments():
    """On the meta device, which checks arguments and shapes. Tests on a GPU compare the values."""
    q = torch.empty(10, 2, 8, dtype=torch.float16, device="meta")
    starts = torch.empty(3, dtype=torch.int32, device="meta")
    for window in (-1, 3):
        out, lse, state = compat.flash_attention(q, q, q, starts, starts, 6, 0.0, True, None, window)
        assert out.shape == q.shape
        assert lse.dtype == torch.float32
        found = compat.flash_attention_gradients(out, q, q, q, out, lse, starts, starts, 6, 0.0, True, state, None, window)
        assert [gradient.shape for gradient in found] == [q.shape] * 3


def test_products_of_experts_are_found():
    assert compat.grouped_products()
    assert all(callable(function) for function in compat.grouped_products())


def test_the_cpu_says_whether_it_has_bf16():
    flags = Path("/proc/cpuinfo").read_text() if sys.platform == "linux" else ""
    assert isinstance(compat.cpu_has_bf16(), bool)
    if "avx512_bf16" in flags or "amx_bf16" in flags:
        assert compat.cpu_has_bf16()


# ---- backward passes and optimizers


def test_a_function_is_called_after_the_last_gradient():
    weight = torch.ones(2, requires_grad=True)
    loss, seen = weight.sum(), []
    compat.queue_after_backward(loss, lambda: seen.append(weight.grad.tolist()))
    assert not seen
    loss.backward()
    assert seen == [[1, 1]]


class Counting(TorchFunctionMode):
    calls = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        Counting.calls += function is torch.exp
        return function(*args, **(kwargs or {}))


def test_checkpointed_layers_are_computed_again_inside_of_the_mode():
    weight, unused = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    with Counting():
        loss = checkpoint(lambda: torch.exp(weight).sum(), use_reentrant=False)
        found = compat.gradients_in_modes(loss, [weight, unused])
    assert Counting.calls == 2
    assert found[1] is None
    assert torch.equal(found[0], torch.exp(torch.ones(2)))
    assert weight.grad is None


def test_fused_optimizers_read_found_inf_and_others_do_not():
    weights = [nn.Parameter(torch.ones(2))]
    assert compat.reads_found_inf(torch.optim.AdamW(weights, fused=True))
    assert not compat.reads_found_inf(torch.optim.AdamW(weights, foreach=True))
    assert not compat.reads_found_inf(torch.optim.Adagrad(weights))


def test_compilations_are_announced():
    import torch._dynamo  # otherwise nothing is compiled

    seen = []
    with compat.compile_callbacks(lambda *_: seen.append("begin"), lambda *_: seen.append("end")):
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    assert seen == ["begin", "end"]
    torch.compile(lambda x: x + 2, backend="eager")(torch.ones(2))
    assert len(seen) == 2


@pytest.mark.gpu
def test_the_allocator_leaves_a_failed_capture():
    pool, graph, stream = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        with pytest.raises(RuntimeError):
            torch.ones(1, device="cuda").item()  # a capture cannot contain it
        with contextlib.suppress(RuntimeError):
            graph.capture_end()
        compat.end_failed_capture(torch.cuda.current_device(), pool)
    torch.nn.functional.dropout(torch.ones(8, device="cuda"))  # the generator of torch 2.11 refused to draw
    held = torch.cuda.memory_reserved()
    big = torch.empty(2**28, device="cuda")
    del big
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= held


# ---- DDP


def test_ddp_reports_which_gradients_it_received(group):
    assert compat.gradient_times(nn.Linear(2, 2)) == []
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    before = compat.gradient_times(ddp)
    ddp(torch.ones(1, 2)).sum().backward()
    assert compat.gradient_times(ddp) != before
    assert compat.without_gradient(ddp) == []


class FirstOnly(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        return self.used(x)


def test_ddp_waits_for_parameters_without_a_gradient(group):
    ddp = DistributedDataParallel(FirstOnly())
    ddp(torch.ones(1, 2)).sum().backward()
    assert compat.without_gradient(ddp) == [2, 3]
    unused = list(ddp.module.unused.parameters())
    torch.autograd.backward(unused, [torch.zeros_like(p) for p in unused])
    assert compat.without_gradient(ddp) == []


def test_the_broadcast_of_buffers_can_be_timed(group):
    ddp, seen = DistributedDataParallel(nn.BatchNorm1d(2)), []
    compat.around_buffer_sync(ddp, lambda: seen.append("before"), lambda: seen.append("after"))
    compat.around_buffer_sync(nn.BatchNorm1d(2), seen.clear, seen.clear)  # without DDP
    ddp(torch.rand(4, 2))
    assert seen == ["before", "after"]
    with torch.no_grad():
        ddp(torch.rand(4, 2))
    assert len(seen) == 2


def test_ddp_ignores_what_it_was_told_to_ignore():
    model = nn.Linear(2, 2)
    assert compat.ignored_by_ddp(model) == set()
    compat.ignore_in_ddp(model, ["bias"])
    assert compat.ignored_by_ddp(model) == {"bias"}


def test_tensors_inside_of_a_fake_mode_can_have_values():
    with compat.fake_mode():
        with compat.real_tensors():
            assert torch.ones(2).sum().item() == 2
        assert type(torch.ones(2)) is not torch.Tensor


# ---- FSDP and DTensor


def sharded(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (1,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def test_the_backward_pass_and_the_waits_of_each_part_are_observed(group):
    model, seen = sharded(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), FirstOnly())), []

    @contextlib.contextmanager
    def waits(number):
        yield
        seen.append(("wait", number))

    def reduce(number, params, is_sent):
        used = compat.collect_gradients(params, is_sent)
        seen.append((number, [p in used for p in params]))

    for number, layer in enumerate(model):
        (one,) = compat.fsdp_groups(layer)
        layer.set_reshard_after_forward(number == 1)  # the others are gathered once, and do not wait in the backward pass
        begin = lambda number=number: seen.append(("gather", number))
        compat.observe_group(one, begin, functools.partial(reduce, number), functools.partial(waits, number))
    assert compat.fsdp_groups(model) == []  # all of its parameters belong to layers
    model(torch.ones(1, 2)).sum().backward()
    assert seen == [
        ("wait", 0), ("wait", 1), ("wait", 2), ("gather", 2), ("wait", 1), (2, [True, True, False, False]), ("wait", 2),
        ("gather", 1), (1, [True, True]), ("wait", 1), ("gather", 0), (0, [True, True]), ("wait", 0),
    ]  # fmt: skip
    assert model[2].unused.weight.grad.full_tensor().tolist() == [[0, 0], [0, 0]]


def test_a_layer_can_be_called_before_the_model(group):
    model = sharded(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    compat.make_root(model)
    assert model[0](torch.ones(1, 2)).shape == (1, 2)
    assert model(torch.ones(1, 2)).shape == (1, 2)  # torch refuses it if the layer has become a root


class Scaled(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(2, 2))
        self.scale = nn.Parameter(torch.full((2,), 3.0))

    def forward(self, x):
        return self[0](x) * self.scale


def test_parts_of_a_sharded_model_can_be_called_with_and_without_its_root(group):
    torch.manual_seed(0)
    plain, x = Scaled(), torch.ones(1, 2)
    model = sharded(copy.deepcopy(plain))
    expected = torch.autograd.grad(plain(x).sum(), [*plain.parameters()])
    for compute in (lambda: model(x).sum(), lambda: (model[0](x) * model.scale).sum()):
        compat.within_forward(model, compute).backward()
        torch.testing.assert_close([p.grad.full_tensor() for p in model.parameters()], [*expected])
        model.zero_grad()


class Fails(nn.Module):
    fails = False

    def forward(self, x):
        if self.fails:
            raise ValueError("out of memory")
        return x


def test_a_sharded_model_can_be_used_after_an_error(group):
    model = sharded(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), Fails())))
    model[1][1].fails = True
    with pytest.raises(ValueError, match="out of memory"):
        model(torch.ones(1, 2))
    compat.reset_sharded([model, model[0], model[1]])
    model[1][1].fails = False
    model(torch.ones(1, 2)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_transformers_generates_on_all_ranks(group):
    from transformers.integrations.fsdp import is_fsdp_managed_module

    model = nn.Linear(2, 2)
    assert not is_fsdp_managed_module(model)
    compat.let_all_ranks_generate(model)
    assert is_fsdp_managed_module(model)


def test_the_place_of_a_part_in_its_tensor(group):
    whole = distribute_tensor(torch.arange(6.0).view(3, 2), init_device_mesh("cpu", (1,)), [Shard(0)])
    assert compat.region_of(whole) == ([0, 0], [3, 2])
    made = compat.dtensor_like(torch.ones(3, 2, dtype=torch.float64), whole)
    assert isinstance(made, DTensor)
    assert made.dtype == torch.float64
    assert (made.placements, made.shape, made.full_tensor().sum().item()) == (whole.placements, whole.shape, 6)


# ---- fake tensors


def test_fake_tensors_have_shapes_autocast_and_no_values():
    real = torch.ones(2, 2)
    with compat.fake_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        out = torch.zeros(2**20, 2) @ real
    assert (out.shape, out.dtype, out.device.type) == ((2**20, 2), torch.bfloat16, "cpu")
    assert type(out) is not torch.Tensor


# ---- Accelerate


def test_accelerate_launch_does_not_check_its_port(monkeypatch):
    import accelerate.utils.launch as launch

    monkeypatch.setattr(launch, "is_port_in_use", launch.is_port_in_use)  # restored at the end
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert launch.is_port_in_use(port)
        compat.skip_port_check()
        assert not launch.is_port_in_use(port)


# ---- torch's launcher and process groups


def rendezvous(backend: str, rank: int | None = None):
    """Return torch's own handler. The one of its registry is wrapped if pytest's arguments look like a script of this package."""
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import create_rdzv_handler

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    params = RendezvousParameters(backend, f"127.0.0.1:{port}", "job", 1, 1, "127.0.0.1", rank=rank)
    if backend == "static":
        return create_rdzv_handler(params)
    made, store = create_backend(params)
    return create_handler(store, made, params)


def test_a_rendezvous_backend_can_be_replaced(monkeypatch):
    from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry

    assert {"static", "c10d"} <= set(compat.rendezvous_creators())
    handler = rendezvous("static", rank=0)
    monkeypatch.setitem(compat.rendezvous_creators(), "static", lambda params: handler)
    assert rendezvous_handler_registry.create_handler(RendezvousParameters("static", "", "job", 1, 1)) is handler


def test_the_store_and_the_timer_of_a_rendezvous_are_found():
    static = rendezvous("static", rank=0)
    assert compat.store_of_handler(static) is None
    static.next_rendezvous()
    store = compat.store_of_handler(static)
    store.set("key", "value")
    assert store.get("key") == b"value"
    compat.stop_keep_alive(static)  # it has no timer
    dynamic = rendezvous("c10d")
    assert compat.store_of_handler(dynamic) is not None
    before = set(threading.enumerate())
    dynamic.next_rendezvous()
    (timer,) = [thread for thread in threading.enumerate() if thread not in before]
    compat.stop_keep_alive(dynamic)
    timer.join(10)
    assert not timer.is_alive()


def test_the_exit_codes_of_the_ranks_of_an_agent_are_found(tmp_path):
    from torch.distributed.elastic.agent.server import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

    spec = WorkerSpec(
        "trainer", 2, rendezvous("static", rank=0), entrypoint=sys.executable, max_restarts=0, monitor_interval=0.1,
        args=("-c", "import os, sys, time; time.sleep(9 * (os.environ['RANK'] == '1')); sys.exit(3)"),
    )  # fmt: skip
    agent = LocalElasticAgent(spec, DefaultLogsSpecs(str(tmp_path)))
    assert agent.run().is_failed()
    assert compat.exit_codes_of(agent) == [3, -15]
    assert compat.exit_codes_of(object()) == []


def test_torchrun_says_whether_it_hides_output(tmp_path):
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

    assert not compat.hides_output(DefaultLogsSpecs(str(tmp_path)))
    assert compat.hides_output(DefaultLogsSpecs(str(tmp_path), redirects=Std.OUT))
    assert compat.hides_output(DefaultLogsSpecs(str(tmp_path), local_ranks_filter={0}))


def test_collectives_are_recorded(group):
    dist.all_reduce(torch.zeros(768))
    entries = compat.recorded_collectives()
    last = max(entries, key=lambda entry: entry["collective_seq_id"])
    assert last["process_group"][1] == "default_pg"
    assert last["profiling_name"].endswith("all_reduce")
    assert last["input_sizes"] == [[768]]


def test_chat_templates_write_the_date_that_is_set():
    import datetime

    from transformers.utils.chat_template_utils import render_jinja_template

    template = "{{ strftime_now('%d %b %Y') }}"
    compat.set_template_date(template, datetime.date(2020, 2, 3))
    assert render_jinja_template([[{"role": "user"}]], chat_template=template)[0] == ["03 Feb 2020"]


# ---- programs and forks; tests/test_trackers.py has the race that the lock prevents

STARTS = """
import subprocess
from accel_ddp import compat
from accel_ddp.nodes import spawn
spawn.keep_forks_apart_from_starts()
first = subprocess.Popen.__init__
spawn.keep_forks_apart_from_starts()
assert subprocess.Popen.__init__ is first
print(subprocess.run(["echo", "started"], capture_output=True, text=True, preexec_fn=int).stdout)
import sys
assert not {"torch", "accelerate", "numpy"} & set(sys.modules)
"""


def test_programs_start_inside_of_the_lock_and_nothing_imports_torch():
    ended = subprocess.run([sys.executable, "-c", STARTS], cwd=PACKAGE.parent, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout.strip()) == (0, "started"), ended.stderr


def test_torch_has_the_settings_of_the_compiler():
    """Setting one that does not exist is an error. The options are those that torch.compile accepts."""
    options, large = compat.compile_options(8192, 512), compat.compile_options(8192, 768)
    without_limits = {"deterministic": True, "triton.mix_order_reduction_non_strict_mode": True}
    assert options == without_limits | {"triton.mix_order_reduction": False}
    assert large == without_limits | {"triton.mix_order_reduction": True}
    torch.compile(lambda x: x, options=options)
    before = compat.compiled_graphs()
    with torch.compiler.set_stance("force_eager"):
        torch.compile(lambda x: x + 3, options=options)(torch.ones(2))
    assert compat.compiled_graphs() == before


@pytest.mark.slow
def test_graphs_that_are_compiled_are_counted():
    before = compat.compiled_graphs()
    torch.compile(lambda x: (x * 7.25).sin(), options=compat.compile_options())(torch.ones(3))
    assert compat.compiled_graphs() == before + 1


def test_layers_are_checkpointed_in_eval_mode_too_in_which_no_dropout_trains():
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 50}
    model, ids, found = LlamaForCausalLM(LlamaConfig(**shape)).eval(), torch.arange(12).view(2, 6), []
    calls = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()  # with the cache, which is the default
        found.append((len(calls), model.lm_head.weight.grad.clone(), model.model.embed_tokens.weight.grad.clone()))
        model.zero_grad(), calls.clear()
        compat.checkpoint_layers(model)
    assert [number for number, *_ in found] == [1, 2]
    assert all(torch.equal(a, b) for a, b in zip(found[0][1:], found[1][1:]))
    with torch.no_grad():
        model(input_ids=ids)
    assert len(calls) == 1


WORKERS_RUN = """
import atexit, multiprocessing, time, torch
from torch.utils.data import DataLoader
from accel_ddp import compat
began = []
def check():  # in place of torch's function, which runs after ours too
    took = time.monotonic() - began[0]
    until = time.monotonic() + 5
    while multiprocessing.active_children() and time.monotonic() < until: time.sleep(0.01)  # a busy machine ends them late
    print("left:", len(multiprocessing.active_children()), "without a wait of torch:", took < 5)
atexit.register(check)
def start(last):  # `last`: the seconds of the second batch
    batches = ([i] for i in (0, 1))  # without a length, as those of a run
    wait = lambda rows: time.sleep(rows[0] * last)
    items = DataLoader(range(2), batch_sampler=batches, num_workers=2, persistent_workers=True, collate_fn=wait)
    next(iter(items))
    items._iterator._pin_memory = True  # as on a GPU
    for _ in range(2):  # as two evaluations
        compat.end_workers_at_exit(items, lambda: print("exits"))
    return items
some, others = start(0), start(1000)
began.append(time.monotonic())
print("running:", len(multiprocessing.active_children()))
"""


def test_workers_have_ended_when_torch_waits_for_them_at_the_exit():
    """torch waits 5 s for each of them. One of these four never gets to the end of its batch."""
    ended = subprocess.run([sys.executable, "-c", WORKERS_RUN], cwd=PACKAGE.parent, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout.splitlines()) == (0, [
        "running: 4", "exits", "exits", "left: 0 without a wait of torch: True",
    ]), ended.stderr  # fmt: skip
