"""The description of the package on PyPI: README.md without links and pictures that work only inside the repository."""

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface


class PyPIReadme(MetadataHookInterface):
    def update(self, metadata: dict) -> None:
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        text = re.sub(r"^!\[[^]]*\]\((?!https://)[^)]*\)\n+", "", text, flags=re.MULTILINE)
        text = re.sub(r" \(\[[^]]*\]\((?!https://)[^)]*\)\)", "", text)
        text = re.sub(r"\[([^]]*)\]\((?!https://)[^)]*\)", r"\1", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
