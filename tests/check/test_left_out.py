import made

from megaboa.check.refusals import grouped, read, some, write
from megaboa.files import digest, write_json
from megaboa.records import plain


def test_runs_with_one_reason_share_a_line():
    reasons = {"a": ["too long"], "b": ["too long", "too wide"], "c": [], "d": ["too long"], "e": ["too long"]}
    assert grouped(reasons) == ["runs a, b, d and 1 more: too long", "run b: too wide"]
    assert grouped({"a": ["no"]}, "is refused", "are refused") == ["run a is refused: no"]
    assert grouped({}) == []


def test_some():
    assert some(["a"]) == "run a"
    assert some(["a", "b", "c"]) == "runs a, b, c"


def test_what_one_image_refused_another_may_take(tmp_path):
    write_json(tmp_path / "specs" / "inside.json", {"digest": "packages"})
    for name in ("here", "boxed"):
        write_json(tmp_path / "runs" / name / "run.json", {"name": name})
    write_json(tmp_path / "specs" / "image.json", {"container": (wanted := plain(made.image_spec(path="i.sqsh")))})
    (file := tmp_path / "i.sqsh").write_text("image")
    write_json(tmp_path / "image.json", {"runtime": "pyxis", "digest": "sha256:1", "path": str(file), "bytes": 5})
    write(tmp_path, {"here": ["too long"]})
    write(tmp_path, {"boxed": ["no such kernel"]}, in_image=True)
    assert set(read(tmp_path, "packages", digest(wanted))) == {"here", "boxed"}
    assert read(tmp_path, "other packages", digest(wanted)) == {}
    for other in (digest(plain(made.image_spec(path="j.sqsh"))), None):
        assert set(read(tmp_path, "packages", other)) == {"here"}
    write_json(tmp_path / "image.json", {"runtime": "pyxis", "digest": "sha256:2", "path": str(file), "bytes": 5})
    assert set(read(tmp_path, "packages", digest(wanted))) == {"here"}


def test_an_image_that_is_replaced_or_gone_is_asked_again(tmp_path):
    write_json(tmp_path / "specs" / "inside.json", {"digest": "packages"})
    write_json(tmp_path / "specs" / "image.json", {"container": (wanted := plain(made.image_spec(path="i.sqsh")))})
    write_json(tmp_path / "runs" / "boxed" / "run.json", {})
    (file := tmp_path / "i.sqsh").write_text("image")
    write_json(tmp_path / "image.json", {"runtime": "pyxis", "digest": "sha256:1", "path": str(file), "bytes": 5})
    write(tmp_path, {"boxed": ["no such kernel"]}, in_image=True)
    file.write_text("another")
    assert read(tmp_path, "packages", digest(wanted)) == {}
    file.unlink()
    assert read(tmp_path, "packages", digest(wanted)) == {}
