from types import SimpleNamespace

import cpu_backend_active  # noqa: F401
import pytest

from megaboa.bridge import configuration

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("rank", "said"), [("0", 1), ("3", 0)])
def test_the_log_says_why_ranks_wait_for_saves(rank, said, monkeypatch, capsys):
    """Nothing of nvidia-resiliency-ext is installed with the CPU's packages."""
    monkeypatch.setenv("RANK", rank)
    config = SimpleNamespace(
        dist=SimpleNamespace(distributed_backend="nccl", use_megatron_fsdp=False), checkpoint=SimpleNamespace(save="x")
    )
    assert configuration.saves_in_background(config) is False
    assert capsys.readouterr().err.count("nvidia-resiliency-ext isn't installed") == said
    config.dist.distributed_backend = "gloo"  # where it isn't the default
    assert configuration.saves_in_background(config) is False
    assert capsys.readouterr().err == ""
