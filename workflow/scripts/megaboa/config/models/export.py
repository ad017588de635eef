"""Exported models: which runs become them, what they are asked to say, and how they are evaluated."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from megaboa.config.models.section import Name, Runs, Section, key


class Export(Section):
    runs: Runs = key([], "names or glob patterns of the runs to export to Hugging Face format, or `all`")
    checkpoint: Literal["final", "best"] | PositiveInt = key(
        "final", "the last checkpoint, the one with the lowest validation loss, or an iteration that was kept"
    )
    file_gb: PositiveFloat = key(5.0, "size of the weights' files: a larger model has several")
    license: str | None = key(None, "licence named in the model card, such as `apache-2.0`")
    push: dict[Name, str] = key({}, "where `snakemake push` sends an exported run: run to `owner/name`")
    private: bool = key(True, "whether a repository that `snakemake push` makes is private")


class Generate(Section):
    prompts: list[Annotated[str, Field(min_length=1)]] = key(
        ["import"], "what `snakemake generate` gives to the trained checkpoint and to its export", min_length=1
    )
    tokens: PositiveInt = key(32, "tokens generated for each of them; the likeliest every time")


class Evaluate(Section):
    """A command of the user's, called for the exported model of each run (docs/how-to/evaluation.md)."""

    command: str | None = key(
        None,
        "shell command that reads the folder {model} and writes JSON to {out}: a file, or a folder with one JSON file",
    )
    runs: Runs = key(["*"], "which of the exported runs are evaluated")
    runtime: PositiveInt = key(120, "wall time of its job, in minutes")
    slurm_extra: str = key("", "further options of sbatch for its job, such as `--gpus-per-node=4`")

    @field_validator("command")
    @classmethod
    def _placeholders(cls, command: str | None) -> str | None:
        if missing := [name for name in ("{model}", "{out}") if command is not None and name not in command]:
            raise ValueError(f"lacks {' and '.join(missing)}, which stand for the model's folder and the JSON to write")
        return command
