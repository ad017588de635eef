"""Cases of the rules of check/kind.py."""

from rule_cases.case import Case

CASES = {
    "kind_takes_the_layout": Case(
        {"kind": "t5", "world_size": 2, "pp": 2},
        "parallel.pp",
        "2: encoder-decoder (T5) is split by parallel.tp and data alone",
        (1,),
        {"kind": "bert", "world_size": 2, "pp": 2},
        {"kind": "t5", "world_size": 4, "tp": 2},
    ),
    "kind_takes_the_sequences": Case(
        {"kind": "bert", "world_size": 2, "tp": 2, "sp": True},
        "parallel.sp",
        "true for encoder (BERT)",
        ("false",),
        {"kind": "gpt", "world_size": 2, "tp": 2, "sp": True},
        {"kind": "bert", "world_size": 2, "tp": 2},
    ),
    "hybrid_layers_have_kernels": Case(
        {"kind": "hybrid", "device": "cpu"},
        "device",
        "cpu: hybrid (Mamba layers among those of attention) needs the package mamba_ssm, whose kernels need a GPU",
        ("cuda",),
        {"kind": "hybrid", "device": "cuda"},
        {"kind": "gpt", "device": "cpu"},
    ),
}
