"""The one table of peaks, asked by PyTorch's names and by `resources.gpu`."""

import re
from pathlib import Path

import pytest

from megaboa.check import calibration, fit
from megaboa.peaks import BY_NAME, GPUS, NAME, kind_of, memory_gib, of, operations, peak_of

NAMES = tuple(BY_NAME)


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA H20", 148.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("Tesla V100-SXM2-32GB", 125.0),
        ("Tesla V100-PCIE-32GB", 112.0),
        ("NVIDIA RTX A4000", None),
        (None, None),
    ],
)
def test_by_the_name_that_pytorch_gives(name, tflops):
    found = peak_of(name)
    assert (found and found[0]) == tflops


@pytest.mark.parametrize("gpu", GPUS, ids=NAMES)
def test_both_names_mean_the_same_gpu(gpu):
    assert operations(gpu.example) == gpu.tflops * 1e12 == peak_of(f"NVIDIA {gpu.word}")[0] * 1e12
    assert of(gpu.example) is gpu and kind_of(f"NVIDIA {gpu.word}") == gpu.kind and re.match(NAME, gpu.example)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100"),
        ("NVIDIA A100-PCIE-40GB", "a100pcie"),
        ("NVIDIA A100 80GB PCIe", "a100pcie"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce GTX 1080 Ti", "gtx1080"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtxpro6000"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA A10G", "a10g"),
        ("Tesla P100-PCIE-16GB", "p100"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA TITAN V", "titanv0"),
    ],
)
def test_a_gpu_can_be_named_in_resources(name, kind):
    """Else nothing would read the calibration that is written for it."""
    assert kind_of(name) == kind and re.match(NAME, f"{kind}-1g")


@pytest.mark.parametrize("gpu", GPUS, ids=NAMES)
def test_a_gpu_has_a_calibration_or_is_like_one_that_has(gpu):
    assert (calibration.SHIPPED / f"{gpu.like or gpu.kind}.json").exists()
    assert calibration.of(gpu.example).gpu == gpu.kind


def test_the_docs_list_every_scaled_gpu_with_its_links():
    text = (Path(__file__).parents[1] / "docs/how-to/layouts.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| (`.+`) \| (\w+) \| ([^:,|]+)", text, re.MULTILINE)
    listed = {(gpu, like.lower(), links.strip()) for gpus, like, links in table for gpu in re.findall("`(.+?)`", gpus)}
    assert listed == {(one.example, one.like, one.links.name.split(" with")[0]) for one in GPUS if one.like}


def test_the_memory_that_ecc_takes_is_not_there():
    """nvidia-smi shows 46,068 MiB on an L40S and an A40."""
    assert memory_gib("l40s-48g") == memory_gib("a40-48g") == pytest.approx(46068 / 1024, rel=1e-3)
    assert fit.capacity("l40s-48g") < 46068 * 2**20
    assert memory_gib("h100-80g") == memory_gib("q9-80g") == 80
    assert memory_gib("h100") is memory_gib(None) is None


def test_what_is_not_in_the_table_is_not_known():
    assert operations("mi300-192g") is None and operations(None) is None
