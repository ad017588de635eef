"""Recording of experts: which ones a step's tokens go to, on every rank of a run that must agree with another.

Rounding decides between two experts with equal scores, and from that step on the losses of two runs differ by more than
rounding. With these records the report can tell that from a mistake (report/agreement.py).
"""

from __future__ import annotations

import functools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter

NEAREST = 8  # number of margins kept for a layer's step


class RoutingWriter(Callback):
    """Writes one line per step: by layer, the number of tokens of each expert, and the smallest margins of a choice.

    The margin of a token is the logit of its last chosen expert, minus that of the best expert that wasn't chosen.
    """

    def __init__(self, path: Path):
        self._path = path
        self._seen: dict[int, list[tuple[torch.Tensor, torch.Tensor | None]]] = defaultdict(list)

    def on_train_start(self, context: CallbackContext) -> None:
        if _is_copy(context.state.cfg.model):
            return
        modules = [module for chunk in context.model for module in chunk.modules()]
        routers = [one for one in modules if isinstance(one, TopKRouter) and not one.is_mtp_layer]
        for router in routers:
            router.routing = self._watched(router)
        if routers:
            self._path.parent.mkdir(parents=True, exist_ok=True)

    def on_train_step_end(self, context: CallbackContext) -> None:
        if not self._seen:  # no expert on this rank, or everything in a CUDA graph
            return
        layers = {str(layer): _of_layer(seen) for layer, seen in sorted(self._seen.items())}
        self._seen.clear()
        line = {"step": int(context.state.train_state.step) + 1, "layers": layers}
        with self._path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")

    def _watched(self, router: TopKRouter) -> Any:
        original = router.routing

        @functools.wraps(original)
        def routing(logits: torch.Tensor, *arguments: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
            probabilities, chosen = original(logits, *arguments, **named)
            # Recomputed forward passes count once: the first pass has no gradients.
            if torch.is_grad_enabled() and not _is_captured():
                self._seen[router.layer_number].append((chosen.sum(0), _margins(router, logits, chosen)))
            return probabilities, chosen

        return routing


def _margins(router: TopKRouter, logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor | None:
    """The smallest margins; None if the choice depends on more than the logits."""
    config = router.config
    plain = router.routing_type not in ("sinkhorn", "quantile_balancing") and router.expert_bias is None
    if not plain or config.moe_router_num_groups or config.moe_expert_capacity_factor is not None:
        return None
    logits = logits.detach().reshape(chosen.shape).float()
    last = logits.masked_fill(~chosen, torch.inf).amin(-1)
    margins = last - logits.masked_fill(chosen, -torch.inf).amax(-1)
    return margins.topk(min(NEAREST, len(margins)), largest=False).values


def _of_layer(seen: list[tuple[torch.Tensor, torch.Tensor | None]]) -> dict[str, Any]:
    """The loads and the smallest margins over all microbatches of a step."""
    loads = torch.stack([load for load, _ in seen]).sum(0)
    margins = [margin for _, margin in seen if margin is not None]
    nearest = sorted(torch.cat(margins).tolist())[:NEAREST] if margins else []
    return {"load": loads.tolist(), "margins": [margin for margin in nearest if margin != float("inf")]}


def _is_copy(model: Any) -> bool:
    """Whether another rank records the same tokens: without sequence parallelism all tensor parallel ranks see the
    same, and the first one records."""
    return not model.sequence_parallel and parallel_state.get_tensor_model_parallel_rank() != 0


def _is_captured() -> bool:
    return bool(torch.version.cuda) and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
