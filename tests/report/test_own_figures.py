"""Figures by specification: what they show, by kind, and what is said about those that can't be drawn."""

from dataclasses import replace
from itertools import pairwise

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from drawn_figures import drawn, drawn_by
from fake_runs import FakeExperiment

from megaboa.config.models.outputs import Figure
from megaboa.records import SweepAxis
from megaboa.report import fits, style
from megaboa.report.drawing import draw, of_spec
from megaboa.report.figures import LEARNING_RATE, standard_figures
from megaboa.report.frames import Frames
from megaboa.report.kinds import mean_band
from megaboa.report.notes import ReportError, left_out, of_curves
from megaboa.report.runs import load_runs
from megaboa.report.tables import runs_table

VALUES = {
    f"lr{lr}-gbs{gbs}-seed{seed}": {"optimizer.lr": lr, "training.global_batch_size": gbs, "training.seed": seed}
    for lr in (0.001, 0.003)
    for gbs in (8, 16)
    for seed in (1, 2, 3)
}


@pytest.fixture(scope="module")
def frames(tmp_path_factory):
    """Two learning rates, two batches, three seeds; the loss hangs on all three."""
    experiment = FakeExperiment(tmp_path_factory.mktemp("sweep"))
    for name, values in VALUES.items():
        lr, gbs, seed = values.values()
        losses = {step: 5 - lr * 100 * step - gbs / 100 + seed / 10 for step in range(1, 11)}
        experiment.completed_run(name, steps=10, losses=losses)
        experiment.measure(name)
    return Frames(load_runs(experiment.results), VALUES)


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def test_what_no_run_has_yet_is_left_out_of_an_interim_report(frames):
    spec = Figure(name="mine", kind="bar", data="runs", x="run", y="evaluation.accuracy")
    assert of_spec(spec, frames, interim=True) is None
    with pytest.raises(ReportError, match=r"evaluation\.accuracy"):
        of_spec(spec, frames)


def test_a_line_for_each_run_in_the_colour_of_its_group(frames):
    [axes], table = drawn(frames, kind="line", data="steps", x="step", y="loss", hue="optimizer.lr")
    assert len(axes.lines) == 12 and len({line.get_color() for line in axes.lines}) == 2
    assert len(table) == 120 and set(table["optimizer.lr"]) == {0.001, 0.003}
    assert list(axes.lines[0].get_ydata()) == table["loss"].tolist()[:10]


def test_filters_take_values_as_they_stand_in_a_file(frames):
    given = {"kind": "line", "data": "steps", "x": "step", "y": "loss"}
    _, table = drawn(frames, **given, filter={"optimizer.lr": 0.001, "step": [1, 2], "training.seed": "3"})
    assert sorted(set(table["step"])) == [1, 2] and set(table["run"]) == {"lr0.001-gbs8-seed3", "lr0.001-gbs16-seed3"}
    assert of_spec(Figure(name="none", **given, filter={"step": 99}), frames) is None


def test_the_mean_over_seeds_has_its_interval(frames):
    [axes], table = drawn(frames, kind="line", data="steps", x="step", y="loss", over="training.seed")
    assert len(axes.lines) == len(axes.collections) == 4  # settings: their mean, and a band around it
    row = table[(table["setting"] == "dense lr=0.001 global_batch_size=8") & (table["step"] == 1)].iloc[0]
    assert row["n"] == 3 and row["mean"] == pytest.approx(5 - 0.1 - 0.08 + 0.2)
    # Student's t for three values: 4.303 standard deviations of 0.1, by the root of three.
    assert row["high"] - row["mean"] == pytest.approx(4.303 * 0.1 / 3**0.5, rel=1e-4)


def test_two_seeds_have_their_values_as_a_band_and_one_has_none():
    """The 95% interval of two values is wider than what it is about: nothing could be read from the figure."""
    band = mean_band(pd.DataFrame({"x": [1, 1, 2], "y": [2.0, 4.0, 5.0]}), "x", "y")
    assert band["mean"].tolist() == [3.0, 5.0] and band["n"].tolist() == [2, 1]
    assert (band["low"][0], band["high"][0]) == (2.0, 4.0) and band["low"].isna().tolist() == [False, True]


