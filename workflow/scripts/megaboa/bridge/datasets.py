"""Dataset configuration from a run's data section, and datasets of its further validation sets.

Also the changes to Bridge that they need: its fill-in-the-middle dataset, and attention that takes its mask from the
data.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from megatron.bridge.data import utils
from megatron.bridge.data.datasets.fim_dataset import GPTFIMDataset
from megatron.bridge.data.utils import get_dataset_provider
from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.bridge.training.config import ConfigContainer, GPTDatasetConfig, GPTFIMDatasetConfig
from megatron.bridge.training.tokenizers.tokenizer import build_tokenizer
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.enums import AttnMaskType
from numpy.typing import NDArray

from megaboa.blends import SPLITS, Blend, is_held_out, split_blends, split_of_set, validation_sets
from megaboa.bridge.masked_data import MaskedDatasetConfig
from megaboa.data.pairs import ENDINGS
from megaboa.fields import AT_ENDS_OF_TEXT
from megaboa.records import Corpus, RunSpec

Corpora = Mapping[str, Corpus]  # by name


def configure(config: ConfigContainer, data: dict[str, Any], corpora: Corpora) -> None:
    """Set what the data section says. Without corpora (in preflight) the dataset stays Bridge's mock one."""
    dataset = config.dataset
    if data and not isinstance(dataset, GPTDatasetConfig):
        raise ValueError(
            f"data: the recipe reads a {type(dataset).__name__}, to which no key of data applies: remove them"
        )
    meant = [name for name in (*AT_ENDS_OF_TEXT, "fim") if data.get(name)]
    if isinstance(dataset, MaskedDatasetConfig) and meant:
        raise ValueError(f"data.{meant[0]}: is of texts that are continued, and here words are masked: remove it")
    if "split" in data:
        dataset.split = data["split"]
    if corpora and data.get("blend"):
        dataset.blend = paths_and_weights(data["blend"], corpora)
    elif corpora and data.get("blend_per_split"):
        blends = split_blends(data)
        dataset.blend = dataset.split = None
        dataset.blend_per_split = [blends.get(split) and paths_and_weights(blends[split], corpora) for split in SPLITS]
    for option in AT_ENDS_OF_TEXT:
        if option in data:
            setattr(dataset, option, data[option])
    if data.get("reset_attention_mask") and config.model.context_parallel_size > 1:
        raise ValueError(
            "data.reset_attention_mask: no attention kernel takes its mask with context parallelism: set false, or "
            f"model.context_parallel_size to 1, not {config.model.context_parallel_size}"
        )
    if "reset_attention_mask" in data:  # otherwise the mask is neither made nor passed on
        dataset.create_attention_mask = data["reset_attention_mask"]
        dataset.skip_getting_attention_mask_from_dataset = not data["reset_attention_mask"]
    if data.get("fim"):
        config.dataset = _with_fim(dataset, data["fim"])
        utils.GPTFIMDataset = FillInTheMiddle  # Bridge looks up the class by this name


def missing_files(dataset: Any) -> list[str]:
    """Files of tokens that a dataset names and that aren't here. Those of an object store can't be looked for."""
    blends = [getattr(dataset, "blend", None), *(getattr(dataset, "blend_per_split", None) or [])]
    prefixes = dict.fromkeys(str(prefix) for blend in blends if blend for prefix in blend[0])
    local = [prefix for prefix in prefixes if "://" not in prefix]
    return [path for prefix in local for end in ENDINGS if not Path(path := f"{prefix}{end}").is_file()]


def paths_and_weights(blend: Blend, corpora: Corpora) -> tuple[list[str], list[float] | None]:
    """The datasets of a blend and their weights. A corpus's weight is shared among its datasets by their own weights,
    or by their tokens."""
    paths, weights = [], []
    for name, weight in blend.items():
        parts = [part for part in corpora[name].datasets if part.tokens]
        shares = [part.tokens if part.weight is None else part.weight for part in parts]
        paths += [part.prefix for part in parts]
        weights += [weight * (share / sum(shares)) for share in shares]
    return paths, weights if len(paths) > 1 else None


