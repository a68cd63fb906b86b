"""Compare the parameters of ranks, of which the last one differs in one of many ways, and print whether each is found."""

import torch
from accelerate import Accelerator
from torch import nn

import accel_ddp
from accel_ddp.config.train_config import TrainConfig
from accel_ddp.ranks.failures import Diverged
from accel_ddp.ranks.process import this_rank
from accel_ddp.training.divergence import ParameterCheck

SHAPES = ((), (1,), (7,), (8,), (5, 3), (4, 6), (3, 2, 5), (2, 70_001), (70_001,))
TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def flip_lowest_bit(p: nn.Parameter) -> None:
    bits = p.data.view(-1).view(INTEGERS[p.element_size()])
    bits[len(bits) // 2] ^= 1


def flip_sign(p: nn.Parameter) -> None:
    p.data.view(-1)[-1:].neg_()


def flip_signs(p: nn.Parameter) -> None:
    p.data.neg_()


def failure_of(accelerator: Accelerator, model: nn.Module, every: int = 5) -> str:
    """Return the message of a check that fails, or an empty text."""
    check = ParameterCheck(accelerator, TrainConfig(check_every=every), model)
    check.begin(4)
    check.read(4)
    assert check.passed is None, "step 4 is no multiple of 5"
    try:
        check.require(4)
    except Diverged as error:
        return str(error)
    assert check.passed == (4 if check.is_on else None)
    return ""


def main() -> None:
    accelerator = accel_ddp.start(TrainConfig(global_batch_size=this_rank.num_ranks))
    is_last = this_rank.rank == this_rank.num_ranks - 1
    report = lambda name, is_expected: print(f"case {name}: {'as expected' if is_expected else 'NOT as expected'}", flush=True)
    changes = (flip_lowest_bit, flip_sign, flip_signs)
    torch.manual_seed(0)

    def model_of(*cases: tuple) -> nn.Module:
        model = nn.BatchNorm1d(3)  # its parameters are equal, and its buffers are not
        model.running_mean += is_last
        model.empty = nn.Parameter(torch.zeros(0, 4))
        model.frozen = nn.Parameter(torch.full((9,), float(is_last)), requires_grad=False)
        for number, (dtype, shape, change) in enumerate(cases):
            parameter = nn.Parameter(torch.randn(shape).to(dtype))
            model.register_parameter(f"case{number}", parameter)
            if is_last:
                change(parameter)
        return model

    cases = [(dtype, shape, change) for dtype in TYPES for shape in SHAPES for change in changes]
    found = failure_of(accelerator, model_of(*cases))
    report("all", f"The parameter case0 and {len(cases) - 1} more of {len(cases) + 2} differ" in found)
    report("rank", f"the weights of rank {this_rank.num_ranks - 1} (" in found)
    for case in (
        (torch.float32, (4, 6), flip_lowest_bit),
        (torch.float64, (5, 3), flip_signs),
        (torch.bfloat16, (7,), flip_sign),
    ):
        report(f"{case[:2]} alone", "The parameter case0 differs;" in failure_of(accelerator, model_of(case)))
    report("nothing differs", not failure_of(accelerator, model_of()))
    model = model_of((torch.float32, (4, 6), flip_sign))
    model._ddp_params_and_buffers_to_ignore = ["case0"]
    report("a parameter that DDP ignores", not failure_of(accelerator, model))

    model = model_of()
    model.two = nn.Parameter(torch.tensor([1.0, -2.0]) if is_last else torch.tensor([-1.0, 2.0]))
    report("two signs in opposite directions", "The parameter two differs" in failure_of(accelerator, model))
    model = model_of()
    values = torch.arange(12.0).reshape(3, 4)
    model.layout = nn.Parameter(values.t().contiguous().t() if is_last else values)
    report("another layout in memory", not failure_of(accelerator, model))
    model.view = nn.Parameter(torch.zeros(9, dtype=torch.bfloat16)[1:])  # begins in the middle of 4 bytes
    model.view.data[3] = is_last
    report("a part of a larger buffer", "The parameter view differs" in failure_of(accelerator, model))
    report("turned off", not failure_of(accelerator, model, every=0))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    report("nothing is trained", not failure_of(accelerator, model))


if __name__ == "__main__":
    main()
