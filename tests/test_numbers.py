"""A figure has one source, benchmarks/results.yaml, and the pages that repeat it agree with it."""

import re

import pytest
import yaml

from tests.test_architectures import DEPENDENT, names
from tests.test_layers import ROOT

RESULTS = yaml.safe_load((ROOT / "benchmarks" / "results.yaml").read_text())
FIGURE = r"\d[\d.,]*\d|\d"


def phrases(name: str) -> list[tuple[str, str]]:
    """Return (page, phrase) of a result."""
    pages = RESULTS[name]["pages"]
    return [(page, phrase) for page, found in pages.items() for phrase in ([found] if isinstance(found, str) else found)]


@pytest.mark.parametrize("name", RESULTS)
def test_pages_repeat_the_figure(name):
    assert set(RESULTS[name]) == {"value", "unit", "conditions", "command", "pages"}
    for page, phrase in phrases(name):
        text = " ".join((ROOT / page).read_text().split())
        wanted = phrase.format(value=RESULTS[name]["value"])
        pattern = f"(?:{FIGURE})".join(map(re.escape, re.split(FIGURE, wanted)))  # the phrase with any figures
        found = set(re.findall(pattern, text))
        is_cell = "|" in phrase  # other rows of the table match too
        hint = f"{page} has {found or 'nothing'} instead of {wanted!r} of {name} in benchmarks/results.yaml"
        assert wanted in found if is_cell else found == {wanted}, hint


def test_the_number_of_architectures_is_that_of_the_tests():
    assert RESULTS["architectures"]["value"] == f"{len(names()) - len(DEPENDENT)} architectures"
