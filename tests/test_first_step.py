"""What would train silently wrong, or end in a crash of a library, is an error on every rank before the first step.

See tests/programs/first_step.py for the mistakes.
"""

import json

import pytest

from tests.conftest import PROGRAMS, run_ranks

FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
WORDS = {
    "sum": ["no error"],
    "mean": ["it is the mean of theirs. Return the loss of each item", "--allow_inexact"],
    "mean, allowed": ["no error", "--allow_inexact: the loss of two items is"],
    "mean of one": ["no error"],  # a micro-batch of two may need too much memory
    "broadcast": ["`terms` returned a loss of shape [2, 2] for 2 items. Return the loss of each item"],
    "hidden broadcast": ["an item next to itself counts four times", "Add .squeeze(-1)"],
    "neighbors": ["items change each other's loss", "`whole_batch` in docs/own_recipe.md"],
    "count": ["`count` returned 8 for two items together, and 8 and 8 for each alone"],
    "padded count": ["`count` returned 6 for two items together, and 3 and 2 for each alone", "without padding"],
    "padding": ["no error", "warning: the loss of two items is", "labels of -100"],
    "noise": ["no error"],
    "noise of collate": ["no error"],
    "own generator": ["no error", "of the training data is another one each time it is read"],
    "counter": ["when it is computed again in eval mode: it depends on what no checkpoint contains"],
    "dropout": ["the model draws random numbers in eval mode", "`self.training`"],
    "generator": ["it depends on what no checkpoint contains"],
    "whole batch": ["`losses` of GradCache returned a tensor of shape [] for"],
    "optimizer": ["the optimizer does not hold 4 trained parameters", "layers.0.weight", "--freeze layers"],
    "unused": ["no error", "2 trained parameters got no gradient in the first step: other.weight, other.bias.", "--freeze other"],
}
BETWEEN_RANKS = {
    "length": ["the training data differ between ranks (items: 32 on rank 0, and 30 on rank 1)", "`fit` shares it out"],
    "content": ["item 31 of the training data is another one on rank 1 than on rank 0"],
    "frozen": ["the parameter head.bias is trained, torch.float32 [1] on rank 0, and frozen, torch.float32 [1] on rank 1"],
    "shape": ["the parameter layers.0.weight is", "[4, 4] on rank 0", "[5, 4] on rank 1"],
    "evaluation": ["the evaluation data have 20 items on rank 0 and 16 on rank 1"],
}
WARNED = [name for name, words in WORDS.items() if words[0] == "no error"]


@pytest.mark.parametrize(
    ("ranks", "env"),
    [
        pytest.param(1, {}, id="one rank"),
        pytest.param(2, {}, id="two ranks"),
        pytest.param(2, FSDP, id="sharded", marks=pytest.mark.slow),
        pytest.param(3, {}, id="three ranks", marks=pytest.mark.slow),  # whose buckets are settled before the first step
    ],
)
def test_mistakes_are_found_before_the_first_step_and_named_on_every_rank(tmp_path, ranks, env):
    out, batch = tmp_path / "found", 4 * ranks
    options = ["--global_batch_size", batch, "--steps", 2, "--output_dir", tmp_path / "runs"]
    ended = run_ranks(ranks, PROGRAMS / "first_step.py", "--out", out, *options, **env).well()
    found = [json.loads((tmp_path / f"found.{rank}").read_text()) for rank in range(ranks)]
    words = {**WORDS, **(BETWEEN_RANKS if ranks > 1 else {})}
    for name, parts in words.items():
        last = f"rank {ranks - 1}"
        for part in parts:
            assert part.replace("rank 1", last) in found[0][name], f"{name}: {found[0][name]}"
        if name not in WARNED:
            assert all(one[name] == found[0][name] for one in found), name
            assert len(found[0][name].splitlines()) == 1
    assert found[0]["sum"].count("warning") == 0
    assert all(one["undisturbed"] for one in found)
    assert "Traceback" not in ended.text
