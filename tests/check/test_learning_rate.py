"""megaboa.check.learning_rate: the rates are those of the installed Megatron-Core."""

import itertools
from types import SimpleNamespace

import pytest

from megaboa.check.learning_rate import Schedule

DECAYS = ("constant", "linear", "cosine", "inverse-square-root", "WSD")


@pytest.mark.parametrize(("decay", "warmup"), list(itertools.product(DECAYS, (0, 3))))
def test_rates_are_those_of_megatron(decay, warmup):
    scheduler_of = pytest.importorskip("megatron.core.optimizer_param_scheduler").OptimizerParamScheduler
    optimizer = SimpleNamespace(param_groups=[{}])
    theirs = scheduler_of(
        optimizer,
        init_lr=0.0,
        max_lr=3e-4,
        min_lr=1e-5,
        lr_warmup_steps=warmup * 8,
        lr_decay_steps=20 * 8,
        lr_decay_style=decay,
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=20 * 8,
        wd_incr_style="constant",
        wsd_decay_steps=5 * 8,
        lr_wsd_decay_style="minus_sqrt",
    )
    ours = Schedule(decay, 3e-4, 1e-5, warmup, end=20, batch=8, final=5)
    for steps in range(25):
        assert ours.rate_after(steps) == pytest.approx(optimizer.param_groups[0]["lr"]), steps
        theirs.step(8)
