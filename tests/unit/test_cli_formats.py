"""Figures as people read them."""

import pytest

from weightcache.cli import formats


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-3, "0.0 s"),
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 m 00 s"),
        (185, "3 m 05 s"),
        (7199.7, "2 h 00 m"),
        (7800, "2 h 10 m"),
        (90000, "1 d 01 h"),
        (40 * 86400, "40 d 00 h"),
    ],
)
def test_durations_have_their_two_largest_units(seconds, text):
    """An hour must not read as 3600 s, nor a second as 0 m."""
    assert formats.duration(seconds) == text


@pytest.mark.parametrize(
    ("done", "total", "text"),
    [
        (0, 10, "────"),
        (9.99, 10, "━━━─"),
        (10, 10, "━━━━"),
        (5, 10, "━━──"),
        (20, 10, "━━━━"),
        (0, 0, "────"),
    ],
)
def test_a_bar_is_full_only_when_all_is_done(done, total, text):
    """A full bar beside a loader that still reads would be a lie; more than all must not break the table."""
    assert formats.bar(done, total, 4) == text


def test_gpus_are_shortened_and_host_slots_are_not():
    """The first group tells the GPUs of a node apart; a slot's number is all there is."""
    assert formats.short_device("GPU-5f6a1234-1111-2222-3333-444455556666") == "GPU-5f6a1234"
    assert formats.short_device("host-12") == "host-12"
