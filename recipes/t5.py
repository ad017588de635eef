"""T5 by size: spans of a text are replaced by sentinels, and the decoder writes what they stood for."""

from megatron.bridge.recipes.common import _pretrain_common
from megatron.bridge.training.config import ConfigContainer

from megaboa.bridge.masked_data import T5DatasetConfig
from megaboa.bridge.masked_models import T5Provider

KIND = "t5"
SIZES = {  # layers of the encoder and of the decoder, hidden size, attention heads, tokens read and written
    "tiny": (2, 64, 4, 64, 32),
    "220m": (12, 768, 12, 512, 128),  # as Megatron-LM's examples/t5 has it
}


def configure(
    size: str = "220m", vocab_size: int = 29184, dropout: float = 0.1, sentinels: int = 100
) -> ConfigContainer:
    """`vocab_size`: rows, for the tokens of the tokenizer, three more and the sentinels."""
    layers, hidden_size, heads, read, written = SIZES[size]
    config = _pretrain_common()
    config.model = T5Provider(
        encoder_num_layers=layers,
        num_layers=layers,
        hidden_size=hidden_size,
        ffn_hidden_size=4 * hidden_size,
        kv_channels=hidden_size // heads,
        num_attention_heads=heads,
        seq_length=read,
        seq_length_dec=written,
        max_position_embeddings=read,
        hidden_dropout=dropout,
        attention_dropout=dropout,
        init_method_std=0.015,
        vocab_size=vocab_size,
    )
    config.dataset = T5DatasetConfig.like(
        config.dataset, seq_length=read, sequence_length_decoder=written, sentinels=sentinels
    )
    config.tokenizer.tokenizer_type = "NullTokenizer"  # until the experiment names one
    config.tokenizer.vocab_size = vocab_size - sentinels - 4
    config.train.train_iters = 1_000_000
    config.train.global_batch_size, config.train.micro_batch_size = 512, 64
    config.validation.eval_iters = 10
    config.optimizer.lr, config.optimizer.min_lr, config.optimizer.weight_decay = 1e-4, 1e-5, 1e-2
    config.scheduler.lr_decay_style, config.scheduler.lr_warmup_iters = "linear", 10_000
    return config
