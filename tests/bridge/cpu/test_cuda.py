import pytest
from cpu_ranks import on_cpu


def _devices():
    import torch

    zeros = torch.zeros(2)
    made = {
        "device=str": torch.ones(1, device="cuda"),
        "device=index": torch.empty(1, device="cuda:0"),
        "device=number": torch.empty(1, device=0),
        "device=current": torch.empty(1, device=torch.cuda.current_device()),
        ".cuda()": zeros.cuda(),
        ".cuda(number)": zeros.cuda(0, non_blocking=True),
        ".to(str)": zeros.to("cuda"),
        ".to(device)": zeros.to(torch.device("cuda", 1)),
        ".to(device=)": zeros.to(device="cuda", dtype=torch.bfloat16),
        ".to(number)": zeros.to(0),
        "module": torch.nn.Linear(2, 2).cuda().weight,
        "module.to": torch.nn.Linear(2, 2).to("cuda").weight,
        "module(device=)": torch.nn.Linear(2, 2, device="cuda").weight,
        "pin_memory": torch.zeros(2, pin_memory=True),
        ".pin_memory()": zeros.pin_memory(),
    }
    return {how: tensor.device.type for how, tensor in made.items()}


def test_every_way_to_a_gpu_leads_to_the_cpu():
    (devices,) = on_cpu(_devices)
    assert devices == dict.fromkeys(devices, "cpu")


def _types():
    import torch

    half = torch.zeros(1, dtype=torch.bfloat16)
    return half.type(), half.type(torch.float32).dtype == torch.float32, torch.zeros(1).to(torch.float16).type()


def test_tensors_call_themselves_as_on_a_gpu():
    assert on_cpu(_types) == [("torch.cuda.BFloat16Tensor", True, "torch.cuda.HalfTensor")]


def _backward():
    import torch

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, grad):
            return grad * torch.full((1,), 2.0, device="cuda")

    x = torch.ones(1, requires_grad=True)
    Double.apply(x).sum().backward()
    through_backward = x.grad.item()
    (through_grad,) = torch.autograd.grad(Double.apply(x).sum(), x)
    return through_backward, through_grad.item()


def test_custom_backward_code_may_ask_for_cuda():
    assert on_cpu(_backward) == [(2.0, 2.0)]


def _runtime():
    import torch

    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
    end.record(torch.cuda.current_stream())
    torch.cuda.synchronize()
    return {
        "available": torch.cuda.is_available(),
        "count": torch.cuda.device_count(),
        "elapsed": start.elapsed_time(end),
        "memory": torch.cuda.max_memory_allocated() > 1e6,
        "stats": torch.cuda.memory_stats()["allocated_bytes.all.peak"] > 1e6,
        "unknown stat": torch.cuda.memory_stats()["num_ooms"],
        "compile": torch.compile(len) is len and torch.compile(dynamic=True)(len) is len,
    }


def test_the_runtime_answers_without_a_gpu():
    assert on_cpu(_runtime) == [
        {
            "available": False,
            "count": 1,
            "elapsed": 0.0,
            "memory": True,
            "stats": True,
            "unknown stat": 0,
            "compile": True,
        }
    ]


def _process_group(backend):
    import torch
    import torch.distributed as dist

    dist.init_process_group(backend)
    dist.barrier(device_ids=[0])
    total = torch.ones(1, device="cuda")
    dist.all_reduce(total)
    result = dist.get_backend(), total.item()
    dist.destroy_process_group()
    return result


@pytest.mark.parametrize("backend", ["nccl", "gloo", None])
def test_process_groups_speak_gloo(backend):
    assert on_cpu(_process_group, backend, world_size=2) == [("gloo", 2.0)] * 2


def _loader():
    import torch

    torch.manual_seed(1)
    undisturbed = torch.rand(2).tolist()
    torch.manual_seed(1)
    batches = [batch.tolist() for batch in torch.utils.data.DataLoader([1, 2, 3], batch_size=2)]
    return batches, torch.rand(2).tolist() == undisturbed


def test_a_data_loader_leaves_the_random_stream_of_dropout_alone():
    assert on_cpu(_loader) == [([[1, 2], [3]], True)]


def _random():
    import torch
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    def draw():
        return torch.rand(2, device="cuda").tolist()

    def sequence(seed, n):
        generator = torch.Generator().manual_seed(seed)
        return [torch.rand(2, generator=generator).tolist() for _ in range(n)]

    tracker = CudaRNGStatesTracker()
    torch.manual_seed(1)
    tracker.add("model", 2)
    tracker.add("expert", 3)
    outside = [draw()]
    with tracker.fork("model"):
        model = [draw()]
        with tracker.fork("expert"):
            expert = [draw()]
        model += [draw()]
    outside += [draw()]
    with tracker.fork("expert"):
        expert += [draw()]
    return [outside, model, expert] == [sequence(1, 2), sequence(2, 2), sequence(3, 2)]


def test_every_random_stream_runs_on_undisturbed_also_when_nested():
    assert on_cpu(_random) == [True]
