"""How a command ends: every failure reads the same, and the exit code tells which one it was."""

import pytest

from weightcache.cli import explaining, main
from weightcache.wire import reasons


def ending_with(monkeypatch, error):
    def function(_):
        raise error

    monkeypatch.setattr(explaining, "show_version", function)
    return main.main(["version"])


@pytest.mark.parametrize("reason", reasons.Reason, ids=str)
def test_a_refusal_is_said_in_two_lines_and_is_the_exit_code(reason, monkeypatch, capsys):
    """The person on call gets reason, figures and next step, the script a code of its own, nobody a traceback."""
    code = ending_with(monkeypatch, reasons.Refusal(reason, "file x has 1, wanted 2"))
    said = capsys.readouterr().err
    meaning = reasons.MEANINGS[reason]
    assert said == f"weightcache: {reason}: file x has 1, wanted 2\nnext step: {meaning.next_step}\n"
    assert code == meaning.exit_code


def test_a_fault_of_our_own_keeps_its_traceback(monkeypatch, capsys):
    """What nobody foresaw has to be reported with the place where it happened."""
    code = ending_with(monkeypatch, KeyError("rank"))
    said = capsys.readouterr().err
    assert code == 70
    assert "Traceback" in said and "weightcache: InternalError: KeyError: 'rank'" in said


def test_an_interrupt_is_130(monkeypatch, capsys):
    """Shells and supervisors tell an interrupt from a failure by this number."""
    assert ending_with(monkeypatch, KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == ""


def test_a_command_that_succeeds_is_0(capsys):
    """The common case."""
    assert main.main(["version"]) == 0
    assert capsys.readouterr().out.startswith("weightcache ")


def test_every_exit_code_is_one_reasons_alone():
    """Two reasons with one code would be one reason to a script; 0, 1, 130 and 141 mean other things."""
    codes = [meaning.exit_code for meaning in reasons.MEANINGS.values()]
    assert len(set(codes)) == len(codes) == len(reasons.Reason)
    assert not {0, 1, main.INTERRUPTED, main.BROKEN_PIPE} & set(codes)
