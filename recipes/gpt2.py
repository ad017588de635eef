"""GPT-2 in its four published sizes: learned positions, biases, GELU, tied embeddings; on Bridge's mock data."""

from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.recipes.common import _pretrain_common
from megatron.bridge.training.config import ConfigContainer

from megaboa.bridge import kernels as faster

SIZES = {  # layers, hidden size, attention heads
    "small": (12, 768, 12),
    "medium": (24, 1024, 16),
    "large": (36, 1280, 20),
    "xl": (48, 1600, 25),
}


def configure(
    size: str = "large", dropout: float = 0.1, seq_length: int = 1024, kernels: tuple[str, ...] = ()
) -> ConfigContainer:
    """`kernels` names those of `megaboa.bridge.kernels` that are used instead of Megatron's own."""
    faster.use(*kernels)
    layers, hidden_size, heads = SIZES[size]
    config = _pretrain_common()
    config.model = GPTModelProvider(
        num_layers=layers,
        hidden_size=hidden_size,
        ffn_hidden_size=4 * hidden_size,
        num_attention_heads=heads,
        seq_length=seq_length,
        hidden_dropout=dropout,
        attention_dropout=dropout,
        share_embeddings_and_output_weights=True,
        make_vocab_size_divisible_by=64,  # 50,304 rows for one tensor rank and for two
    )
    config.tokenizer.tokenizer_type = "NullTokenizer"
    config.tokenizer.vocab_size = 50256  # and its end-of-text token: 50,257
    config.dataset.seq_length = seq_length
    config.train.train_iters = 30
    config.train.global_batch_size = config.train.micro_batch_size = 32
    config.validation.eval_iters = 0
    config.optimizer.lr, config.optimizer.min_lr = 1.5e-4, 1e-5
    config.scheduler.lr_warmup_iters = 5
    config.ddp.overlap_grad_reduce = config.ddp.overlap_param_gather = False
    return config
