"""Tiny models of 83 architectures learn the same on one rank and on two, in any micro-batches, and after a resume.

One launch of two ranks computes all that were selected. By default these are the most different ones. All others are slow:
`pytest -m "slow or not slow" tests/test_architectures.py`. After an update of transformers, the names of the failing tests show
what changed.
"""

import ast
import json
import re
from pathlib import Path

import pytest

from tests.conftest import PROGRAMS, ROOT, run_ranks

PROGRAM = PROGRAMS / "architectures.py"
# Their result for a text depends on its padding, so that `fit` refuses them.
DEPENDENT = {
    "BigBird, sparse",  # a micro-batch of short texts switches the model to full attention
    "ConvBert",  # convolutions reach into the padding
    "FNet",  # the Fourier transform has no mask
    "Llama, dynamic rope",  # the longest text of a micro-batch determines the rotary embeddings
    "Nystromformer",  # landmarks are means over segments of the padded text
    "Phi3, longrope",  # as with dynamic rope
    "XLNet",  # it classifies by the last position, which is padding
}
# Why a run computes them with padding. docs/models.md shows these texts.
PADDED = {
    "Albert": "its layers cannot compute without padding",
    "ConvBert": "a text in a row changes the result of the others in convbert.encoder.layer.0.attention.self",
    "Doge": "DogeAttention of layer 0 passes attention_mask to its attention, which would be ignored",
    "Falcon": "a text in a row changes the result of the others in transformer.h.0.self_attention",
    "FNet": "a text in a row changes the result of the others in fnet.encoder.layer.0.fourier.self",
    "Funnel": "its layers cannot compute without padding",
    "MiniMaxM3VL": "MiniMaxM3VLAttention of layer 1 passes block_indices to its attention, which would be ignored",
    "Mpt": "its layers cannot compute without padding",
    "MPNet": "a text in a row changes the result of the others in mpnet.encoder.layer.0.attention.attn",
    "Nystromformer": "a text in a row changes the result of the others in nystromformer.encoder.layer.0.attention.self",
    "SqueezeBert": "a text in a row changes the result of the others",
    "StableLm": "its layers do not pass their arguments on to the attention",
    "XLNet": "its layers were not found",
}
# Why they cannot be sharded. docs/models.md shows these texts too.
UNSHARDED = {
    "Albert": "no list of layers",
    "BigBird, sparse": "in bf16: scatter(): Expected self.dtype to be equal to src.dtype",
    "Deberta": "in bf16: value cannot be converted to type c10::BFloat16",
    "Doge": "in bf16: value cannot be converted to type c10::BFloat16",
    "Funnel": "no list of layers",
    "SqueezeBert": "calls the `forward` method of a layer",
}
DEFAULT = {
    "Bert", "DebertaV2", "FNet", "ModernBert",  # of encoders: absolute and relative positions, no attention, no padding
    "Gemma3", "GPT2", "Llama", "Llama, classes", "Llama, dynamic rope", "Mamba", "Mixtral",  # of decoders: windows, states, experts
    "DeepseekV3", "Doge", "FalconH1", "MiniMaxM3VL", "Olmo3", "Qwen3_5",  # latent attention, masks of a layer, hybrids, blocks
    "Bart", "T5", "ConvNext", "ViT",
}  # fmt: skip


def names() -> list[str]:
    """Return the names in the tables of the program, which is not imported, because that takes seconds."""
    tables = ("ENCODERS", "DECODERS", "RECENT", "SEQ2SEQ", "IMAGES", "SPECIAL")
    tree = ast.parse(Path(PROGRAM).read_text())
    found = {
        node.targets[0].id: node.value for node in tree.body if isinstance(node, ast.Assign) and hasattr(node.targets[0], "id")
    }
    return [key.value for table in tables for key in found[table].keys]


def test_pages_state_the_number_of_models():
    learned, pages = len(names()) - len(DEPENDENT), ("README.md", "docs/promises.md", "docs/models.md")
    assert [
        page for page in pages if not re.search(rf"\b{learned} (?:architectures|models|of them)", (ROOT / page).read_text())
    ] == []


@pytest.fixture(scope="module")
def facts(request, tmp_path_factory) -> dict[str, dict]:
    """Return the facts about each architecture of the tests that were selected."""
    folder = tmp_path_factory.mktemp("architectures")
    selected = [
        item.callspec.params["name"] for item in request.session.items if item.path == request.path and hasattr(item, "callspec")
    ]
    only = ["--only", *(selected or ["Bert"])]
    run_ranks(2, PROGRAM, "--out", folder / "facts.json", "--output_dir", folder / "run", *only, timeout=900).well()
    return json.loads((folder / "facts.json").read_text())


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in DEFAULT else [pytest.mark.slow]) for name in names()])
def test_an_architecture_learns_the_same_however_its_items_are_spread(facts, name):
    found = facts[name]
    assert "error" not in found, f"{name} cannot be built or trained with this version of transformers: {found['error']}"
    assert found["moved"] > 1e-4, "the updates have not changed the weights"
    assert found["resumed"] == 0, "a resumed run has other weights"
    assert PADDED.get(name, "") in found["padded"], "a run is padded for another reason"
    assert bool(found["padded"]) == (name in PADDED), f"a run is padded: {found['padded']!r}. Change PADDED."
    assert found["depends"] > 1e-2, "the scores of an item do not depend on its tokens"
    assert found["isolated"] <= (1e-6 if "Moe" in name or "Mixtral" in name else 0), "an item changes the scores of the others"
    assert found["apart"] < 1e-5, "the scores of a run are not those of the plain model"
    if name in DEPENDENT:
        assert found["micro"] > 1e-5, f"the weights of {name} do not depend on padding any more. Remove it from DEPENDENT."
        assert "computes a different result" in found["padding"], "the padding check does not detect it"
    else:
        assert found["padding"] == ""
        assert found["ranks"] < 1e-6, "two ranks and a plain loop on one process have different weights"
        assert found["micro"] < 1e-6, "micro-batches of one item give other weights"


@pytest.mark.slow
def test_sharded_architectures_learn_what_one_rank_learns_and_their_dependence_on_padding_is_found_in_bf16(tmp_path):
    """Two ranks compute all of them in one launch."""
    run_ranks(2, PROGRAM, "--sharded", "--out", tmp_path / "facts.json", "--output_dir", tmp_path / "run", timeout=1800).well()
    found = json.loads((tmp_path / "facts.json").read_text())
    for name in set(names()) - set(UNSHARDED):
        assert found[name]["moved"] > 1e-4, name
        for padding in ("padding no", "padding bf16"):
            assert ("computes a different result" in found[name][padding]) == (name in DEPENDENT), (name, padding)
        assert found[name]["bf16"] < 0.1, name
        if name not in DEPENDENT:
            assert max(found[name]["ranks"], found[name]["micro"]) < 1e-6, name
    for name, reason in UNSHARDED.items():
        assert reason.removeprefix("in bf16: ") in found[name]["error"], name


def test_a_model_that_depends_on_padding_is_refused_on_every_rank(facts):
    found = facts["fit"]
    first, second = found["FNet"]
    assert first == second
    assert re.search(
        r"--micro_batch_size 8: the model computes a different result for a text of \d+ tokens if it is padded to the 24", first
    )
    assert "Use --micro_batch_size 1, which needs no padding" in first
    assert "--allow_inexact" in first
    others = {name: errors for name, errors in found.items() if name != "FNet"}
    assert len(others) == 5
    assert all(errors == ["", ""] for errors in others.values()), "options that make it possible, and a model without dependence"
