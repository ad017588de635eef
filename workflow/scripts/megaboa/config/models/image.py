"""What the ranks run in."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, StringConstraints, field_validator, model_validator

from megaboa.config.models.section import Section, harmless, key
from megaboa.image import references
from megaboa.secrets import has_credentials


def _full_commit(value: str) -> str:
    if not references.is_commit(value):
        raise ValueError(
            "is no commit: give its full hash of 40 digits (`git rev-parse` prints it), as branches and tags move"
        )
    return value


def _checked_mount(value: str) -> str:
    if problem := references.mount_problem(value):
        raise ValueError(problem)
    return value


def _address_of_repository(value: str) -> str:
    if has_credentials(value):
        raise ValueError("holds a password or token, which would be written to disk: leave that to git's credentials")
    if value.startswith("-"):
        raise ValueError("is an option of git, not a repository")
    return value


class BridgeSource(Section):
    """A checkout of Megatron-Bridge that takes the place of the image's own."""

    repo: Annotated[str, Field(min_length=1), AfterValidator(_address_of_repository)] = key(
        description="git repository of Megatron-Bridge: address or folder"
    )
    commit: Annotated[str, AfterValidator(_full_commit)] = key(
        description="full hash of the commit; part of a run's identity"
    )
    mount_as: Annotated[str, StringConstraints(pattern=r"^/[^:,\s]+$")] = key(
        "/opt/Megatron-Bridge", "where the checkout lies in the image"
    )


class Build(Section):
    file: str = key("containers/Dockerfile", "Dockerfile")
    context: str = key(".", "folder that its COPY lines start from")
    engine: Literal["auto", "docker", "podman", "buildah"] = key(
        "auto", "what builds it; auto: the first of these that works here"
    )
    args: dict[str, str] = key({}, "build arguments; they go before those of containers/versions.toml")

    @field_validator("args")
    @classmethod
    def _without_secrets(cls, args: dict[str, str]) -> dict[str, str]:
        return harmless(args, "a Dockerfile takes secrets by `RUN --mount=type=secret`")


class Image(Section):
    """What the ranks run in. Without a runtime that is the Python that runs Snakemake."""

    runtime: Literal["none", "pyxis", "apptainer"] = key(
        "none", "what starts the ranks inside an image: pyxis (srun's plugin), apptainer, or nothing"
    )
    path: str | None = key(None, "an image that is there: .sqsh, .sif, or a registry's `name@sha256:...`")
    build: Build | None = key(None, "an image that is built from a Dockerfile")
    mounts: list[Annotated[str, AfterValidator(_checked_mount)]] | None = key(
        None, "`source:target` or `source:target:ro`, beside clone, results and store, which are always there"
    )
    secrets: list[Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]] = key(
        ["HF_TOKEN", "WANDB_API_KEY"], "environment variables that are passed on by name; their values stand nowhere"
    )
    bridge_source: BridgeSource | None = key(None, "Megatron-Bridge from a commit, mounted over the image's own")
    architecture: Literal["x86_64", "aarch64", "ppc64le", "riscv64"] | None = key(
        None, "machine that the image must be for: that of the nodes; default: this one"
    )

    @model_validator(mode="after")
    def _fits_the_runtime(self) -> Image:
        given = [
            name
            for name in ("path", "build", "mounts", "bridge_source", "architecture")
            if getattr(self, name) is not None
        ]
        if self.runtime == "none" and given:
            raise ValueError(f"{given[0]} needs an image: set runtime to pyxis or apptainer, or remove {given[0]}")
        if self.path is not None and self.build is not None:
            raise ValueError("path and build are both set: remove one")
        if self.runtime == "apptainer" and self.path is None and self.build is None:
            raise ValueError("runtime: apptainer needs an image: set path or build")
        return self
