"""The tutorial, as its reader meets it: sections of code blocks, in their order."""

from __future__ import annotations

import re
from pathlib import Path


class Tutorial:
    """Gives each block once, in the order of the page; what was not asked for is left."""

    def __init__(self, page: Path):
        self.blocks: dict[int, list[tuple[str, str]]] = {}
        for number, section in re.findall(r"^## (\d+)\. (.*?)(?=^## |\Z)", page.read_text(), re.MULTILINE | re.DOTALL):
            self.blocks[int(number)] = re.findall(r"^```(\w+)\n(.*?)^```", section, re.MULTILINE | re.DOTALL)

    def next(self, section: int, language: str = "bash") -> str:
        found, text = self.blocks[section].pop(0)
        assert found == language, f"section {section} has a block of {found} where {language} is run"
        return text

    def left(self) -> list[str]:
        return [text for blocks in self.blocks.values() for _, text in blocks]
