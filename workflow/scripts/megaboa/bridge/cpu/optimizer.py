"""Adam with the interface of Transformer Engine's FusedAdam, computed by torch."""

from __future__ import annotations

import torch
from torch.optim.adam import adam


class Adam(torch.optim.Optimizer):
    """AdamW (or Adam with L2 regularisation) whose step count lies in the parameter group, as in FusedAdam.

    Megatron's distributed optimizer trains with torch's own AdamW, which counts steps per parameter, but can't
    resume it in another layout.
    """

    def __init__(
        self,
        params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ) -> None:
        if capturable:
            raise ValueError("optimizer.optimizer_cuda_graph: true needs a GPU; set it to false")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            steps_done = int(group.get("step", 0))
            group["step"] = steps_done + 1
            params = [param for param in group["params"] if param.grad is not None]
            for param in params:
                state = self.state[param]
                if "exp_avg" not in state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
            adam(
                params,
                [param.grad.to(param.dtype) for param in params],
                [self.state[param]["exp_avg"] for param in params],
                [self.state[param]["exp_avg_sq"] for param in params],
                max_exp_avg_sqs=[],
                state_steps=[torch.tensor(float(steps_done)) for _ in params],
                foreach=False,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
                decoupled_weight_decay=self.adam_w_mode,
            )
