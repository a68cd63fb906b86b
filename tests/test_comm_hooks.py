"""`--comm_hook` compresses the gradients that ranks exchange, and a run still converges. tests/test_gpu.py has the hooks of NCCL."""

import torch

from tests.conftest import PROGRAMS, run_ranks

COMPRESSED = PROGRAMS / "compressed.py"


def assert_compressed(hook: str, run: dict, plain: dict) -> None:
    """Assert that the gradients of `run` had less information than those of `plain`, and that both runs end with the same loss."""
    gradient, exact = run["gradients"][0], plain["gradients"][0]  # both of the same weights and items
    rank = lambda matrix: int(torch.linalg.matrix_rank(matrix, rtol=1e-4))
    if hook == "powersgd":  # it compresses from step 10 on: a matrix of 32 x 32 becomes the product of two vectors
        torch.testing.assert_close(gradient, exact, rtol=1e-5, atol=1e-6)
        assert [rank(run["gradients"][step]) for step in (12, 100, -1)] == [1, 1, 1]
        assert min(rank(matrix) for matrix in (run["gradients"][5], *plain["gradients"][[5, 12, 100, -1]])) > 25
    else:
        dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[hook]
        for step in (0, 100, -1):
            found = run["gradients"][step]
            assert torch.equal(found, found.to(dtype).float()), "every number has two bytes"
        assert not torch.equal(exact, exact.to(dtype).float())
        assert 0 < (gradient - exact).abs().max() <= 2 * torch.finfo(dtype).eps * exact.abs().max()
    first, last, expected = plain["losses"][0], sum(run["losses"][-20:]) / 20, sum(plain["losses"][-20:]) / 20
    assert abs(run["losses"][0] / first - 1) < 1e-5
    assert abs(last / expected - 1) < 0.05, (last, expected)
    assert last < 0.2 * run["losses"][10] < 0.2 * first, "most is learned from compressed gradients"


def test_gradients_in_half_precision_over_gloo_converge(tmp_path):
    runs = {}
    for hook in ("none", "fp16"):
        out = tmp_path / f"{hook}.pt"
        run_ranks(2, COMPRESSED, "--comm_hook", hook, "--out", out, "--output_dir", tmp_path / hook).well()
        runs[hook] = torch.load(out)
    assert_compressed("fp16", runs["fp16"], runs["none"])
