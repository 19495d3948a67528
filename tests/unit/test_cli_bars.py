"""A daemon's life on a terminal: bars for what moves, lines for what happened."""

import io

from weightcache.cli import bars

MIB = 2**20


def test_what_happened_is_a_line_and_stays():
    """Bars vanish; the reason why a rank failed must not vanish with them."""
    stream = io.StringIO()
    with bars.Bars(stream) as observe:
        observe("starting", cache="default/x", model="/m")
        observe("phase", group=0, rank=1, state="WaitingForGate", detail="slot 0: default/y")
        observe("phase", group=0, rank=1, state="Reading", detail="")
        observe(
            "progress", group=0, rank=1, done_bytes=MIB, total_bytes=2 * MIB, per_second_bytes=MIB, left_seconds=1.0
        )
        observe("rank-failed", group=0, rank=1, reason="LoaderDied", message="killed [by] SIGKILL")
        observe("stopped", cache="x")
    said = stream.getvalue()
    assert "starting cache=default/x model=/m\n" in said
    assert 'rank-failed group=0 rank=1 reason=LoaderDied message="killed [by] SIGKILL"\n' in said
    assert "stopped cache=x\n" in said


def test_a_rank_that_is_done_has_no_bar():
    """A bar that stays at 100 % while the daemon serves for days says nothing."""
    observe = bars.Bars(io.StringIO())
    observe("phase", group=0, rank=0, state="Reading", detail="")
    observe("phase", group=0, rank=1, state="Reading", detail="")
    assert len(observe._progress.tasks) == 2
    observe("rank-ready", group=0, rank=0)
    assert [task.fields["where"] for task in observe._progress.tasks] == ["group 0 rank 1"]
    observe("refused", reason="CheckpointChanged", message="m", next_step="n", code=23)
    assert observe._progress.tasks == []


def test_the_figures_are_bytes_rate_and_time_left():
    """What a person who waits looks for."""
    observe = bars.Bars(io.StringIO())
    observe("progress", group=0, rank=0, done_bytes=MIB, total_bytes=4 * MIB, per_second_bytes=MIB, left_seconds=3.0)
    (task,) = observe._progress.tasks
    assert bars._Figures().render(task).plain == "1.00 MiB of 4.00 MiB  1.00 MiB/s  3.0 s left"
    observe("phase", group=0, rank=0, state="WaitingForGate", detail="slot 0: default/y")
    assert bars._Figures().render(task).plain == "slot 0: default/y"
