"""The one table of peaks, asked by PyTorch's names and by `resources.gpu`."""

import pytest

from megaboa.peaks import KINDS, PEAKS, operations, peak_of


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H20", 148.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("Tesla V100-SXM2-32GB", 125.0),
        ("NVIDIA RTX A4000", None),
        (None, None),
    ],
)
def test_by_the_name_that_pytorch_gives(name, tflops):
    found = peak_of(name)
    assert (found and found[0]) == tflops


@pytest.mark.parametrize("kind", KINDS)
def test_both_names_give_the_same_peak(kind):
    assert operations(f"{kind}-80g") == PEAKS[kind.upper()][0] * 1e12 == peak_of(f"NVIDIA {kind.upper()}")[0] * 1e12


def test_what_is_not_in_the_table_is_not_known():
    assert operations("mi300-192g") is None and operations(None) is None
