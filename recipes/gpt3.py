"""GPT-3 by size: learned positions, biases, GELU, tied embeddings; on Bridge's mock data."""

from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.recipes.common import _pretrain_common
from megatron.bridge.training.config import ConfigContainer

SIZES = {  # layers, hidden size, attention heads, sequence length
    # The sizes of Megatron-LM's examples/gpt3, which calls them so: they have 64 and 356 million parameters.
    "345m": (12, 512, 8, 1024),
    "857m": (24, 1024, 16, 2048),
    "2.7b": (32, 2560, 32, 2048),
    "7b": (32, 4096, 32, 2048),
    "13b": (40, 5120, 40, 2048),
    "70b": (86, 8192, 64, 2048),  # as many layers as make 70 billion parameters of LLaMA's width
    "175b": (96, 12288, 96, 2048),
    "1t": (128, 25600, 160, 2048),
}


def configure(
    size: str = "2.7b", layers: int | None = None, dropout: float = 0.0, seq_length: int | None = None
) -> ConfigContainer:
    """`layers` and `seq_length` take the place of the size's own."""
    own_layers, hidden_size, heads, own_length = SIZES[size]
    config = _pretrain_common()
    config.model = GPTModelProvider(
        num_layers=layers or own_layers,
        hidden_size=hidden_size,
        ffn_hidden_size=4 * hidden_size,
        num_attention_heads=heads,
        seq_length=seq_length or own_length,
        hidden_dropout=dropout,
        attention_dropout=dropout,
        bias_activation_fusion=True,
        bias_dropout_fusion=True,
        share_embeddings_and_output_weights=True,
        vocab_size=50304,  # 50,257 tokens, and as many rows as 128 divides: the same model in every layout
    )
    config.tokenizer.tokenizer_type = "NullTokenizer"
    config.tokenizer.vocab_size = 50256  # and its end-of-text token: 50,257
    config.dataset.seq_length = seq_length or own_length
    config.train.train_iters = 500_000
    config.train.global_batch_size, config.train.micro_batch_size = 32, 4
    config.validation.eval_iters = 0
    config.optimizer.lr, config.optimizer.min_lr = 1.5e-4, 1e-5
    config.scheduler.lr_warmup_iters = 2000
    return config