CURVES = {"kind": "line", "data": "steps", "x": "step", "y": "loss"}
TIMES = {"kind": "bar", "data": "time", "x": "kind", "y": "seconds", "hue": "optimizer.lr"}


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """24 runs: four rates, three batches, two seeds."""
    values = {
        f"lr{lr}-gbs{gbs}-seed{seed}": {"optimizer.lr": lr, "training.global_batch_size": gbs, "training.seed": seed}
        for lr in (0.001, 0.002, 0.004, 0.008)
        for gbs in (8, 16, 32)
        for seed in (1, 2)
    }
    experiment = FakeExperiment(tmp_path_factory.mktemp("many"))
    for name, (lr, gbs, seed) in ((name, tuple(given.values())) for name, given in values.items()):
        losses = {step: 5 - 20 * lr * step - gbs / 1000 + seed / 1000 for step in range(1, 21)}
        experiment.completed_run(name, steps=20, losses=losses)
        experiment.measure(name)
    return Frames(load_runs(experiment.results), values)


def as_read(legend):
    """The entries of a legend, line by line."""
    renderer = legend.figure.canvas.get_renderer()
    boxes = {text.get_text(): text.get_window_extent(renderer) for text in legend.get_texts()}
    return sorted(boxes, key=lambda text: (-round(boxes[text].y0), boxes[text].x0))


@pytest.mark.parametrize("form", ["page", "one-column", "two-columns"])
@pytest.mark.parametrize("direct", [True, False])
def test_24_runs_are_told_apart_by_four_colours_and_three_dashes(many, form, direct):
    look = {"hue": "optimizer.lr", "dash": "training.global_batch_size", "direct": direct, "format": form}
    figure, table = drawn_by(Figure(name="mine", **CURVES, **look), many)
    figure.draw_without_rendering()
    [axes], [legend] = figure.axes, figure.legends
    drawn = [line for line in axes.lines if len(line.get_xdata())]
    assert len(drawn) == 24 == table["run"].nunique()
    assert len({(line.get_color(), line.get_linestyle(), str(line._dash_pattern)) for line in drawn}) == 12
    batches, rates = [f"global batch size {gbs}" for gbs in (8, 16, 32)], ["0.001", "0.002", "0.004", "0.008"]
    assert as_read(legend) == batches if direct else [f"learning rate {rate}" for rate in rates] + batches
    renderer = figure.canvas.get_renderer()
    labels = sorted(axes.texts, key=lambda text: text.xy[1])
    assert [text.get_text() for text in labels] == ([*reversed(rates), "learning rate"] if direct else [])
    boxes = [text.get_window_extent(renderer) for text in labels]
    assert all(low.y1 <= high.y0 for low, high in pairwise(boxes)), "names lie on each other"
    assert all(box.x1 <= figure.bbox.width for box in boxes) and legend.get_window_extent(renderer).x0 >= 0
    assert figure.get_figwidth() == style.FORMATS[form].width


