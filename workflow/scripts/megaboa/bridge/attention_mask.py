"""Attention that looks at the mask that comes with the data."""

from __future__ import annotations

from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.enums import AttnMaskType


class MaskFromData(Callback):
    """Megatron's GPT layers say that their mask is causal, and Transformer Engine then makes that by itself: what
    the dataset hands on (`reset_attention_mask`) would be left unread, without a word.
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
