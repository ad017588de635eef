"""Bridge model providers for BERT and T5: megatron-core has both models, Bridge only a provider for T5.

Both use Transformer Engine's layers if installed, and core's own on the CPU, like Bridge's GPT.
"""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from megatron.bridge.models.model_provider import ModelProviderMixin
from megatron.bridge.models.t5_provider import T5ModelProvider, local_layer_spec
from megatron.bridge.models.transformer_config import TransformerConfig
from megatron.bridge.utils.vocab_utils import calculate_padded_vocab_size
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.bert.bert_layer_specs import (
    bert_layer_local_spec,
    get_bert_layer_with_transformer_engine_spec,
)
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.pipeline_parallel.utils import is_pp_first_stage, is_pp_last_stage
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

BACKWARD = 3  # operations of a step, relative to its forward pass


@dataclass
class BertModelProvider(TransformerConfig, ModelProviderMixin[BertModel]):
    """`binary_head`: also predict whether the second segment follows the first."""

    binary_head: bool = True
    fp16_lm_cross_entropy: bool = False
    parallel_output: bool = True
    share_embeddings_and_output_weights: bool = True
    make_vocab_size_divisible_by: int = 128
    position_embedding_type: Literal["learned_absolute", "rope"] = "learned_absolute"
    rotary_percent: float = 1.0
    seq_length: int = 512
    vocab_size: int | None = None
    should_pad_vocab: bool = False
    persist_layer_norm: bool = False  # would need Apex; the head's own norm is torch's without it
    bias_activation_fusion: bool = True
    bias_dropout_fusion: bool = True
    masked_softmax_fusion: bool = True
    deallocate_pipeline_outputs: bool = True
    tp_comm_overlap_cfg: str | dict[str, Any] | None = None
    _pg_collection: ProcessGroupCollection | None = None

    def provide(
        self, pre_process: bool | None = None, post_process: bool | None = None, vp_stage: int | None = None
    ) -> BertModel:
        groups = self._pg_collection
        return BertModel(
            config=self,
            num_tokentypes=2 if self.binary_head else 0,
            transformer_layer_spec=_bert_layers(),
            vocab_size=_rows(self),
            max_sequence_length=self.seq_length,
            pre_process=is_pp_first_stage(groups.pp) if pre_process is None else pre_process,
            post_process=is_pp_last_stage(groups.pp) if post_process is None else post_process,
            fp16_lm_cross_entropy=self.fp16_lm_cross_entropy,
            parallel_output=self.parallel_output,
            share_embeddings_and_output_weights=self.share_embeddings_and_output_weights,
            position_embedding_type=self.position_embedding_type,
            rotary_percent=self.rotary_percent,
            add_binary_head=self.binary_head,
            vp_stage=vp_stage,
            pg_collection=groups,
        )

    def _get_num_floating_point_operations(self, batch_size: int) -> float:
        """Bridge's hook for a step's operations. Attention is bidirectional, so all pairs of positions count."""
        length, hidden = self.seq_length, self.hidden_size
        layers = self.num_layers * _layer(self, length, length * length)
        head = 2 * length * hidden * (hidden + _rows(self))
        return BACKWARD * batch_size * (layers + head)


@dataclass
class T5Provider(T5ModelProvider):
    """Bridge's provider, with core's layers if Transformer Engine is missing; `vocab_size` is the number of rows."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not HAVE_TE:
            self.transformer_layer_spec = _local_t5_layers

    def _get_num_floating_point_operations(self, batch_size: int) -> float:
        """Bridge's hook for a step's operations. Half of the decoder's pairs of positions are masked, as in Bridge's
        count for GPT."""
        read, written, hidden, width = self.seq_length, self.seq_length_dec, self.hidden_size, _width(self)
        encoder = self.encoder_num_layers * _layer(self, read, read * read)
        cross = 4 * written * hidden * width + 4 * read * hidden * width + 4 * written * read * width
        decoder = self.num_layers * (_layer(self, written, written * written / 2) + cross)
        head = 2 * written * hidden * _rows(self)
        return BACKWARD * batch_size * (encoder + decoder + head)


def _bert_layers() -> ModuleSpec:
    if HAVE_TE:
        return get_bert_layer_with_transformer_engine_spec()
    # The specification belongs to the module, which all models share, so a model must not modify it.
    return dataclasses.replace(bert_layer_local_spec, submodules=copy.copy(bert_layer_local_spec.submodules))


def _local_t5_layers(encoder_config: T5ModelProvider, decoder_config: T5ModelProvider) -> list[Any]:
    """Core's local layers with torch's norm at the end of a block: core puts Transformer Engine's norm there in any
    case."""
    blocks: list[TransformerBlockSubmodules] = local_layer_spec(encoder_config, decoder_config)
    return [dataclasses.replace(block, layer_norm=WrappedTorchNorm) for block in blocks]


def _rows(model: Any) -> int:
    if not model.should_pad_vocab:
        return model.vocab_size
    unit, ranks = model.make_vocab_size_divisible_by, model.tensor_model_parallel_size
    return calculate_padded_vocab_size(model.vocab_size, unit, ranks)


def _width(model: Any) -> int:
    return model.num_attention_heads * model.kv_channels


def _layer(model: Any, length: int, pairs: float) -> float:
    """Operations of a layer's forward pass: projections, attention, feed-forward network."""
    projections = 8 * length * model.hidden_size * _width(model)
    return projections + 4 * pairs * _width(model) + 4 * length * model.hidden_size * model.ffn_hidden_size
