from megaboa.preflight.refusals import grouped, some


def test_runs_with_one_reason_share_a_line():
    reasons = {"a": ["too long"], "b": ["too long", "too wide"], "c": [], "d": ["too long"], "e": ["too long"]}
    assert grouped(reasons) == ["runs a, b, d and 1 more: too long", "run b: too wide"]
    assert grouped({"a": ["no"]}, "is refused", "are refused") == ["run a is refused: no"]
    assert grouped({}) == []


def test_some():
    assert some(["a"]) == "run a"
    assert some(["a", "b", "c"]) == "runs a, b, c"
