"""Writes the calibrations that are shipped for GPUs that we didn't measure, from published numbers with their sources.

.venv/bin/python benchmarks/published_calibrations.py
"""

from __future__ import annotations

import csv
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "workflow" / "scripts"))

from megaboa import records
from megaboa.check import calibration
from megaboa.check.laws import fitted
from megaboa.records import Calibration, Law, Link, Point

MEASURED = Path(__file__).parent / "measured"
KERNELS = MEASURED / "simumax-kernels.csv"


def kernels(gpu: str, kind: str) -> Law:
    """A law fitted to SimuMax's table of single kernels. The points stay in the table."""
    with KERNELS.open(newline="") as file:
        points = [
            Point(
                name=one["name"], work=float(one["work"]), values=float(one["values"]), groups=int(one["groups"]),
                seconds=float(one["seconds"]),
            )
            for one in csv.DictReader(file)
            if (one["gpu"], one["kind"]) == (gpu, kind)
        ]  # fmt: skip
    return replace(fitted(points), points=())


def b200() -> Calibration:
    """The B200. A collective's `latency` is SimuMax's fixed part plus seven times its part for each other rank."""
    bus = 900e9
    node = Link(
        ranks=8,
        all_reduce=Law(rate=0.7424 * bus, latency=61e-6),
        all_gather=Law(rate=0.6735 * bus, latency=87e-6),
        reduce_scatter=Law(rate=0.6731 * bus, latency=82e-6),
        all_to_all=Law(rate=0.5968 * bus, latency=51e-6),
        send=Law(rate=0.7 * bus, latency=16e-6),
    )
    return Calibration(
        name="b200, published",
        gpu="b200",
        source=(
            "SimuMax (MooreThreads, commit 4dcaae5, configs/system/b200_bf16_ceperm.json): kernels in bf16 and "
            "collectives of eight GPUs, torch 2.10, Transformer Engine 2.11; nothing of FP8; the host's times are "
            "assumed"
        ),
        products={"bf16": kernels("b200", "products")},
        grouped={"bf16": kernels("b200", "grouped")},
        attention={way: kernels("b200", f"attention {way}") for way in ("forward", "backward")},
        memory=Law(rate=0.666 * 8000e9),
        launch=5e-6,
        layer={"bf16": 1.2e-3},
        node=node,
        network=_network(50e9),
    )


def a100() -> Calibration:
    """The A100. Six numbers were fitted to the rows that benchmarks/measured/README.md allows.

    These are the speedup of matrix products over SimuMax's A100, a PCIe card; the host's time per layer, and what
    tensor ranks add to it; the memory; the network; and the latency of collectives.
    """
    faster, host, tensor_host, memory, network, latency = 1.08, 2.9e-3, 0.45e-3, 1.875e12, 17.5e9, 190e-6
    products = kernels("a100", "products")
    products = replace(products, rate=products.rate * faster, moved=(products.moved or 0.0) * faster)
    reduce = Law(rate=229e9, latency=latency)
    return Calibration(
        name="a100, published",
        gpu="a100",
        source=(
            "kernels: SimuMax (commit 4dcaae5, configs/system/a100_pcie.json), products 8% faster; all-reduce of eight "
            "GPUs: vTrain (commit f8dda84, trace/a100/AR_GPU8_1M_1024M_LUT); latency of passes: the H200's; these 8%, "
            "host, memory, network and latency of collectives: fitted to vTrain's step times of Megatron-DeepSpeed "
            "(benchmarks/measured/README.md has which)"
        ),
        products={"bf16": products},
        grouped={"bf16": kernels("a100", "grouped")},
        attention={way: kernels("a100", f"attention {way}") for way in ("forward", "backward")},
        memory=Law(rate=memory, latency=2.5e-6),
        launch=8e-6,
        layer={"bf16": host},
        tensor_host=tensor_host,
        node=Link(
            ranks=8,
            all_reduce=reduce,
            all_gather=reduce,
            reduce_scatter=reduce,
            all_to_all=reduce,
            send=replace(reduce, latency=20e-6),
        ),
        network=_network(network),
    )


def h100() -> Calibration:
    """The H100, derived from the H200: same processors and links, but a memory of 3.35 TB/s instead of 4.8.

    From kernels measured alone: NVIDIA's own software is faster than what the H200 was measured with, and between
    layers, at a lower clock, its published runs would be predicted still longer (docs/benchmarks/predictions.md). The
    host is that of the one machine, too, faster than the one that the H200's calibration has now.
    """
    measured = records.read(Calibration, MEASURED / "h200-alone.json")
    share = 3.35 / 4.8

    def slower(laws: dict[str, Law]) -> dict[str, Law]:
        return {
            name: replace(law, moved=law.moved and law.moved * share, points=(), error=None)
            for name, law in laws.items()
        }

    return replace(
        measured,
        name="h100, from the h200's",
        gpu="h100",
        source=f"memory's part times {share:.2f}, by NVIDIA's data sheets; all else: {measured.source}",
        products=slower(measured.products),
        grouped=slower(measured.grouped),
        memory=replace(measured.memory, rate=measured.memory.rate * share, points=(), error=None),
        network=measured.network or _network(50e9),
        held_back=None,
        held_back_by_host=None,
    )


def _network(rate: float) -> Link:
    """The network link, given the bytes per second of each GPU's adapter."""
    law, pairs = Law(rate=0.8 * rate, latency=20e-6), Law(rate=0.5 * rate, latency=30e-6)
    return Link(ranks=2, all_reduce=law, all_gather=law, reduce_scatter=law, all_to_all=pairs, send=law)


def main() -> None:
    calibration.SHIPPED.mkdir(exist_ok=True)
    for made in (b200(), a100(), h100()):
        records.write(calibration.SHIPPED / f"{made.gpu}.json", made)
        print(f"{made.name}: {made.source}")


if __name__ == "__main__":
    main()
