"""The estimate of GPU memory equals what a real model has, and the command prints it."""

import json
import subprocess
import sys
from types import SimpleNamespace

import torch
from torch import nn

from accel_ddp.memory.states import count_states


def test_weights_gradients_and_optimizer_state_are_counted_to_the_byte():
    for optimizer, momentum in (("adamw", 0.9), ("sgd", 0.9), ("sgd", 0.0)):
        model = nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.Linear(5, 3))
        model[2].weight.requires_grad_(False)
        trained = [p for p in model.parameters() if p.requires_grad]
        found = count_states(model, SimpleNamespace(optimizer=optimizer, momentum=momentum, quantize="no"))
        made = torch.optim.AdamW(trained) if optimizer == "adamw" else torch.optim.SGD(trained, lr=0.1, momentum=momentum)
        model(torch.ones(2, 7)).sum().backward()
        made.step()
        size = lambda tensors: sum(t.numel() * t.element_size() for t in tensors)
        state = [t for values in made.state.values() for t in values.values() if isinstance(t, torch.Tensor)]
        assert found.weights == size(model.parameters())
        assert found.gradients == size(p.grad for p in trained)
        assert found.optimizer == size(state)


def test_the_command_prints_an_estimate_of_a_builtin_model():
    words = ["estimate", "--gpus", "1", "2", "--json", "sft", "--max_length", "64"]
    done = subprocess.run([sys.executable, "-m", "accel_ddp.cli", *words], capture_output=True, text=True, check=True)
    one, ddp, fsdp = json.loads(done.stdout)["estimates"]
    assert (one["kind"], ddp["kind"], fsdp["kind"]) == ("one GPU", "DDP", "FSDP")
    assert one["optimizer"] > 2 * one["gradients"] > 0
    assert fsdp["optimizer"] == -(-ddp["optimizer"] // 2)
    assert one["activations"] > 0
    assert one["loss"] > 0
