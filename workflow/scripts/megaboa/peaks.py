"""Peak throughput of GPUs: dense bf16 operations (V100: fp16). With sparsity they would be twice as high."""

from __future__ import annotations

import re

# TFLOP/s and the maker's document, by the word in PyTorch's name of the GPU. In lower case the word also begins
# `resources.gpu` (h100-80g). The first match wins.
PEAKS: dict[str, tuple[float, str]] = {
    "GB300": (2500.0, "GB300 NVL72 data sheet"),
    "GB200": (2500.0, "GB200 NVL72 data sheet"),
    "B300": (2250.0, "DGX B300 data sheet"),
    "B200": (2250.0, "DGX B200 data sheet"),
    "H200": (989.4, "H200 data sheet"),
    "H100 PCIe": (756.0, "H100 PCIe product brief"),
    "H100 NVL": (835.5, "H100 data sheet, NVL"),
    "H100": (989.4, "H100 data sheet, SXM"),
    "H800": (989.4, "as H100 SXM"),
    "H20": (148.0, "H20 data sheet"),
    "A100": (312.0, "A100 data sheet"),
    "A40": (149.7, "A40 data sheet"),
    "L40S": (362.05, "L40S data sheet"),
    "V100": (125.0, "V100 data sheet"),
}
NAME = re.compile(r"^[a-z]+\d+[a-z]*-(\d+)g$")
KINDS = tuple(name.lower() for name in PEAKS if " " not in name)


def peak_of(gpu: str | None) -> tuple[float, str] | None:
    """Peak TFLOP/s of a GPU by PyTorch's name, and their source; None if unknown."""
    names = (name for name in PEAKS if gpu and re.search(rf"\b{name}\b", gpu))
    found = next(names, None)
    return (PEAKS[found][0], f"{PEAKS[found][1]}, bf16 without sparsity") if found else None


def kind_of(gpu: str) -> str:
    """The word for a GPU in `resources.gpu`: h200 for "NVIDIA H200"."""
    found = next((name for name in PEAKS if re.search(rf"\b{name}\b", gpu)), None)
    word = found or next((word for word in gpu.split() if re.search(r"\d", word)), gpu)
    return word.split()[0].lower()


def memory_gib(gpu: str | None) -> int | None:
    """The memory in a GPU's name in `resources.gpu`: 80 for h100-80g."""
    found = NAME.match(gpu or "")
    return int(found[1]) if found else None


def operations(kind: str | None) -> float | None:
    """Peak operations per second of one GPU, by its name in `resources.gpu`; None if unknown."""
    name = (kind or "").split("-")[0]
    return PEAKS[name.upper()][0] * 1e12 if name in KINDS else None
