"""The forward steps of BERT and T5, which Bridge 0.6.2 doesn't have.

They read a batch and calculate the loss as Megatron-LM's pretrain_bert.py and pretrain_t5.py do.

Losses are sums over masked tokens, with their number, so that they don't depend on how a batch is cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from megatron.bridge.training.losses import masked_next_token_loss
from megatron.bridge.training.state import GlobalState
from megatron.core.datasets.t5_dataset import T5MaskedWordPieceDataset
from megatron.core.extensions.transformer_engine import HAVE_TE
from torch import Tensor
from torch.nn import functional

Loss = tuple[Tensor, Tensor, dict[str, Tensor]]


def forward_step(
    state: GlobalState, data_iterator: Iterator[Mapping[str, Tensor]], model: Any, return_schedule_plan: bool = False
) -> tuple[Tensor, partial[Loss]]:
    state.timers("batch-generator", log_level=2).start()
    with state.straggler_timer(bdata=True):
        batch = {name: value.cuda(non_blocking=True) for name, value in next(data_iterator).items()}
    state.timers("batch-generator").stop()
    step = _t5 if "text_enc" in batch else _bert
    with state.straggler_timer:
        return step(batch, model, _checks(state))


def _bert(batch: Mapping[str, Tensor], model: Any, checks: dict[str, bool]) -> tuple[Tensor, partial[Loss]]:
    # Without the binary head there is no embedding of segments.
    embedding = getattr(_innermost(model), "embedding", None)
    types = batch["types"] if getattr(embedding, "num_tokentypes", 0) else None
    output = model(batch["text"], batch["padding_mask"], tokentype_ids=types, lm_labels=batch["labels"])
    return output, partial(bert_loss, batch["loss_mask"], batch["is_random"], checks=checks)


def bert_loss(
    loss_mask: Tensor, is_random: Tensor, output: tuple[Tensor, Tensor | None], checks: dict[str, bool]
) -> Loss:
    """The loss of masked words, and that of the segments' order, which weighs as much: both are means, added up."""
    losses, order = output
    total, tokens, told = masked_next_token_loss(loss_mask, losses, **checks)
    if order is None:
        return total, tokens, told
    of_order = functional.cross_entropy(order.view(-1, 2).float(), is_random.view(-1))
    number = torch.ones_like(of_order) * len(is_random)
    told["sop loss"] = torch.stack([(of_order * number).detach(), number])
    return total + of_order * tokens, tokens, told


def _t5(batch: Mapping[str, Tensor], model: Any, checks: dict[str, bool]) -> tuple[Tensor, partial[Loss]]:
    read, written = batch["text_enc"], batch["text_dec"]
    encoder, decoder, cross = t5_masks(batch["enc_mask"], batch["dec_mask"], read, written)
    output = model(read, written, encoder, decoder, cross, lm_labels=batch["labels"])
    return output, partial(masked_next_token_loss, batch["loss_mask"], **checks)


def t5_masks(read_there: Tensor, written_there: Tensor, read: Tensor, written: Tensor) -> tuple[Any, Any, Any]:
    """True where attention is kept out. Core makes masks for its own layers of the tokens, and takes token 0 for
    padding, which may be the first of a vocabulary: here they are made of the masks that came with the sample."""
    if HAVE_TE:
        return T5MaskedWordPieceDataset.config_attention_mask(read, written, read_there < 0.5, written_there < 0.5)
    block = T5MaskedWordPieceDataset._build_b1ss_attention_mask
    decoder = block(written_there, written_there, make_history_mask=True)
    return block(read_there, read_there), decoder, block(written_there, read_there)


def _checks(state: GlobalState) -> dict[str, bool]:
    asked = state.cfg.rerun_state_machine
    return {"check_for_nan_in_loss": asked.check_for_nan_in_loss, "check_for_spiky_loss": asked.check_for_spiky_loss}


def _innermost(model: Any) -> Any:
    while hasattr(model, "module"):
        model = model.module
    return model