def test_many_runs_have_a_colour_and_dash_each_and_equal_curves_a_common_name(many, tmp_path):
    [axes], table = drawn(many, **CURVES)
    assert len({(line.get_color(), str(line._dash_pattern)) for line in axes.lines}) == 24 == table["run"].nunique()
    [axes], table = drawn(many, **CURVES, over="training.seed")
    assert len({(line.get_color(), str(line._dash_pattern)) for line in axes.lines}) == 12 == table["setting"].nunique()
    experiment = FakeExperiment(tmp_path)
    for index in range(9):
        losses = {step: 5 - step / 10 - index // 4 for step in range(1, 21)}
        experiment.completed_run(f"r{index}", steps=20, losses=losses)
        experiment.measure(f"r{index}")
    [axes], table = drawn(Frames(load_runs(experiment.results)), **CURVES)
    assert table["run"].nunique() == 9 and len(table) == 180
    assert [line.get_label() for line in axes.lines] == ["r0, r1, r2 and 1 more", "r4, r5, r6 and 1 more", "r8"]
    looks = {(line.get_color(), str(line._dash_pattern)) for line in axes.lines}
    assert len(looks) == 3, "the first and the ninth run have one colour"


def test_an_optimum_is_drawn_where_the_sweep_has_one(many):
    spec = Figure(name="best", kind="scatter", x="optimizer.lr", y="loss.last", fit="optimum", log=["x"])
    found = of_spec(spec, many)
    assert "the largest of the sweep" in found.fits[""].why and found.table["fitted"].isna().all()
    inside = Frames([], {})
    valley = (np.log(many.runs["optimizer.lr"]) - np.log(0.003)) ** 2
    inside.runs = many.runs.assign(**{"loss.last": 3 + valley + many.runs["training.seed"] / 100})
    figure, table = drawn_by(spec, inside)
    [best] = [line for line in figure.axes[0].lines if line.get_linestyle() == ":"]
    assert best.get_xdata()[0] == pytest.approx(0.003, rel=0.01)
    assert (table["fitted"] - table["loss.last"]).abs().max() < 0.02


@pytest.fixture(scope="module")
def one_with_tp(tmp_path_factory):
    """Two rates and two seeds, and one run that alone sets `parallel.tp` and `parallel.vpp`."""
    values = {
        f"lr{lr}-seed{seed}": {"optimizer.lr": lr, "training.seed": seed} for lr in (0.001, 0.003) for seed in (1, 2)
    }
    unset = {name: {"parallel.tp": 1, "parallel.vpp": None} for name in values}
    values["tp2"] = {"optimizer.lr": 0.003, "training.seed": 1, "parallel.tp": 2, "parallel.vpp": 2}
    experiment = FakeExperiment(tmp_path_factory.mktemp("tp"))
    for name, given in values.items():
        start = 5 - 100 * given["optimizer.lr"] + given["training.seed"] / 10
        experiment.completed_run(name, steps=10, losses={step: start - step / 10 for step in range(1, 11)})
        experiment.measure(name)
    return Frames(load_runs(experiment.results), values, unset=unset)


def test_runs_that_do_not_set_a_swept_key_are_drawn_with_the_value_they_had(one_with_tp):
    means = {"kind": "line", "x": "optimizer.lr", "y": "loss.last", "over": "training.seed"}
    [axes], table = drawn(one_with_tp, **means, hue="parallel.tp")
    assert table[["optimizer.lr", "parallel.tp", "n"]].to_numpy().tolist() == [
        [0.001, 1, 2],
        [0.003, 1, 2],
        [0.003, 2, 1],
    ]
    assert [line.get_label() for line in axes.lines] == ["parallel.tp 1", "parallel.tp 2"]
    _, table = drawn(one_with_tp, **means, hue="parallel.tp", filter={"parallel.tp": 1})
    assert table["n"].tolist() == [2, 2]
    [axes], table = drawn(one_with_tp, **means, hue="parallel.vpp")
    assert [line.get_label() for line in axes.lines] == ["parallel.vpp not set", "parallel.vpp 2"]
    assert table["n"].tolist() == [2, 2, 1]
    axes, _ = drawn(one_with_tp, kind="scatter", x="optimizer.lr", y="loss.last", facet="parallel.vpp")
    assert [one.get_title() for one in axes] == ["parallel.vpp not set", "parallel.vpp 2"]
    [axes], table = drawn(one_with_tp, kind="bar", x="parallel.vpp", y="loss.last")
    assert [text.get_text() for text in axes.get_yticklabels()] == ["not set", "2"] and table["n"].tolist() == [4, 1]


def test_runs_without_a_place_on_an_axis_are_named(one_with_tp):
    spec = Figure(name="mine", kind="scatter", x="parallel.vpp", y="loss.last")
    rows = one_with_tp.of(spec)
    assert rows["run"].tolist() == ["tp2"]
    [said] = left_out(spec, one_with_tp, rows)
    assert (
        said
        == "Runs without a value of parallel.vpp are not shown: lr0.001-seed1, lr0.001-seed2, lr0.003-seed1 and 1 more."
    )


def test_a_caption_and_the_note_after_it_are_two_sentences(one_with_tp, tmp_path, svg_alone, monkeypatch):
    monkeypatch.setattr("megaboa.report.drawing.standard_figures", lambda frames: [])
    means = {"kind": "line", "x": "optimizer.lr", "y": "loss.last", "over": "training.seed"}
    own = [
        Figure(name="open", **means, caption="Loss against lr"),
        Figure(name="closed", **means, caption="Which rate is best?"),
        Figure(name="alone", kind="bar", x="run", y="loss.last", caption="Loss against lr"),
        Figure(name="some", kind="scatter", x="parallel.vpp", y="loss.last", caption="By vpp"),
    ]
    figures = {one.name: one for one in draw(one_with_tp._runs, [], [], {}, tmp_path, one_with_tp, own)}
    assert [figures[one.name].caption for one in own] == [
        "Loss against lr.",
        "Which rate is best?",
        "Loss against lr",
        "By vpp.",
    ]
    assert figures["open"].note.startswith("Mean over training.seed (n = 1 to 2)")
    assert figures["some"].note.startswith("Runs without a value of parallel.vpp are not shown")


def test_a_setting_names_no_value_that_runs_have_anyway(one_with_tp):
    runs = one_with_tp._runs
    values = {"lr0.001-seed1": {"parallel.tp": 1}, "tp2": {"parallel.tp": 2}}
    unset = {run.name: {"parallel.tp": 1} for run in runs if run.name not in values}
    settings = Frames(runs, values, unset=unset).runs.set_index("run")["setting"]
    assert set(settings.drop("tp2")) == {"dense"} and settings["tp2"] == "dense tp=2"


def test_means_over_seeds_are_one_line_over_a_swept_key(frames, one_with_tp):
    means = {"kind": "line", "x": "optimizer.lr", "y": "loss.last", "over": "training.seed"}
    [axes], table = drawn(frames, **means)
    assert [line.get_xdata().tolist() for line in axes.lines] == [[0.001, 0.003]] * 2, "a line for each batch"
    assert set(table["setting"]) == {"dense global_batch_size=8", "dense global_batch_size=16"}
    assert set(table["n"]) == {3}
    [axes], table = drawn(one_with_tp, **means)
    assert [line.get_xdata().tolist() for line in axes.lines] == [[0.001, 0.003], [0.003]]
    assert all(line.get_marker() == "o" for line in axes.lines), "one place alone is no line"
    _, table = drawn(frames, kind="line", x="training.seed", y="loss.last", over="optimizer.lr")
    assert set(table["setting"]) == {"dense global_batch_size=8", "dense global_batch_size=16"}
    _, table = drawn(frames, kind="line", data="steps", x="step", y="loss", over="training.global_batch_size")
    assert set(table["setting"]) == {"dense lr=0.001", "dense lr=0.003"}


def test_a_column_that_tells_a_swept_key_is_as_good_as_the_key(frames):
    tokens = frames.runs["training.global_batch_size"] * 1000
    other = Frames(frames._runs, VALUES)
    other.runs = frames.runs.assign(trained_tokens=tokens)
    [axes], table = drawn(other, kind="line", x="trained_tokens", y="loss.last", over="training.seed")
    assert [line.get_xdata().tolist() for line in axes.lines] == [[8000, 16000]] * 2
    assert set(table["setting"]) == {"dense lr=0.001", "dense lr=0.003"}


@pytest.mark.parametrize("kind", ["bar", "box"])
def test_bars_of_a_group_stand_together_below_one_name(frames, kind):
    [axes], table = drawn(frames, kind=kind, x="optimizer.lr", y="loss.last", hue="training.seed")
    assert [text.get_text() for text in axes.get_yticklabels()] == ["0.001", "0.003"]
    middles = [bar.get_y() + bar.get_height() / 2 for bar in axes.patches]
    assert len(middles) == 6 and axes.get_yticks().tolist() == pytest.approx([middles[1], middles[4]])
    inside = [middles[1] - middles[0], middles[2] - middles[1], middles[5] - middles[4]]
    gap = middles[3] - middles[2]
    assert inside == pytest.approx([inside[0]] * 3) and gap > 1.3 * inside[0] > 1.3 * axes.patches[0].get_height()
    assert table["training.seed"].tolist() == [1, 2, 3] * 2
    [axes], _ = drawn(frames, kind=kind, x="run", y="loss.last", hue="training.seed")
    assert np.diff(axes.get_yticks()).tolist() == [1.0] * 11, "one bar each: nothing to group"


def test_kinds_of_time_that_no_run_has_spent_are_left_out(frames):
    spent = {kind for run in frames._runs for kind, seconds in run.goodput.seconds.items() if seconds}
    _, table = drawn(frames, **TIMES)
    assert set(table["kind"]) == spent and not {"queue", "lost", "away"} & spent and "productive" in spent
    _, table = drawn(frames, **TIMES, filter={"kind": ["lost", "productive"]})
    assert set(table["kind"]) == {"lost", "productive"}, "named, it is shown"


def test_equal_learning_rates_are_one_curve_in_the_order_of_the_settings(tmp_path):
    experiment, values = FakeExperiment(tmp_path), {}
    for name in ("low-1", "low-2", "high-1", "high-2"):
        experiment.completed_run(name, steps=4)
        experiment.measure(name)
        values[name] = {"optimizer.lr": 1e-3 if "low" in name else 3e-3, "training.seed": int(name[-1])}
    runs = load_runs(experiment.results)
    for run in runs:
        run.steps["lr"] = values[run.name]["optimizer.lr"] / run.steps["step"]
    figure, table = drawn_by(LEARNING_RATE, Frames(runs, values))
    [axes], [legend] = figure.axes, figure.legends
    figure.draw_without_rendering()
    assert [line.get_ydata()[0] for line in axes.lines] == [1e-3, 3e-3] and len(table) == 16
    assert as_read(legend) == ["low-1, low-2", "high-1, high-2"]


def test_legends_are_read_line_by_line_in_the_order_of_the_plan(tmp_path):
    experiment = FakeExperiment(tmp_path)
    names = [f"{word}-0.00{index}-and-a-seed" for index, word in enumerate(("one", "two", "three", "four", "five"))]
    for index, name in enumerate(names):
        experiment.completed_run(name, steps=3, losses={1: 5 + index, 2: 4, 3: 3})
        experiment.measure(name)
    figure, _ = drawn_by(Figure(name="mine", **CURVES), Frames(load_runs(experiment.results)))
    figure.draw_without_rendering()
    [legend] = figure.legends
    assert as_read(legend) == names and legend._ncols > 1


@pytest.mark.parametrize(
    ("given", "caption"),
    [
        (CURVES | {"x": "tokens"}, "Loss of every step by tokens: a line for each run."),
        (
            CURVES | {"hue": "optimizer.lr", "over": "training.seed"},
            "Loss of every step by step: a line for each learning rate; colour: learning rate. Mean over training.seed "
            "and training.global_batch_size (n = 6) with its 95% confidence interval.",
        ),
        (
            TIMES | {"filter": {"kind": "idle"}},
            "Seconds of the runs' time by kind: a bar for each kind and learning rate; colour: learning rate; "
            "only kind idle. Median (bar), least to most (line), n = 6, over training.global_batch_size and "
            "training.seed.",
        ),
        (
            {"kind": "heat", "x": "optimizer.lr", "y": "training.global_batch_size", "value": "loss.last"},
            "Last loss by learning rate and global batch size: a cell for each pair. A cell is a mean, n = 3, over "
            "training.seed.",
        ),
        (
            {"kind": "scatter", "data": "validation", "x": "step", "y": "loss", "facet": "optimizer.lr"},
            "Loss of every evaluation by step: a point for each evaluation; panels: learning rate.",
        ),
        ({"kind": "scatter", "x": "optimizer.lr", "y": "loss.last", "caption": "Mine."}, "Mine."),
    ],
)
def test_a_figure_without_a_caption_says_what_is_drawn(frames, tmp_path, monkeypatch, given, caption):
    monkeypatch.setattr("megaboa.report.figures.STANDARD", ())
    monkeypatch.setattr("megaboa.report.style.KINDS", ("svg",))
    shown = draw(frames._runs, (), (), {}, tmp_path, frames, own=[Figure(name="mine", **given)])
    [mine] = [figure for figure in shown if figure.name == "mine"]
    assert f"{mine.caption} {mine.note}".strip() == caption


@pytest.mark.parametrize("kind", ["bar", "box"])
def test_bars_and_boxes_of_several_runs_name_none_of_them(frames, kind):
    [axes], table = drawn(frames, kind=kind, x="setting", y="loss.last")
    assert "run" not in table and table["n"].tolist() == [3] * 4 and not axes.figure.legends
    names = [f"dense lr={lr} global_batch_size={gbs}" for lr in (0.001, 0.003) for gbs in (8, 16)]
    assert [text.get_text() for text in axes.get_yticklabels()] == names
    [axes], table = drawn(frames, kind=kind, x="optimizer.lr", y="loss.last", hue="training.global_batch_size")
    assert table[["optimizer.lr", "training.global_batch_size"]].to_numpy().tolist() == [
        [lr, gbs] for lr in (0.001, 0.003) for gbs in (8, 16)
    ]
    entries = [text.get_text() for text in axes.figure.legends[0].get_texts()]
    assert entries == ["global batch size 8", "global batch size 16"]


def test_boxes_have_the_axis_of_their_values_and_bars_begin_at_zero(frames):
    [axes], table = drawn(frames, kind="box", x="optimizer.lr", y="loss.last")
    low, high = table["loss.last.p5"].min(), table["loss.last.p95"].max()
    assert low - 0.1 * (high - low) < axes.get_xlim()[0] < low < high < axes.get_xlim()[1] < high + 0.1 * (high - low)
    assert drawn(frames, kind="bar", x="optimizer.lr", y="loss.last")[0][0].get_xlim()[0] == 0


def test_a_heat_map_is_the_mean_of_its_fields(frames):
    axes, table = drawn(frames, kind="heat", x="optimizer.lr", y="training.global_batch_size", value="loss.last")
    assert len(table) == 4
    field = table[(table["optimizer.lr"] == 0.003) & (table["training.global_batch_size"] == 16)]["loss.last"]
    assert field.item() == pytest.approx(5 - 3 - 0.16 + 0.2)
    assert {text.get_text() for text in axes[0].texts} == {f"{value:.3f}" for value in table["loss.last"]}


def test_bars_of_groups_reach_over_their_runs(frames):
    [axes], table = drawn(frames, kind="bar", x="optimizer.lr", y="loss.last")
    assert [round(bar.get_width(), 6) for bar in axes.patches] == [round(value, 6) for value in table["loss.last"]]
    assert table["n"].tolist() == [6, 6]
    low, high = table.loc[0, "loss.last.least"], table.loc[0, "loss.last.most"]
    assert (low, high) == (pytest.approx(5 - 1 - 0.16 + 0.1), pytest.approx(5 - 1 - 0.08 + 0.3))


def test_boxes_facets_and_scatter_plots(frames):
    [axes], table = drawn(frames, kind="box", data="steps", x="training.global_batch_size", y="seconds")
    assert len(axes.patches) == 2 and (table["seconds.p25"] <= table["seconds.median"]).all()
    axes, table = drawn(frames, kind="scatter", x="optimizer.lr", y="loss.last", facet="training.seed", log=["x"])
    assert [one.get_title() for one in axes if one.get_visible()] == [f"seed {seed}" for seed in (1, 2, 3)]
    assert len(table) == 12 and axes[0].get_xscale() == "log"


def test_a_sweep_with_seeds_and_two_numbers_has_bands_and_a_heat_map(frames):
    figures = {figure.name: figure for figure in standard_figures(frames)}
    assert figures["loss"].over == figures["validation"].over == "training.seed"
    sweep = figures["sweep"]
    assert {sweep.x, sweep.y} == {"optimizer.lr", "training.global_batch_size"} and sweep.value == "loss.tail_mean"


def test_what_can_not_be_drawn_is_named(frames):
    said = r"report\.figures: mine: can't be drawn: no run has the column 'evaluation\.acc', as no run was evaluated$"
    with pytest.raises(ReportError, match=said):
        drawn(frames, kind="bar", x="run", y="evaluation.acc")
    scored = Frames([replace(run, evaluation={"acc": 0.5}) for run in frames._runs], VALUES, unscored=("x", "y"))
    said = r"'evaluation\.ac'; did you mean 'evaluation\.acc'\? The evaluation of runs x, y failed$"
    with pytest.raises(ReportError, match=said):
        drawn(scored, kind="bar", x="run", y="evaluation.ac")
    with pytest.raises(ReportError, match=r"no run has the column 'mfuu'; did you mean 'mfu'\?$"):
        drawn(frames, kind="bar", x="run", y="mfuu")
    with pytest.raises(ReportError, match=r"no run has the column 'qqq'; there are run, "):
        drawn(frames, kind="bar", x="run", y="qqq")
    with pytest.raises(ReportError, match=r"report\.figures: mine: can't be drawn as bar"):
        drawn(frames, kind="bar", x="run", y="layout")


@pytest.mark.slow
def test_three_hundred_runs_stay_readable(tmp_path):
    """One median, its bands and the two runs at the ends, in place of 300 curves; no legend of 300 names."""
    experiment = FakeExperiment(tmp_path)
    for index in range(300):
        experiment.completed_run(f"lr{index}", steps=10, losses=dict.fromkeys(range(1, 11), 5 + index / 100))
        experiment.measure(f"lr{index}")
    frames = Frames(load_runs(experiment.results))
    [axes], table = drawn(frames, kind="line", data="steps", x="step", y="loss")
    assert [line.get_label() for line in axes.lines] == ["median of 300 runs", "lr0", "lr299"]
    assert len(table) == 10 and table["median"].tolist() == pytest.approx([5 + 299 / 200] * 10)
    assert table["p95"].tolist() == pytest.approx([5 + 0.95 * 2.99] * 10)
    [axes], table = drawn(frames, kind="bar", x="run", y="step_seconds")
    assert len(table) == len(axes.patches) == 40


@pytest.mark.parametrize("highest", [0.004, 0.03, 0.4, 1.0])
def test_ticks_of_shares_have_different_labels(highest):
    _, axes = plt.subplots()
    axes.plot([0, 1], [0, highest])
    axes.yaxis.set_major_formatter(style.formatter("mfu"))
    axes.figure.canvas.draw()
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert len(set(labels)) == len(labels) > 3 and max(map(len, labels)) < 7, labels


@pytest.mark.parametrize("log", [["y"], ["x", "y"]])
def test_logarithmic_axes_name_their_ticks_in_plain_text(frames, log):
    for y in ("loss", "step_seconds"):
        [axes], _ = drawn(
            frames, kind="scatter", data="runs", x="optimizer.lr", y=f"{y}.last" if y == "loss" else y, log=log
        )
        axes.figure.canvas.draw()
        texts = [
            label.get_text()
            for axis in (axes.xaxis, axes.yaxis)
            for label in axis.get_ticklabels() + axis.get_ticklabels(minor=True)
        ]
        assert any(texts) and not any("$" in text or "math" in text for text in texts), texts


@pytest.mark.parametrize("runs", [1, 7, 24, 60])
def test_axes_keep_their_height_whatever_the_legend_names(tmp_path, runs):
    experiment, values = FakeExperiment(tmp_path), {}
    for index in range(runs):
        name = f"lr{index + 1}e-3-gbs8-a-rather-long-name"
        experiment.completed_run(name, steps=3, losses={1: 5 + index, 2: 4, 3: 3})
        experiment.measure(name)
        values[name] = {"optimizer.lr": index / 1000}
    [axes], _ = drawn(Frames(load_runs(experiment.results), values), kind="line", data="steps", x="step", y="loss")
    figure = axes.figure
    figure.canvas.draw()
    assert axes.get_window_extent().height / figure.dpi > 2.6
    for legend in figure.legends:
        assert legend.get_window_extent().y1 <= axes.get_window_extent().y0, "it lies below the axes"
        assert legend.get_window_extent().x0 >= 0


def test_a_law_is_drawn_over_its_points_by_each_of_its_three_numbers(many):
    law = fits.Law(e=1.7, a=400.0, b=1800.0, alpha=0.34, beta=0.37)
    study = Frames([], {})
    params, tokens = many.runs["optimizer.lr"] * 1e11, many.runs["training.global_batch_size"] * 1e9
    study.runs = many.runs.assign(
        params=params,
        trained_tokens=tokens,
        train_flops=6 * params * tokens,
        validation=law.loss(params, tokens) * (1 + many.runs["training.seed"] / 1e4),
    )
    for x, by in (("params", "trained_tokens"), ("trained_tokens", "params"), ("train_flops", "params")):
        spec = Figure(name="law", kind="scatter", x=x, y="validation", hue=by, fit="scaling-law", log=["x", "y"])
        figure, table = drawn_by(spec, study)
        levels = study.runs[by].nunique()
        curves = [line for line in figure.axes[0].lines if len(line.get_xdata()) > 2]
        assert len(curves) == levels + (x == "train_flops"), "the best size is a curve of its own"
        assert (table["fitted"] / table["validation"] - 1).abs().max() < 2e-3
        assert len({line.get_color() for line in curves[:levels]}) == levels
        for line, (_, runs) in zip(curves, study.runs.groupby(by), strict=False):
            assert line.get_xdata().min() >= runs[x].min() / 2 and line.get_xdata().max() <= runs[x].max() * 2
        said = of_curves(spec, study.of(spec), of_spec(spec, study).fits)
        each = "budget of tokens" if x == "params" else "size"
        assert said.startswith(f"Lines: the law for each {each}, up to 2 times beyond its runs.")
        assert ("Dashed: the law for the best size of each compute, " in said) == (x == "train_flops")


def test_an_axis_with_labels_is_a_column_whose_labels_keep_their_order(tmp_path):
    """For colours, places on an axis, filters and tables. Its label tells all that it sets."""
    experiment = FakeExperiment(tmp_path)
    size, mult, values = {}, {}, {}
    for place, one in enumerate(("s", "m", "a")):
        for other, seed in (("x5", 1), ("x20", 2)):
            name = f"{one}-{other}"
            size[name], mult[name] = one, other
            values[name] = {"optimizer.lr": 0.1 * (place + 1), "optimizer.eps": 1e-8, "training.seed": seed}
            experiment.completed_run(name, steps=4, losses=dict.fromkeys(range(1, 5), 3.0 - place / 10 + seed))
            experiment.measure(name)
    labels = ("s", "m", "a")
    axes = (
        SweepAxis(name="size", labels=labels, runs=size),
        SweepAxis(name="mult", labels=("x5", "x20"), runs=mult),
    )
    runs = load_runs(experiment.results)
    study = Frames(runs, values, axes=axes)
    [bars], table = drawn(study, kind="bar", x="size", y="loss.last", hue="mult", filter={"mult": "x20"})
    assert table["size"].tolist() == [*labels] and [tick.get_text() for tick in bars.get_yticklabels()] == [*labels]
    [lines], table = drawn(study, kind="line", x="size", y="loss.last", over="training.seed")
    assert table["size"].tolist() == [*labels] and set(table["n"]) == {2}
    lines.figure.canvas.draw()
    assert [tick.get_text() for tick in lines.get_xticklabels()] == [*labels]
    heat, table = drawn(study, kind="heat", x="size", y="mult", value="loss.last")
    assert [tick.get_text() for tick in heat[0].get_xticklabels()] == [*labels]
    drawn(study, kind="line", data="steps", x="step", y="loss", hue="size", dash="mult", facet="size")
    found = runs_table(runs, study)
    assert found["size"].tolist() == [size[name] for name in found["run"]] and "x5" in found["mult"].tolist()


def test_a_run_that_continues_has_its_parents_tokens_and_its_own_step_times(tmp_path):
    experiment = FakeExperiment(tmp_path)
    for name in ("whole", "half", "older"):
        experiment.completed_run(name, steps=10)
        experiment.measure(name)
    runs = {run.name: run for run in load_runs(experiment.results)}
    parent = {"parent": {"run": "whole", "iteration": 5}}
    runs["half"].summary.update(parent, tokens_before=5120)
    assert runs["older"].summary["tokens_before"] is None, "as in a summary of a version that didn't say"
    runs["older"].summary.update(parent)
    runs["half"].steps["attempt"] = [0] * 6 + [1] * 4
    frames = Frames(list(runs.values()), {})
    tokens = frames.runs.set_index("run")["trained_tokens"]
    assert tokens["half"] == tokens["whole"] + 5120 and pd.isna(tokens["older"])
    ends = frames.steps.groupby("run")["tokens"].agg(["first", "last"])
    assert ends.loc["whole"].tolist() == [1024, 10 * 1024]
    assert ends.loc["half"].tolist() == [5120 + 1024, tokens["half"]], "the axis begins at the parent's tokens"
    assert "older" not in set(frames.of(Figure(name="mine", kind="line", data="steps", x="tokens", y="loss"))["run"])
    # Continued in place, its rows have the parent's first six steps already.
    runs["half"].summary.update(tokens=4 * 1024, tokens_before=6 * 1024)
    in_place = Frames(list(runs.values()), {}).steps.query("run == 'half'")["tokens"]
    assert in_place.tolist() == [step * 1024 for step in range(1, 11)]
    warm = frames.steps.query("run == 'half' and warm == 'true'")
    assert warm["step"].tolist() == [10], "steps from before, and its own first three, don't count"
