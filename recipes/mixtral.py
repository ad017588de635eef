"""Mixtral by size: Bridge 0.6.2 has no converter for it, so that its fields are written out; on mock data."""

from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.recipes.common import _pretrain_common
from megatron.bridge.training.config import ConfigContainer
from torch.nn.functional import silu

SIZES = {  # layers, hidden size, width of an expert, attention heads, vocabulary
    "8x7b": (32, 4096, 14336, 32, 32000),
    "8x22b": (56, 6144, 16384, 48, 32768),
}


def configure(size: str = "8x7b", layers: int | None = None, seq_length: int = 4096) -> ConfigContainer:
    """`layers` takes the place of the size's own."""
    own_layers, hidden_size, ffn, heads, vocabulary = SIZES[size]
    config = _pretrain_common()
    config.model = GPTModelProvider(
        num_layers=layers or own_layers,
        hidden_size=hidden_size,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=8,
        kv_channels=128,
        seq_length=seq_length,
        position_embedding_type="rope",
        rotary_base=1_000_000,
        normalization="RMSNorm",
        layernorm_epsilon=1e-5,
        activation_func=silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=True,
        bias_dropout_fusion=True,
        share_embeddings_and_output_weights=False,
        vocab_size=vocabulary,
        num_moe_experts=8,
        moe_ffn_hidden_size=ffn,
        moe_router_topk=2,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=0.02,
        moe_router_dtype="fp32",
        moe_token_dispatcher_type="alltoall",
        moe_grouped_gemm=True,
        moe_permute_fusion=True,
    )
    config.tokenizer.tokenizer_type = "NullTokenizer"
    config.tokenizer.vocab_size = vocabulary - 1  # and its end-of-text token
    config.dataset.seq_length = seq_length
    config.train.train_iters = 500_000
    config.train.global_batch_size, config.train.micro_batch_size = 256, 1
    config.validation.eval_iters = 0
    config.scheduler.lr_warmup_iters = 2000
    return config
