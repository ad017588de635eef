"""Kinds of GPUs: what their data sheets say, and how `resources.gpu` and PyTorch name them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum


class Generation(IntEnum):
    """By compute capability, times ten."""

    VOLTA = 70
    TURING = 75  # the oldest with kernels in CUDA 13; none is listed
    AMPERE = 80
    ADA = 89
    HOPPER = 90
    BLACKWELL = 100


@dataclass(frozen=True)
class Interconnect:
    """Between the GPUs of a node. `rate`: GB/s of a GPU in each direction."""

    name: str
    rate: float


PCIE_3, PCIE_4, PCIE_5 = Interconnect("PCIe 3", 16.0), Interconnect("PCIe 4", 32.0), Interconnect("PCIe 5", 64.0)
NVLINK_2, NVLINK_3 = Interconnect("NVLink 2", 150.0), Interconnect("NVLink 3", 300.0)
NVLINK_4, NVLINK_5 = Interconnect("NVLink 4", 450.0), Interconnect("NVLink 5", 900.0)
NVLINK_4_CUT = Interconnect("NVLink 4 with 8 links", 200.0)  # by press reports: there is no data sheet of the H800


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU by its maker's documents.

    `word`: in PyTorch's name of it; in lower case, without spaces and memory, it begins `resources.gpu` (h100pcie-80g).
    `tflops`: dense bf16 (V100: fp16); with sparsity it would be twice as much. `bandwidth`: TB/s of its memory.
    `links`: of cards with NVLink bridges PCIe, which joins their pairs or quads. `gib`: in its name in `resources.gpu`;
    some are made with other sizes too, with a record each if its memory is slower. `like`: the kind whose shipped
    calibration is scaled for this one; None: it has its own. `usable`: share of the memory; ECC takes a sixteenth of
    GDDR6 (nvidia-smi: 46,068 of 49,152 MiB).
    """

    word: str
    generation: Generation
    tflops: float
    bandwidth: float
    links: Interconnect
    gib: int
    source: str
    like: str | None = None
    usable: float = 1.0

    @property
    def kind(self) -> str:
        return re.sub(r"\d+GB|SXM4|[ -]", "", self.word).lower()

    @property
    def example(self) -> str:
        return f"{self.kind}-{self.gib}g"


G = Generation
GPUS = (  # the first whose word is in PyTorch's name is meant
    Gpu("GB300", G.BLACKWELL, 2500.0, 8.0, NVLINK_5, 279, "GB300 NVL72 data sheet", like="b200"),
    Gpu("GB200", G.BLACKWELL, 2500.0, 8.0, NVLINK_5, 186, "GB200 NVL72 data sheet", like="b200"),
    Gpu("B300", G.BLACKWELL, 2250.0, 8.0, NVLINK_5, 270, "DGX B300 data sheet", like="b200"),
    Gpu("B200", G.BLACKWELL, 2250.0, 8.0, NVLINK_5, 180, "DGX B200 data sheet"),
    Gpu("GH200", G.HOPPER, 989.4, 4.0, NVLINK_4, 96, "as H100 SXM; GH200 data sheet", like="h100"),
    Gpu("H200 NVL", G.HOPPER, 835.5, 4.8, PCIE_5, 141, "H200 data sheet, NVL", like="h200"),
    Gpu("H200", G.HOPPER, 989.4, 4.8, NVLINK_4, 141, "H200 data sheet"),
    Gpu("H100 PCIe", G.HOPPER, 756.0, 2.0, PCIE_5, 80, "H100 PCIe product brief", like="h100"),
    Gpu("H100 NVL", G.HOPPER, 835.5, 3.9, PCIE_5, 94, "H100 data sheet, NVL", like="h100"),
    Gpu("H100", G.HOPPER, 989.4, 3.35, NVLINK_4, 80, "H100 data sheet, SXM"),
    Gpu("H800", G.HOPPER, 989.4, 3.35, NVLINK_4_CUT, 80, "as H100 SXM", like="h100"),
    Gpu("H20", G.HOPPER, 148.0, 4.0, NVLINK_4, 96, "H20 data sheet", like="h100"),
    Gpu("A100-PCIE-40GB", G.AMPERE, 312.0, 1.555, PCIE_4, 40, "A100 data sheet, PCIe", like="a100"),
    Gpu("A100 80GB PCIe", G.AMPERE, 312.0, 1.935, PCIE_4, 80, "A100 data sheet, PCIe", like="a100"),
    Gpu("A100-SXM4-40GB", G.AMPERE, 312.0, 1.555, NVLINK_3, 40, "A100 data sheet, SXM", like="a100"),
    Gpu("A100", G.AMPERE, 312.0, 2.039, NVLINK_3, 80, "A100 data sheet, SXM"),
    Gpu("A40", G.AMPERE, 149.7, 0.696, PCIE_4, 48, "A40 data sheet", like="a100", usable=15 / 16),
    Gpu("L40S", G.ADA, 362.05, 0.864, PCIE_4, 48, "L40S data sheet", like="h100", usable=15 / 16),
    Gpu("V100-PCIE", G.VOLTA, 112.0, 0.9, PCIE_3, 32, "V100 data sheet, PCIe", like="a100"),
    Gpu("V100", G.VOLTA, 125.0, 0.9, NVLINK_2, 32, "V100 data sheet", like="a100"),
)
BY_NAME = {gpu.example: gpu for gpu in GPUS}
BY_KIND = {gpu.kind: gpu for gpu in GPUS}  # the last, which has the most memory
KINDS = tuple(BY_KIND)
NAME = r"^[a-z]+\d+[a-z]*-\d+g$"  # of `resources.gpu`


def of(gpu: str | None) -> Gpu | None:
    """The kind of GPU that `resources.gpu` names; None if it isn't known."""
    return BY_NAME.get(gpu or "") or BY_KIND.get((gpu or "").split("-")[0])


def _of_torch(gpu: str | None) -> Gpu | None:
    return next((one for one in GPUS if gpu and re.search(rf"\b{one.word}\b", gpu)), None)


def peak_of(gpu: str | None) -> tuple[float, str] | None:
    """Peak TFLOP/s of a GPU by PyTorch's name, and their source; None if unknown."""
    found = _of_torch(gpu)
    return (found.tflops, f"{found.source}, bf16 without sparsity") if found else None


def kind_of(gpu: str) -> str:
    """The word for a GPU in `resources.gpu`: h200 for "NVIDIA H200", rtx4090 for "NVIDIA GeForce RTX 4090"."""
    if found := _of_torch(gpu):
        return found.kind
    plain = gpu.removeprefix("NVIDIA ")
    if words := re.search(r"\b(?:[A-Za-z]+|(?:[A-Z]+ )+)\d+[A-Za-z]*", plain):
        return words[0].replace(" ", "").lower()
    return re.sub("[^a-z]", "", plain.lower()) + "0"  # a kind ends with a number: titanv0 for "NVIDIA TITAN V"


def memory_gib(gpu: str | None) -> float | None:
    """The memory of a GPU by its name in `resources.gpu`: 80 for h100-80g; 45 for l40s-48g, of which ECC takes 3."""
    if not re.match(NAME, gpu or ""):
        return None
    known, named = of(gpu), float(str(gpu).rpartition("-")[2][:-1])
    return named * known.usable if known else named


def operations(gpu: str | None) -> float | None:
    """Peak operations per second of one GPU, by its name in `resources.gpu`; None if unknown."""
    found = of(gpu)
    return found.tflops * 1e12 if found else None
