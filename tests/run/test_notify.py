from megaboa.run import notify as module
from megaboa.run.notify import notify


def test_nobody_is_told_where_nobody_asked():
    assert notify(None, run="dp2") is None
    assert notify("", run="dp2") is None


def test_the_command_knows_what_happened(tmp_path):
    command = f'echo "$MEGABOA_RUN|$MEGABOA_STATE|$MEGABOA_DETAIL|$HOME" >{tmp_path}/told'
    assert notify(command, run="dp2", state="failed", detail='nan: it\'s "bad"; rm -rf $HOME') is None
    run, state, detail, home = (tmp_path / "told").read_text().strip().split("|")
    assert (run, state, detail) == ("dp2", "failed", 'nan: it\'s "bad"; rm -rf $HOME')
    assert home.startswith("/")


def test_what_went_wrong_is_said_and_does_no_harm():
    assert notify("echo no such user >&2; exit 3", run="dp2") == (
        "recovery.notify failed: echo no such user >&2; exit 3: no such user"
    )
    assert "recovery.notify failed" in notify("/no/such/program")


def test_a_command_that_never_ends_is_ended(monkeypatch):
    monkeypatch.setattr(module, "SECONDS", 0.2)
    assert notify("exec sleep 30") == "recovery.notify took more than 0.2 s and was ended: exec sleep 30"
