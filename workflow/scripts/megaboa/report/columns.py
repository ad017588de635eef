"""How the columns of figures and tables are called."""

from __future__ import annotations

from megaboa.plan.figures import EVALUATION

LABELS = {
    "loss": "loss",
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "seconds": "seconds",
    "step_seconds": "step time (seconds)",
    "tokens_per_second": "tokens per second",
    "tokens_per_second_per_gpu": "tokens per second and GPU",
    "tflops_per_gpu": "TFLOP/s per GPU",
    "mfu": "MFU",
    "scaling_efficiency": "scaling efficiency",
    "world_size": "ranks",
    "memory.predicted_gib": "predicted (GiB)",
    "memory.measured_gib": "measured (GiB)",
    "energy.joules_per_gpu": "joules per GPU and step",
    "energy.watts_per_gpu": "watts per GPU",
    "stragglers.slowest_over_fastest": "slowest over fastest rank",
    "loss.tail_mean": "loss, mean of the last tenth",
    "loss.last": "last loss",
    "optimizer.lr": "learning rate",
    "training.global_batch_size": "global batch size",
}
SHARES = {"mfu", "scaling_efficiency", "time_share", "goodput"}


def label(name: str) -> str:
    return LABELS.get(name, name.removeprefix(EVALUATION))
