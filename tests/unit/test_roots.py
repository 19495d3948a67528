"""Names, lengths and modes below the root: what can be decided without touching a disk."""

import stat
from pathlib import Path

import pytest

from weightcache.daemon import directories, roots
from weightcache.wire import reasons

UID = "01234567-89ab-cdef-0123-456789abcdef"
GPU = "GPU-fedcba98-7654-3210-0123-456789abcdef"
TOP, LOCKS, SOCKETS = directories.Kind.Top, directories.Kind.Locks, directories.Kind.Sockets


def test_a_rank_socket_is_named_by_the_gpu_and_by_nothing_else():
    """Two jobs that both have a rank 0 must not meet on one socket (answers W1, W2)."""
    assert roots.rank_socket_name(GPU) == "fedcba9876543210.sock"
    assert roots.rank_socket_name("host-3") == "0000000000000003.sock"
    assert roots.rank_socket_name("host-10") == "000000000000000a.sock"


@pytest.mark.parametrize("name", ["0", "3", "cuda:0", "GPU-", "GPU-12", "MIG-fedcba98-7654-3210", "host-", "host--1"])
def test_an_ordinal_or_a_slice_has_no_socket_name(name):
    """An ordinal means another GPU in the next process (answers W2)."""
    with pytest.raises(ValueError, match="neither a GPU's UUID nor a host slot"):
        roots.rank_socket_name(name)


def test_a_cache_directory_is_named_by_the_uid():
    """A cache deleted and made again under one name gets a directory of its own (answers K9)."""
    root = roots.Root(Path("/run/weightcache"))
    assert roots.cache_directory(root, UID) == Path("/run/weightcache/s/0123456789")
    assert roots.short_uid(UID.upper()) == "0123456789"
    for bad in ("", "0123", "../../etc/passwd", "0123456789/x"):
        with pytest.raises(ValueError, match="not a UUID"):
            roots.short_uid(bad)


def test_a_socket_path_over_107_bytes_is_refused_with_its_length():
    """The kernel would say "invalid argument", and say it late (answers K20)."""
    # <root>/s/<10>/<16>.sock.new: 3 + 10 + 1 + 25 bytes come after the root.
    longest = Path("/" + "r" * (107 - 39 - 1))
    roots.check_socket_paths(roots.Root(longest), UID, [GPU, "host-0"])
    with pytest.raises(reasons.Refusal) as caught:
        roots.check_socket_paths(roots.Root(Path(f"{longest}x")), UID, [GPU])
    assert caught.value.reason is reasons.Reason.SocketPathTooLong
    assert f"{longest}x/s/0123456789/fedcba9876543210.sock.new: 108 bytes, 107" in caught.value.message
    assert "by 1 bytes" in caught.value.message


def test_the_length_of_a_socket_path_is_counted_in_bytes():
    """A letter is not always a byte."""
    root = roots.Root(Path("/" + "ü" * 34))  # 69 bytes: 108 in all, though 74 letters
    with pytest.raises(reasons.Refusal, match="108 bytes"):
        roots.check_socket_paths(root, UID, [GPU])


@pytest.mark.parametrize(
    ("kind", "mode"),
    [(TOP, 0o755), (TOP, 0o700), (LOCKS, 0o2770), (LOCKS, 0o700), (SOCKETS, 0o2755), (SOCKETS, 0o3775)],
)
def test_the_modes_of_the_layout_are_allowed(kind, mode):
    """What prepare makes must pass the check of every daemon."""
    assert directories.mode_fault(kind, mode) == ""


@pytest.mark.parametrize(
    ("kind", "mode", "wanted"),
    [
        (TOP, 0o775, "0755"),
        (TOP, 0o757, "0755"),
        (TOP, 0o1777, "0755"),
        (LOCKS, 0o2771, "2770"),
        (LOCKS, 0o2774, "2770"),
        (LOCKS, 0o777, "2770"),
        (LOCKS, 0o770, "set-group-ID"),
        (SOCKETS, 0o2757, "2755"),
        (SOCKETS, 0o2775, "sticky"),
    ],
)
def test_a_mode_that_lets_a_stranger_in_is_named_with_what_was_wanted(kind, mode, wanted):
    """An engine that may open a lock file may hold a GPU's lock for ever."""
    fault = directories.mode_fault(kind, mode)
    assert f"mode {mode:04o}, wanted" in fault
    assert wanted in fault


def test_every_mode_that_passes_keeps_strangers_out():
    """The rule itself, over all 4096 modes, said in another way than the code does."""
    for mode in range(0o10000):
        others_write, group_writes = bool(mode & stat.S_IWOTH), bool(mode & stat.S_IWGRP)
        if not directories.mode_fault(TOP, mode):
            assert not others_write
            assert not group_writes
        if not directories.mode_fault(LOCKS, mode):
            assert not mode & stat.S_IRWXO
        if not directories.mode_fault(SOCKETS, mode):
            assert not others_write
            assert mode & stat.S_ISVTX or not group_writes
