"""A case of a rule, and facts that several subjects' cases share."""

import dataclasses
from typing import Any


@dataclasses.dataclass
class Case:
    illegal: dict[str, Any]
    key: str
    says: str
    nearest: tuple[Any, ...]
    borderline: dict[str, Any]  # differs from the illegal one by as little as possible
    legal: dict[str, Any]
    level: str = "error"


MOE = {"layers": 4, "experts": 8, "topk": 2}
FLEX = {**MOE, "dispatcher": "flex", "flex_backend": "deepep"}
OVERLAPPED = {"shared_ffn": 64, "shared_expert_overlap": True}
OVERLAP = {**MOE, "expert_overlap": True, "dispatcher": "alltoall", "ep": 2, "precision": "bf16_mixed"}
FP8 = "bf16_with_fp8_current_scaling_mixed"
