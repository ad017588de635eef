"""What is wrong with a capture, or missing in it: named, so that nothing is silently read as zero."""

from __future__ import annotations

from dataclasses import asdict, dataclass

# error: nothing can be said; warning: something can't be said, or must be read with care; note: good to know.
LEVELS = ("error", "warning", "note")


@dataclass(frozen=True)
class Finding:
    code: str
    level: str
    where: str  # a file, a rank, or the whole profile
    text: str

    def __str__(self) -> str:
        return f"{self.level}: {self.where}: {self.text} [{self.code}]"

    def document(self) -> dict[str, str]:
        return asdict(self)


def worst_first(findings: list[Finding]) -> list[Finding]:
    """Each once."""
    return sorted(dict.fromkeys(findings), key=lambda finding: LEVELS.index(finding.level))
