"""One process of the node health check: on one GPU, or on the CPUs of a node without GPUs.

It runs as `python -m megaboa.run.health_rank <parent's pid>`, imports torch, reads its plan, and prints each finding at
once as one line of JSON, so its parent knows from the last line how far it came, however it ends.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from megaboa.scheduler import adopt_rank
from megaboa.scheduler.local import die_with_parent

MARGIN_SECONDS = 2.0  # reserved to report an error before the process is ended
REPEATS = 20
ROUNDS = {"cuda": 5, "cpu": 1}  # the best round counts: an idle GPU needs a while to raise its clock
SIZE = {"cuda": 8192, "cpu": 1024}  # powers of two, see `multiply`
NUMBERS = {"cuda": 1 << 24, "cpu": 1 << 20}  # of a collective: 64 MiB and 4 MiB
MOST_PAIRED = 256  # ranks of an all-to-all, which connects each with each: with more, that takes too long
COPIED = 1 << 28  # bytes between a host and its GPU


def main() -> None:
    die_with_parent(int(sys.argv[1]))
    adopt_rank()
    import torch

    plan = json.loads(sys.stdin.readline())
    deadline = plan["deadline"]  # by the node's clock, because the plan may have waited for the import of torch
    _end_at(deadline)
    kind = "cuda" if plan["gpu"] else "cpu"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if plan["gpu"] else torch.device("cpu")
    if plan["gpu"]:
        torch.cuda.set_device(device)
    say("started", torch=torch.__version__)
    found = multiply(device, SIZE[kind])
    if plan["gpu"]:
        found |= copy(device)
    say("multiply", **found)
    if plan["gpus"] > 1:
        store = _store("127.0.0.1", plan["node_port"], int(os.environ["LOCAL_RANK"]), deadline)
        say("node", **collectives(store, int(os.environ["LOCAL_RANK"]), plan["gpus"], device, NUMBERS[kind], deadline))
    over_all_nodes(device, NUMBERS[kind], deadline, max(1, plan["gpus"]))
    _leave(0)


def over_all_nodes(device: Any, numbers: int, deadline: float, ranks_per_node: int) -> None:
    """Meet the ranks of all nodes, then run collectives with them; report nodes that didn't arrive."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world == ranks_per_node:
        say("world", alone=True)
        return
    store = _store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), rank, deadline)
    say("reached")
    store.add(f"here/{rank // ranks_per_node}", 1)
    if not _together(store, "here", world, deadline - MARGIN_SECONDS):
        nodes = range(world // ranks_per_node)
        say("missing", nodes=[node for node in nodes if store.add(f"here/{node}", 0) < ranks_per_node])
        return
    say("met")
    say("world", **collectives(store, rank, world, device, numbers, deadline))
    done = min(deadline - MARGIN_SECONDS, time.monotonic() + MARGIN_SECONDS)
    if rank == 0:  # the store lives in this process, so it leaves last
        _together(store, "done", world, done)
    else:
        store.add("done", 1)


def multiply(device: Any, size: int) -> dict[str, Any]:
    """Multiply a matrix whose exact result is known, on every unit of the device, and time it.

    A Hadamard matrix (only +1 and -1) times its transpose has `size` on the diagonal and 0 elsewhere. Every partial sum
    is a whole number that accumulators represent exactly, so that a single wrong bit is detected in any order of
    summation.
    """
    import torch

    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    matrix = torch.ones(1, 1, dtype=_dtype(device), device=device)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    expected = torch.eye(size, dtype=matrix.dtype, device=device) * size
    wrong = int((matrix @ matrix.T != expected).sum())  # also a warm-up; NaN differs from everything
    seconds = math.inf
    for _ in range(ROUNDS[device.type]):
        _synchronize(device)
        start = time.perf_counter()
        for _ in range(REPEATS):
            product = matrix @ matrix.T
        _synchronize(device)
        seconds = min(seconds, (time.perf_counter() - start) / REPEATS)
    wrong += int((product != expected).sum())
    return {"wrong": wrong, "tflops": 2 * size**3 / seconds / 1e12}


def copy(device: Any) -> dict[str, float]:
    """GB/s between the host's memory and the GPU (the slower direction), and within the GPU's memory."""
    import torch

    host = torch.empty(COPIED, dtype=torch.uint8, pin_memory=True)
    there, other = (torch.empty(COPIED, dtype=torch.uint8, device=device) for _ in range(2))
    copies = (
        lambda: there.copy_(host, non_blocking=True),
        lambda: host.copy_(there, non_blocking=True),
        lambda: other.copy_(there),
    )
    # The fastest time counts, because such short copies are sensitive to hiccups of the host.
    into, back, inside = (min(_seconds(device, one) for _ in range(ROUNDS["cuda"])) for one in copies)
    return {
        "host_gb_per_second": COPIED / max(into, back) / 1e9,
        "memory_gb_per_second": 2 * COPIED / inside / 1e9,  # both read and written
    }


def collectives(store: Any, rank: int, world: int, device: Any, numbers: int, deadline: float) -> dict[str, Any]:
    """All-reduce and all-to-all over the ranks, with every number checked; rates in GB/s as nccl-tests define them."""
    import torch
    import torch.distributed as dist

    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore("reduce", store),
        rank=rank,
        world_size=world,
        timeout=_left(deadline),
        device_id=device if device.type == "cuda" else None,
    )
    pattern = torch.arange(numbers, dtype=torch.float32, device=device) % 7
    tensor = pattern + rank
    dist.all_reduce(tensor)
    wrong = int((tensor != pattern * world + world * (world - 1) // 2).sum())
    tensor.zero_()
    share = (world - 1) / world * 4 / 1e9
    found = {"gb_per_second": 2 * share * numbers / _seconds(device, lambda: dist.all_reduce(tensor))}
    if world <= MOST_PAIRED:
        wrong_there, found["all_to_all_gb_per_second"] = all_to_all(rank, world, device, numbers // world)
        wrong += wrong_there
    dist.destroy_process_group()
    return {"wrong": wrong, **found}


def all_to_all(rank: int, world: int, device: Any, part: int) -> tuple[int, float]:
    """Number of wrong values, and GB/s."""
    import torch
    import torch.distributed as dist

    sent = torch.arange(world, dtype=torch.float32, device=device).repeat_interleave(part) + world * rank
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)  # this rank's part from every rank
    expected = world * torch.arange(world, dtype=torch.float32, device=device).repeat_interleave(part) + rank
    wrong = int((received != expected).sum())
    seconds = _seconds(device, lambda: dist.all_to_all_single(received, sent))
    return wrong, 4 * part * (world - 1) / seconds / 1e9


def _seconds(device: Any, work: Callable[[], object]) -> float:
    """Mean time of three calls, after a first one that may include set-up."""
    work()
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(3):
        work()
    _synchronize(device)
    return (time.perf_counter() - start) / 3


def say(what: str, **found: Any) -> None:
    print("\n" + json.dumps({"said": what, **found}), flush=True)  # on a new line, whatever NCCL has printed before


def _dtype(device: Any) -> Any:
    import torch

    if device.type == "cpu":
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16


def _synchronize(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _store(address: str, port: int, rank: int, deadline: float) -> Any:
    from torch.distributed import TCPStore

    return TCPStore(address, port, is_master=rank == 0, timeout=_left(deadline), wait_for_workers=False)


def _together(store: Any, event: str, world: int, deadline: float) -> bool:
    """Tell all ranks that this one has arrived, and wait for the others until the deadline."""
    store.add(event, 1)
    while store.add(event, 0) < world:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _left(deadline: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=max(1.0, deadline - MARGIN_SECONDS - time.monotonic()))


def _end_at(deadline: float) -> None:
    """End this process at the deadline, even if a call of CUDA or NCCL hangs where no exception reaches it."""
    timer = threading.Timer(deadline - time.monotonic(), _leave, (1,))
    timer.daemon = True
    timer.start()


def _leave(code: int) -> None:
    """Exit at once, because the clean-up of CUDA, NCCL and the store may wait for ranks that are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        say("failed", error=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
        _leave(1)