def set_tokenizer(config: ConfigContainer) -> None:
    """Build the tokenizer as `pretrain` does, for callers that build datasets without it."""
    config.dataset.tokenizer = build_tokenizer(config.tokenizer)


def build_validation_sets(config: ConfigContainer, run: RunSpec, corpora: Corpora) -> dict[str, Any]:
    """The datasets of the further validation sets, each as long as one evaluation. All ranks must call this.

    The configuration must be complete: validated, and with a tokenizer.
    """
    samples = config.validation.eval_iters * (
        config.validation.eval_global_batch_size or config.train.global_batch_size
    )
    built = {}
    for name, blend in validation_sets(run.data).items():
        dataset = copy.copy(config.dataset)
        valid = SPLITS.index("valid")
        share = _share(run, blend, dataset)
        dataset.blend, dataset.blend_per_split = paths_and_weights(blend, corpora), None
        dataset.split_matrix = [share if index == valid else None for index in range(len(SPLITS))]
        sizes = [samples if index == valid else 0 for index in range(len(SPLITS))]
        built[name] = get_dataset_provider(dataset)(sizes, dataset)[valid]
    return built


def _share(run: RunSpec, blend: Blend, dataset: GPTDatasetConfig) -> tuple[float, float]:
    """Where a validation set begins and ends in the documents of its corpora, as shares of these."""
    matrix = dataset.split_matrix
    if not is_held_out(run.data, blend):
        split = split_of_set(run.data, blend, run.held_out)
        if split is None:
            return (0.0, 1.0)
        matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    return matrix[SPLITS.index("valid")]


def _with_fim(dataset: GPTDatasetConfig, fim: dict[str, Any]) -> GPTFIMDatasetConfig:
    names = [field.name for field in dataclasses.fields(dataset) if field.init]
    return GPTFIMDatasetConfig(
        **{name: getattr(dataset, name) for name in names},
        skip_getting_attention_mask_from_dataset=dataset.skip_getting_attention_mask_from_dataset,
        fim_rate=fim["rate"],
        fim_spm_rate=fim["spm_rate"],
        fim_extra_tokens=fim["tokens"],
        fim_split_sample=fim["split_sample"],
        fim_fragment_rate=fim["fragment_rate"],
        fim_no_prefix=fim["no_prefix"],
    )


class FillInTheMiddle(GPTFIMDataset):
    """Bridge's dataset, repaired, and with samples that don't depend on the order of reads.

    Bridge 0.6.2 fails at the first sample, because newer versions of Megatron-Core also expect the documents' lengths.

    It also uses one random generator for all samples, so a sample's content would depend on those read before: a
    resumed run, or one with another number of loader processes, would train on different text.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        names = self.config.fim_extra_tokens
        ids = (self.prefix_tok_id, self.middle_tok_id, self.suffix_tok_id, self.pad_tok_id, self.eod_tok_id)
        known = set(self.config.tokenizer.vocab)
        for part, found in zip(("prefix", "middle", "suffix", "pad", "eod"), ids, strict=True):
            if found is None or names[part] not in known:
                raise ValueError(
                    f"data.fim.tokens.{part}: the tokenizer has no token {names[part]!r}: name one that it has"
                )

    def _query_document_sample_shuffle_indices(self, idx: int) -> tuple[NDArray, NDArray, list[int]]:
        self.np_rng = np.random.RandomState([self.config.random_seed, self.index_split.value, idx])
        text, documents = super()._query_document_sample_shuffle_indices(idx)
        return text, documents, [len(text)]


class MaskFromData(Callback):
    """Makes attention use the mask from the data.

    Megatron's GPT layers declare a causal mask, for which Transformer Engine generates its own, so the dataset's mask
    (`reset_attention_mask`) would be silently ignored.
    """

    def on_train_start(self, context: CallbackContext) -> None:
        for chunk in context.model:
            for module in chunk.modules():
                if isinstance(module, Attention) and module.attn_mask_type == AttnMaskType.causal:
                    if module.config.window_size is not None:
                        raise ValueError(
                            "data.reset_attention_mask: sliding windows make their own mask: set it to false"
                        )
                    module.attn_mask_type = AttnMaskType.arbitrary
