import pytest

from megaboa.check.fact_sources import with_overrides
from megaboa.check.facts import Facts, Model, Training
from megaboa.check.stages import Stage, in_flight, stages
from megaboa.layout import Layout


def facts(layers=8, gbs=64, **layout) -> Facts:
    return Facts(Layout(world_size=layout.get("pp", 1), **layout), Model(layers=layers), Training(gbs=gbs, mbs=1))


def test_even_stages():
    assert stages(facts(pp=2)) == [Stage(0, ((0, 1, 2, 3),), True, False), Stage(1, ((4, 5, 6, 7),), False, True)]


def test_a_pipeline_layout_as_text_is_that_of_lists():
    found = with_overrides(facts(61), {"model.pipeline_model_parallel_layout": "Ettt|(tt|)*29,m|L"}).layout.stages
    assert found == (("embedding", *["decoder"] * 3), *[("decoder",) * 2] * 29, ("mtp",), ("loss",))
    unread = with_overrides(facts(7), {"model.pipeline_model_parallel_layout": "Ettt|xtttL"})
    assert unread.layout.stages is None


def test_interleaved_stages_hold_layers_from_two_places():
    assert [stage.layers for stage in stages(facts(pp=2, vpp=2))] == [(0, 1, 4, 5), (2, 3, 6, 7)]


def test_uneven_ends_and_counted_ends():
    assert [len(stage.layers) for stage in stages(facts(pp=4, first_stage_layers=1, last_stage_layers=3))] == [
        1,
        2,
        2,
        3,
    ]
    assert [len(stage.layers) for stage in stages(facts(10, pp=4, embedding_counts=True, loss_counts=True))] == [
        2,
        3,
        3,
        2,
    ]


def test_a_layout_says_it_all():
    layout = (("embedding", "decoder"), ("decoder", "decoder"), ("decoder",), ("mtp", "loss"))
    first, second = stages(facts(4, pp=2, stages=layout))
    assert first == Stage(0, ((0,), (3,)), True, False)
    assert second == Stage(1, ((1, 2), ()), False, True, mtp=1)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, [1]),
        ({"pp": 4}, [4, 3, 2, 1]),
        ({"pp": 4, "gbs": 2}, [2, 2, 2, 1]),
        ({"pp": 2, "vpp": 2}, [2.5, 1.5]),  # as Narayanan et al.: 1 + (pp - 1) / (pp * vpp) times pp
        ({"pp": 2, "vpp": 2, "group": 8, "gbs": 32}, [5.5, 4.5]),  # larger groups keep more
    ],
)
def test_micro_batches_in_flight(given, expected):
    f = facts(**given)
    assert [in_flight(f, stage) for stage in range(f.layout.pp)] == expected
