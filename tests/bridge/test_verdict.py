"""A proof is written only when it is one."""

import pytest

from megaboa.bridge.verdict import check, conclude
from megaboa.files import read_json
from megaboa.records import plain


def test_a_proof_holds_its_checks(tmp_path, capsys):
    checks = [check("tensors", True, "3 of 3"), check("logits", True, "no difference")]
    conclude("import of model m", checks, tmp_path / "proof.json")
    assert read_json(tmp_path / "proof.json") == {"state": "PASS", "checks": [plain(one) for one in checks]}
    said = "PASS import of model m: tensors: 3 of 3\nPASS import of model m: logits: no difference\n"
    assert capsys.readouterr().out == said


def test_a_failed_check_ends_the_process_and_leaves_no_proof(tmp_path, capsys):
    checks = [check("tensors", True, "3 of 3"), check("logits", False, "1.0")]
    with pytest.raises(SystemExit, match="import of model m: 1 of 2 checks failed: logits"):
        conclude("import of model m", checks, tmp_path / "proof.json")
    assert "FAIL import of model m: logits: 1.0" in capsys.readouterr().out
    assert not (tmp_path / "proof.json").exists()
    assert read_json(tmp_path / "failed-proof.json") == {"state": "FAIL", "checks": [plain(one) for one in checks]}
    conclude("import of model m", checks[:1], tmp_path / "proof.json")
    assert not (tmp_path / "failed-proof.json").exists()
