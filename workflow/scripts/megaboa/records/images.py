"""The environment that ranks run in: as requested, as built, and the result of its test."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megaboa.records.base import IF_SET, Record, Tree

# --- what the plan asks for: specs/image.json, specs/inside.json ------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class BridgeSource(Record):
    """A Megatron-Bridge that replaces the image's own."""

    repo: str | None = None
    commit: str


@dataclass(frozen=True, kw_only=True)
class ImageBuild(Record):
    """How the image is built. In specs/image.json: its contents; in specs/inside.json: the build tool and paths."""

    args: dict[str, str] | None = field(default=None, metadata=IF_SET)
    pinned: bool | None = field(default=None, metadata=IF_SET)  # whether its packages have the pinned versions
    inputs: Tree | None = field(default=None, metadata=IF_SET)  # by content
    context: str | None = field(default=None, metadata=IF_SET)
    file: str | None = field(default=None, metadata=IF_SET)
    engine: str | None = field(default=None, metadata=IF_SET)


@dataclass(frozen=True, kw_only=True)
class ImageSpec(Record):
    """The identity of the image."""

    runtime: str
    device: str
    suffix: str
    name: str
    path: str | None
    build: ImageBuild | None
    bridge_source: BridgeSource | None
    sources: str | None = None  # the store in which the image's job checks out Bridge's source
    architecture: str | None = None  # None: this machine's


@dataclass(frozen=True, kw_only=True)
class ImageStart(Record):
    """Where the image is stored, and how a process is started in it. Not part of the image's identity."""

    runtime: str
    store: str
    build: ImageBuild | None = None
    mounts: tuple[str, ...] = ()
    env: tuple[str, ...] = ()  # names of variables
    variables: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    python: str
    places: tuple[str, ...] = ()  # options that say where the image's jobs go
    srun: str = "srun"
    srun_args: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ImageOrder(ImageSpec, ImageStart):
    """Specification and start of the image together, for the job that makes it."""


@dataclass(frozen=True, kw_only=True)
class Environment(Record):
    """This Python and its packages, with a digest."""

    runtime: str | None = field(default=None, metadata=IF_SET)
    python: str | None = field(default=None, metadata=IF_SET)
    packages: dict[str, str | None] | None = field(default=None, metadata=IF_SET)
    digest: str | None = field(default=None, metadata=IF_SET)


@dataclass(frozen=True, kw_only=True)
class ImageAsked(Environment):
    """specs/image.json: the image, or this Python if there is no image."""

    container: ImageSpec | None = field(default=None, metadata=IF_SET)


@dataclass(frozen=True, kw_only=True)
class InsideAsked(Environment):
    """specs/inside.json: this Python, which runs all jobs but the ranks, and the image, if there is one."""

    container: ImageStart | None = field(default=None, metadata=IF_SET)


# --- image.json -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Lacking(Record):
    what: str
    disables: str


@dataclass(frozen=True, kw_only=True)
class OtherVersion(Record):
    package: str
    found: str | None
    pinned: str


@dataclass(frozen=True, kw_only=True)
class Contract(Record):
    """Result of an environment's test; NOT_RUN with a reason if nothing here can start the image."""

    state: Literal["PASS", "FAIL", "NOT_RUN"]
    why: str | None = field(default=None, metadata=IF_SET)
    how: str | None = field(default=None, metadata=IF_SET)  # how the image was started
    problems: tuple[str, ...] | None = field(default=None, metadata=IF_SET)
    device: str | None = field(default=None, metadata=IF_SET)
    python: str | None = field(default=None, metadata=IF_SET)
    architecture: str | None = field(default=None, metadata=IF_SET)
    c_library: str | None = field(default=None, metadata=IF_SET)
    packages: dict[str, str | None] | None = field(default=None, metadata=IF_SET)
    other_than_pinned: tuple[OtherVersion, ...] | None = field(default=None, metadata=IF_SET)
    imports: tuple[str, ...] | None = field(default=None, metadata=IF_SET)
    untried: dict[str, str] | None = field(default=None, metadata=IF_SET)
    bridge: str | None = field(default=None, metadata=IF_SET)
    gpu: dict[str, str | None] | None = field(default=None, metadata=IF_SET)
    tools: dict[str, str | None] | None = field(default=None, metadata=IF_SET)
    ofi_nccl: tuple[str, ...] | None = field(default=None, metadata=IF_SET)
    missing: tuple[Lacking, ...] | None = field(default=None, metadata=IF_SET)


@dataclass(frozen=True, kw_only=True)
class ImageFile(Record):
    """facts.json of an image in the store: the image file, and how it was made."""

    digest: str
    bytes: int | None = None
    sha256: str | None = None
    mtime_ns: int | None = None  # manifests of older versions have none
    made_from: Tree | None = field(default=None, metadata={"key": "from"})
    identity: Tree | None = field(default=None, metadata=IF_SET)  # in the store


@dataclass(frozen=True, kw_only=True)
class Image(ImageFile):
    """image.json: the environment of the ranks. If that is this Python (`runtime` none), fields of the image file are
    None."""

    runtime: str
    python: str | None = None
    packages: dict[str, str | None] = field(default_factory=dict)
    path: str | None = None
    bridge_source: BridgeSource | None = None
    contract: Contract | None = None

    @property
    def marks(self) -> tuple[str, ...]:
        """What a conversion may depend on: the image's digest, and the commit of a Bridge that replaces its own."""
        return (self.digest, *([self.bridge_source.commit] if self.bridge_source else []))
