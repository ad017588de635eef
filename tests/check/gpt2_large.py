"""GPT2-large as recipes/gpt2.py makes it, and what was measured of it on H200s (docs/benchmarks/h200.md)."""

import dataclasses

from megaboa.check.facts import Facts, Kernels, Model, Training
from megaboa.layout import Layout

MODEL = Model(
    layers=36, hidden=1280, ffn=5120, heads=20, kv_groups=20, head_dim=64, vocab_size=50257, vocab_rows=50304,
    learned_positions=True, tied=True, gated=False, bias=True, norm_bias=True,
)  # fmt: skip
BF16, FP16 = "bf16_mixed", "fp16_mixed"


def facts(precision=BF16, dropout=0.0, mbs=32, gbs=64, world=1, distributed=True, loss="native", **layout) -> Facts:
    return Facts(
        Layout(world_size=world, distributed_optimizer=distributed, **layout),
        dataclasses.replace(MODEL, dropout=dropout),
        Training(gbs=gbs, mbs=mbs, seq_length=1024, precision=precision),
        Kernels(loss_kernel=loss),
    )


PUBLISHED = {"precision": FP16, "dropout": 0.1, "distributed": False}
MEASURED = {  # GiB of rank 0
    "fp16, dropout, no distributed optimizer": (75.2, facts(**PUBLISHED)),
    "bf16": (73.8, facts()),
    "FP8, current scaling": (65.8, facts("bf16_with_fp8_current_scaling_mixed")),
    "tp2": (83.7, facts(**PUBLISHED, mbs=64, world=2, tp=2)),
    "tp2, sequence parallel": (69.5, facts(**PUBLISHED, mbs=64, world=2, tp=2, sp=True)),
    "cp2": (72.3, facts(FP16, distributed=False, mbs=64, world=2, cp=2)),
    "pp2, one micro-batch": (55.2, facts(**PUBLISHED, mbs=64, world=2, pp=2)),
    "pp2, bf16, micro-batches of 8": (18.5, facts(mbs=8, world=2, pp=2)),
    "tp2, sequence parallel, bf16": (67.4, facts(mbs=64, world=2, tp=2, sp=True)),
    "dp2, bf16": (69.4, facts(world=2)),
    "micro-batch 16, with the loss kernel": (38.8, facts(mbs=16, loss="ours")),
    "bf16, with the loss kernel": (64.5, facts(loss="ours")),
    "FP8 in all layers, blocks, with the loss kernel": (
        57.7,
        facts("bf16_with_fp8_subchannel_scaling_mixed", loss="ours"),
    ),
}
LAST_STAGE = (85.3, facts(**PUBLISHED, mbs=64, world=2, pp=2))
