"""BERT by size: words are masked, and it is told whether the second segment follows the first."""

from megatron.bridge.recipes.common import _pretrain_common
from megatron.bridge.training.config import ConfigContainer

from megaboa.bridge.masked_data import BertDatasetConfig
from megaboa.bridge.masked_models import BertModelProvider

KIND = "bert"
SIZES = {  # layers, hidden size, attention heads, sequence length
    "tiny": (2, 64, 4, 64),
    "110m": (12, 768, 12, 512),  # BERT-base
    "340m": (24, 1024, 16, 512),  # BERT-large, as Megatron-LM's examples/bert has it
}


def configure(
    size: str = "340m", vocab_size: int = 30720, dropout: float = 0.1, binary_head: bool = True
) -> ConfigContainer:
    """`vocab_size`: rows, for the tokens of the tokenizer and three more ([CLS], [SEP], [MASK])."""
    layers, hidden_size, heads, seq_length = SIZES[size]
    config = _pretrain_common()
    config.model = BertModelProvider(
        num_layers=layers,
        hidden_size=hidden_size,
        ffn_hidden_size=4 * hidden_size,
        num_attention_heads=heads,
        seq_length=seq_length,
        hidden_dropout=dropout,
        attention_dropout=dropout,
        binary_head=binary_head,
        vocab_size=vocab_size,
    )
    config.dataset = BertDatasetConfig.like(config.dataset, seq_length=seq_length, classification_head=binary_head)
    config.tokenizer.tokenizer_type = "NullTokenizer"  # until the experiment names one
    config.tokenizer.vocab_size = vocab_size - 4
    config.train.train_iters = 1_000_000
    config.train.global_batch_size, config.train.micro_batch_size = 32, 4
    config.validation.eval_iters = 10
    config.optimizer.lr, config.optimizer.min_lr, config.optimizer.weight_decay = 1e-4, 1e-5, 1e-2
    config.scheduler.lr_decay_style, config.scheduler.lr_warmup_iters = "linear", 10_000
    return config
