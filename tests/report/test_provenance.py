"""What a report says of its origin: the image that its runs were trained in, and the configuration of the call."""

from megaboa.files import write_json
from megaboa.report.provenance import image_test, provenance, versions
from megaboa.run import submitted

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_an_image_with_its_test(tmp_path):
    contract = {"state": "PASS", "missing": [{"what": "nsys", "disables": "profile.tool: nsys"}]}
    image = {
        "runtime": "pyxis",
        "digest": "sha256:1",
        "path": "/i.sqsh",
        "python": "3.12.3",
        "packages": {"torch": "2"},
    }
    write_json(tmp_path / "image.json", {**image, "contract": contract, "bridge_source": {"commit": COMMIT}})
    shown = versions(tmp_path / "image.json")
    assert (shown["runtime"], shown["image"], shown["image file"]) == ("pyxis", "sha256:1", "/i.sqsh")
    assert (shown["image test"], shown["Bridge's commit"], shown["torch"]) == ("PASS", COMMIT, "2")
    assert "profile.tool: nsys" in image_test(tmp_path / "image.json")


def test_an_image_that_nothing_could_start(tmp_path):
    image = {"runtime": "apptainer", "digest": "sha256:1", "python": None, "packages": {}}
    write_json(tmp_path / "image.json", {**image, "contract": {"state": "NOT_RUN", "why": "there is no apptainer"}})
    assert versions(tmp_path / "image.json")["image test"] == "NOT_RUN"
    assert "there is no apptainer" in image_test(tmp_path / "image.json")


def test_no_image(tmp_path):
    write_json(tmp_path / "image.json", {"runtime": "none", "digest": "1", "python": "3.12.3", "packages": {}})
    assert "image test" not in versions(tmp_path / "image.json") and image_test(tmp_path / "image.json") is None
    assert image_test(tmp_path / "none.json") is None


def test_the_configuration_is_the_calls_whatever_its_file_says_now(tmp_path, monkeypatch):
    config, results = tmp_path / "e.yaml", tmp_path / "results" / "e"
    config.write_text("lr: 1\n")
    [copy] = submitted.record(results, [config], [{"name": "a", "run": {}}], "snakemake")
    config.write_text("lr: 2\n")
    monkeypatch.delenv(submitted.VARIABLE, raising=False)
    assert provenance(results, [config], "snakemake")["config"] == [{"path": str(config), "text": "lr: 2\n"}]
    monkeypatch.setenv(submitted.VARIABLE, str(submitted.call_of(copy)))
    assert provenance(results, [config], "snakemake")["config"] == [{"path": str(config), "text": "lr: 1\n"}]


def test_no_webhook_in_the_configuration_nor_in_the_command(tmp_path):
    config = tmp_path / "e.yaml"
    config.write_text("# mine\nrecovery:\n  notify: curl https://hooks/s3cr3t  # tell me\n")
    found = provenance(tmp_path, [config], "snakemake --config 'recovery.notify=curl https://hooks/s3cr3t'")
    assert found["config"] == [
        {"path": str(config), "text": '# mine\nrecovery:\n  notify: "echo left out"  # tell me\n'}
    ]
    assert found["command"] == "snakemake --config 'recovery.notify=echo left out'"
