"""The runner of the suite, on parts of its own: what must turn a run red does, and nothing is left running."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

RUNNER = Path(__file__).resolve().parent.parent.parent / "scripts" / "run_tests"


def run_with(parts: str, *names: str) -> subprocess.CompletedProcess[str]:
    """Run scripts/run_tests in a process of its own, with the given table in place of its parts."""
    program = textwrap.dedent(
        f"""
        import importlib.machinery, sys
        sys.dont_write_bytecode = True
        runner = importlib.machinery.SourceFileLoader("runner", {str(RUNNER)!r}).load_module()
        Part, PYTHON = runner.Part, {sys.executable!r}
        runner.PYTHON, runner.GRACE_SECONDS, runner.PARTS = PYTHON, 0.5, {parts}
        raise SystemExit(runner.main({list(names)!r}))
        """
    )
    command = [sys.executable, "-W", "ignore", "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture
def tests_folder(tmp_path: Path) -> Path:
    """A folder with one test that passes, one that fails and one that is skipped."""
    (tmp_path / "test_three.py").write_text(
        "import pytest\ndef test_a(): pass\ndef test_b(): assert False\ndef test_c(): pytest.skip('no')\n"
    )
    return tmp_path


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """The line that sums the run up."""
    return done.stdout.splitlines()[-1]


def test_the_last_line_sums_all_parts_and_a_failing_test_fails_the_run(tests_folder: Path):
    """A reader of the last line alone learns how many tests passed and failed."""
    part = f"Part(30, tests={str(tests_folder)!r})"
    done = run_with(f"{{'one': {part}, 'two': {part}}}")
    assert done.returncode == 1
    assert last_line(done) == "2 passed, 2 failed, 2 skipped"


def test_a_part_in_which_nothing_ran_fails_the_run(tmp_path: Path):
    """An empty folder, or one whose tests are all skipped, is not green."""
    (tmp_path / "test_skipped.py").write_text("import pytest\ndef test_c(): pytest.skip('no')\n")
    done = run_with(f"{{'one': Part(30, tests={str(tmp_path)!r})}}")
    assert done.returncode == 1
    assert "no test passed" in done.stdout
    assert last_line(done) == "0 passed, 1 failed, 1 skipped"


def test_a_part_that_may_be_skipped_as_a_whole_is_green_when_it_is(tmp_path: Path):
    """GPU tests on a machine without a GPU: skipped, counted, and no failure."""
    (tmp_path / "test_skipped.py").write_text("import pytest\ndef test_c(): pytest.skip('no')\n")
    done = run_with(f"{{'one': Part(30, tests={str(tmp_path)!r}, may_skip_all=True)}}")
    assert done.returncode == 0
    assert last_line(done) == "0 passed, 0 failed, 1 skipped"


def test_a_part_over_its_limit_is_killed_and_fails(tmp_path: Path):
    """A command that hangs, and ignores SIGTERM, costs its limit and not the whole run."""
    script = tmp_path / "hang.sh"
    script.write_text("trap '' TERM\nwhile :; do sleep 0.1; done\n")
    begin = time.monotonic()
    done = run_with(f"{{'one': Part(1, ('sh {script}',)), 'two': Part(9, ('true',))}}")
    assert time.monotonic() - begin < 20
    assert done.returncode == 1
    assert "was killed at its time limit" in done.stdout
    assert last_line(done) == "0 passed, 1 failed, 0 skipped"


def test_a_process_left_behind_in_a_session_of_its_own_is_named_ended_and_fails_the_part(tmp_path: Path):
    """A daemon that a test forgot must not live on, even if it has left the test's process group."""
    note = tmp_path / "pid"
    script = tmp_path / "leave.sh"
    script.write_text(f"setsid sleep 60 >/dev/null 2>&1 & echo $! > {note}\n")
    done = run_with(f"{{'one': Part(30, ('sh {script}',))}}")
    assert done.returncode == 1
    assert "left a process behind" in done.stdout
    assert "sleep 60" in done.stdout
    assert not psutil.pid_exists(int(note.read_text()))


def test_nothing_runs_on_a_set_up_that_failed():
    """Errors of a missing environment would bury the one line that matters."""
    done = run_with("{'set-up': Part(9, ('false',)), 'check': Part(9, ('echo must-not-run',))}")
    assert done.returncode == 1
    assert "$ echo must-not-run" not in done.stdout
    assert "not run: set-up failed" in done.stdout
