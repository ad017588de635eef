"""What a GPU can do at most, by its name: the number below the fraction of an MFU."""

from __future__ import annotations

# Dense bf16 (V100: fp16) TFLOP/s, from NVIDIA's data sheets; those with sparsity are twice these. First match wins.
PEAKS: tuple[tuple[str, float, str], ...] = (
    ("GB200", 2500.0, "GB200 NVL72 data sheet"),
    ("B200", 2250.0, "DGX B200 data sheet"),
    ("H200", 989.4, "H200 data sheet"),
    ("H100 PCIe", 756.0, "H100 PCIe product brief"),
    ("H100 NVL", 835.5, "H100 data sheet, NVL"),
    ("H100", 989.4, "H100 data sheet, SXM"),
    ("A100", 312.0, "A100 data sheet"),
    ("L40S", 362.05, "L40S data sheet"),
    ("V100", 125.0, "V100 data sheet"),
)


def peak_of(gpu: str | None) -> tuple[float, str] | None:
    """TFLOP/s of a GPU as PyTorch names it, and who says so; None where it isn't known."""
    found = ((peak, f"{source}, bf16 without sparsity") for name, peak, source in PEAKS if gpu and name in gpu)
    return next(found, None)
