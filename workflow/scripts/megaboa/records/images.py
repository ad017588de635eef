"""What ranks run in."""

from __future__ import annotations

from dataclasses import dataclass, field

from megaboa.records.base import Record, Tree


@dataclass(frozen=True, kw_only=True)
class BridgeSource(Record):
    """Another Megatron-Bridge than the image's own."""

    repo: str | None = None
    commit: str


@dataclass(frozen=True, kw_only=True)
class Image(Record):
    """image.json: what ranks run in. Where they run in this Python (`runtime` none), the rest of it is None."""

    runtime: str
    digest: str
    python: str | None = None
    packages: dict[str, str] = field(default_factory=dict)
    path: str | None = None
    bytes: int | None = None
    sha256: str | None = None
    mtime_ns: int | None = None  # manifests of older versions have none
    made_from: Tree | None = field(default=None, metadata={"key": "from"})
    bridge_source: BridgeSource | None = None
    contract: Tree | None = None  # what the test of the image found

    @property
    def marks(self) -> tuple[str, ...]:
        """What a conversion may depend on: its digest, and the commit of a Bridge that goes before its own."""
        return (self.digest, *([self.bridge_source.commit] if self.bridge_source else []))
