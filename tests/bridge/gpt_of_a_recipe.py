"""Imported by a recipe, next to which it lies."""

from megatron.bridge.recipes.common import _pretrain_common


def tiny(provider):
    config = _pretrain_common()
    config.model = provider(num_layers=2, hidden_size=64, num_attention_heads=4, seq_length=64, vocab_size=512)
    config.dataset.seq_length = 64
    config.train.train_iters, config.train.global_batch_size, config.train.micro_batch_size = 6, 16, 1
    config.scheduler.lr_warmup_iters = 2
    return config
