"""Synthetic images with texts: data for vision models, without a processor and without files.

Every image shows one of a few patterns, and its text follows from the pattern alone. A model that ignores the image has
to guess: the loss only falls below the logarithm of the number of patterns if the vision tower is trained and its
output reaches the decoder.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from megatron.bridge.data import utils
from megatron.bridge.training.config import GPTDatasetConfig
from megatron.bridge.training.utils.visual_inputs import GenericVisualInputs
from torch.utils.data import Dataset

PATTERNS = 8
NOISE = 0.1
SPECIAL = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
IGNORED = 0  # a label without loss


def sees(model: Any) -> bool:
    """Whether a provider, or a model's configuration, has a vision tower."""
    return getattr(model, "vision_config", None) is not None and getattr(model, "image_token_id", None) is not None


@dataclass
class ImageTextDatasetConfig(GPTDatasetConfig):
    """`merged`: patches per token in each direction; `side`: tokens per image in each direction."""

    patch_values: int = 0
    merged: int = 2
    side: int = 2
    special: tuple[int, ...] = ()  # tokens, in the order of SPECIAL
    words: int = 0

    def __init__(self, **given: Any) -> None:
        own = set(type(self).__dataclass_fields__) - set(GPTDatasetConfig.__dataclass_fields__)
        for name in own & set(given):
            setattr(self, name, given.pop(name))
        super().__init__(**given)

    @classmethod
    def of(cls, model: Any, dataset: GPTDatasetConfig) -> Self:
        """The dataset configuration for a provider's model."""
        names = [
            field.name for field in dataclasses.fields(GPTDatasetConfig) if field.init and field.name != "seq_length"
        ]
        common = {name: getattr(dataset, name) for name in names}
        return cls(
            **common,
            patch_values=_patch_values(model.vision_config),
            merged=model.vision_config.spatial_merge_size,
            special=_special(model),
            words=min(_special(model)),
        )


class ImageTextDataset(Dataset):
    """Sample N is always the same, but different in every split."""

    def __init__(self, config: ImageTextDatasetConfig, split: int, length: int):
        self._config, self._split, self._length = config, split, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, number: int) -> dict[str, Any]:
        config = self._config
        chance = np.random.RandomState([config.random_seed, self._split, int(number)])
        pattern = int(chance.randint(PATTERNS))
        image, start, end = config.special[0], config.special[2], config.special[3]
        head = [start, *[image] * config.side**2, end]
        text = [(7 * pattern + 3 * place) % config.words for place in range(config.seq_length + 1 - len(head))]
        tokens = torch.tensor(head + text)
        if len(text) < 2:
            raise ValueError(f"training.seq_length: {config.seq_length} leaves no room for text behind an image")
        patches = (config.side * config.merged) ** 2
        pixels = pattern_of(pattern, config.patch_values) + NOISE * chance.randn(patches, config.patch_values)
        told = torch.zeros(config.seq_length)
        told[len(head) - 1 :] = 1  # the words of the text
        return {
            "tokens": tokens[:-1],
            "labels": torch.where(told.bool(), tokens[1:], IGNORED),
            "loss_mask": told,
            "position_ids": torch.arange(config.seq_length),
            "pixels": torch.tensor(pixels, dtype=torch.float32),
            "grid": torch.tensor([1, config.side * config.merged, config.side * config.merged]),
        }

    @staticmethod
    def collate_fn(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Batches in the form that Bridge's step for vision models reads."""
        text = {
            name: torch.stack([one[name] for one in samples]) for name in samples[0] if name not in ("pixels", "grid")
        }
        seen = GenericVisualInputs(
            pixel_values=torch.cat([one["pixels"] for one in samples]),
            image_grid_thw=torch.stack([one["grid"] for one in samples]),
        )
        return {**text, "visual_inputs": seen}


def pattern_of(number: int, values: int) -> np.ndarray:
    """The values of a patch; all patches of an image are alike. Different patterns are orthogonal."""
    return np.sin(np.pi * (number + 1) * (np.arange(values) + 0.5) / values)


def build(sizes: Sequence[int], config: ImageTextDatasetConfig, *_: Any, **__: Any) -> tuple[Any, Any, Any]:
    """Datasets for training, validation and test, as Bridge asks for them."""
    return tuple(ImageTextDataset(config, split, size) if size else None for split, size in enumerate(sizes))


def probe(model: Any, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Inputs for comparing logits: every sequence gets an image, in place. Empty if the model has no vision tower."""
    if not sees(model):
        return {}
    special, merged, side = _special(model), model.vision_config.spatial_merge_size, 2
    for one in special:
        tokens[tokens == one] = 0
    image, start, end = special[0], special[2], special[3]
    head = [start, *[image] * side**2, end]
    tokens[:, 3 : 3 + len(head)] = torch.tensor(head)
    patches = len(tokens) * (side * merged) ** 2
    values = torch.randn(patches, _patch_values(model.vision_config), generator=torch.Generator().manual_seed(2))
    return {
        "pixel_values": values,
        "image_grid_thw": torch.tensor([[1, side * merged, side * merged]] * len(tokens)),
        "mm_token_type_ids": (tokens == image).int(),
    }


def _special(model: Any) -> tuple[int, ...]:
    return tuple(getattr(model, name) for name in SPECIAL)


def _patch_values(vision: Any) -> int:
    return vision.in_channels * vision.temporal_patch_size * vision.patch_size**2


utils._REGISTRY = {ImageTextDatasetConfig: build, **utils._REGISTRY}
