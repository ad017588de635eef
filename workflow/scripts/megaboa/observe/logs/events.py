"""The events that parsed logs consist of."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class LineFormat:
    """The fields of a dialect's step lines, in order and as printed."""

    dialect: str
    names: tuple[str, ...]
    zero_based: bool = False  # the first step has number 0
    numbered: bool = True  # the line names its step

    @property
    def width(self) -> int:
        return len(self.names) + 2

    def known(self) -> list[tuple[str, float]]:
        """Our names of the fields, and the factors to convert the printed numbers."""
        found: dict[str, float] = {}
        for printed in self.names:
            name, scale = known(printed)
            found |= {printed: 1.0} if name in found else {name: scale}
        return list(found.items())


@dataclass(frozen=True)
class Steps:
    """One or more lines of one layout. Each covers a step, or all steps since the previous line.

    `numbers`: for each line the step as printed, the last step of training (0 if not printed), then the fields.
    """

    layout: LineFormat
    numbers: array[float]
    rank: str | None = None
    label: bytes = b""  # the prefix with which the lines name their rank

    @property
    def count(self) -> int:
        return len(self.numbers) // self.layout.width

    def rows(self) -> Iterator[tuple[int, dict[str, float]]]:
        """The number of steps done, and the fields; known quantities have our names and units."""
        width, names = self.layout.width, self.layout.known()
        for begin in range(0, len(self.numbers), width):
            step, _, *numbers = self.numbers[begin : begin + width]
            fields = {name: number * scale for (name, scale), number in zip(names, numbers, strict=True)}
            yield int(step) + self.layout.zero_based, fields


@dataclass(frozen=True, slots=True)
class Note:
    """Any other event: `kind` is start, validation, memory, parameters, setting, saved, stragglers or torn."""

    kind: str
    values: dict[str, Any] = field(default_factory=dict)
    rank: str | None = None


Event = Steps | Note


# Maps a printed name, in lower case, to our name and the factor to convert the number.
KNOWN: dict[str, tuple[str, float]] = {
    "elapsed time per iteration (ms)": ("seconds", 1e-3),
    "elapsed time per iteration (s)": ("seconds", 1.0),
    "iteration time (s)": ("seconds", 1.0),
    "train_step_timing in s": ("seconds", 1.0),
    "lm loss": ("loss", 1.0),
    "lm_loss": ("loss", 1.0),
    "loss": ("loss", 1.0),
    "reduced_train_loss": ("loss", 1.0),
    "grad norm": ("grad_norm", 1.0),
    "grad_norm": ("grad_norm", 1.0),
    "learning rate": ("lr", 1.0),
    "lr": ("lr", 1.0),
    "throughput per gpu (tflop/s/gpu)": ("tflops_per_gpu", 1.0),
    "tflops_per_gpu": ("tflops_per_gpu", 1.0),
    "tflops": ("tflops_per_gpu", 1.0),
    "global batch size": ("batch", 1.0),
    "global_batch_size": ("batch", 1.0),
    "consumed samples": ("consumed_samples", 1.0),
    "consumed tokens": ("consumed_tokens", 1.0),
    "actual seqlen": ("seq_length", 1.0),
    "samples per second": ("samples_per_second", 1.0),
    "samples/sec": ("samples_per_second", 1.0),
    "tokens per gpu per second(tgs)": ("tokens_per_second_per_gpu", 1.0),
    "tokens per gpu per second (tgs)": ("tokens_per_second_per_gpu", 1.0),
    "tgs (tokens/gpu/second)": ("tokens_per_second_per_gpu", 1.0),
    "tps": ("tokens_per_second_per_gpu", 1.0),  # torchtitan divides by the number of ranks that share a batch
    "wps": ("tokens_per_second_per_gpu", 1.0),
    "mfu": ("mfu", 0.01),  # printed in percent
    "memory": ("peak_reserved", 2.0**30),  # torchtitan
    "number of skipped iterations": ("skipped", 1.0),
    "number of nan iterations": ("nan", 1.0),
    "energy per gpu (j/iter/gpu)": ("joules_per_gpu", 1.0),
    "power per gpu (w/gpu)": ("watts_per_gpu", 1.0),
    # TensorBoard's tags of Megatron-LM and Bridge
    "iteration-time": ("seconds", 1.0),
    "grad-norm": ("grad_norm", 1.0),
    "learning-rate": ("lr", 1.0),
    "batch-size": ("batch", 1.0),
    "throughput/tflops/device": ("tflops_per_gpu", 1.0),
    "throughput": ("tflops_per_gpu", 1.0),
    "iter-energy/gpu": ("joules_per_gpu", 1.0),
    "power/gpu": ("watts_per_gpu", 1.0),
    # and of torchtitan
    "loss_metrics/global_avg_loss": ("loss", 1.0),
    "throughput(tps)": ("tokens_per_second_per_gpu", 1.0),
    "mfu(%)": ("mfu", 0.01),
}


def known(printed: str) -> tuple[str, float]:
    return KNOWN.get(printed.lower(), (printed, 1.0))
