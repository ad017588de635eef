"""What belongs to an exported model beside its weights: config, generation config, tokenizer and chat template."""

from __future__ import annotations

import shutil
from pathlib import Path

from megaboa.bridge.source import TOKENIZER_FILES
from megaboa.files import file_digest, read_json, write_json
from megaboa.records import ModelSource


def write(source: ModelSource, dtype: str, folder: Path) -> None:
    """The source's own files; only the type of the weights is that of the training."""
    origin = Path(source.path)
    config = read_json(origin / "config.json")
    config.pop("torch_dtype", None)
    write_json(folder / "config.json", {**config, "dtype": dtype})
    _generation_config(origin, folder)
    for name in tokenizer_files(source.tokenizer):
        shutil.copyfile(Path(source.tokenizer, name), folder / name)


def digests(source: ModelSource) -> dict[str, str]:
    """Of what changes an export, and no training."""
    templates = [Path(source.tokenizer, name) for name in tokenizer_files(source.tokenizer)]
    given = Path(source.path, "generation_config.json")
    return {path.name: file_digest(path) for path in [*templates, *([given] if given.exists() else [])]}


def tokenizer_files(folder: str | None) -> list[str]:
    """Names of a tokenizer's files, its chat template among them; none where a model has no tokenizer."""
    if folder is None:
        return []
    return sorted({path.name for pattern in TOKENIZER_FILES for path in Path(folder).glob(pattern)})


def _generation_config(origin: Path, folder: Path) -> None:
    """The source's, or what follows from its config."""
    from transformers import AutoConfig, GenerationConfig

    given = origin / "generation_config.json"
    if given.exists():
        shutil.copyfile(given, folder / given.name)
        return
    config = AutoConfig.from_pretrained(origin, local_files_only=True)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
