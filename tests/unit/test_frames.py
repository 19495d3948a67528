"""Frames: whole messages within one deadline, descriptors with them, and nothing allocated on a stranger's word."""

import os
import socket
import threading
import time

import pytest

from weightcache.wire import frames, protocol, reasons

HELLO = protocol.Hello(protocol=1, client=protocol.Client(name="x"))


@pytest.fixture
def pair():
    left, right = socket.socketpair()
    with left, right:
        yield left, right


def soon(seconds=2.0):
    return time.monotonic() + seconds


def test_a_message_and_its_descriptors_arrive_whole(pair, tmp_path):
    """The way an arena travels: a megabyte of manifest and its descriptors."""
    paths = [tmp_path / name for name in "abc"]
    for path in paths:
        path.write_text(path.name)
    descriptors = [os.open(path, os.O_RDONLY) for path in paths]
    attached = protocol.Attached(
        manifest=bytes(1 << 20), memory="Host", gpu="host-0", chunk_sizes=[1], generation="g", lease="l"
    )
    sender = threading.Thread(target=frames.send, args=(pair[0], frames.encode(attached), soon(), descriptors))
    sender.start()
    body, received = frames.receive(pair[1], soon(), frames.ANSWER_LIMIT_BYTES)
    sender.join()
    assert frames.decode_answer(body) == attached
    assert [os.pread(descriptor, 10, 0).decode() for descriptor in received] == ["a", "b", "c"]
    assert not any(os.get_inheritable(descriptor) for descriptor in received)
    for descriptor in descriptors + received:
        os.close(descriptor)


def test_a_length_of_two_gigabytes_is_refused_before_anything_is_allocated(pair):
    """A stranger's four bytes must not cost memory (answers W34)."""
    pair[0].sendall(frames.LENGTH.pack(2 << 30))
    with pytest.raises(reasons.Refusal, match="2147483648 bytes, the limit is 1048576") as caught:
        frames.receive(pair[1], soon(), frames.REQUEST_LIMIT_BYTES)
    assert caught.value.reason is reasons.Reason.ProtocolViolated


def test_a_trickling_peer_meets_the_deadline_of_the_whole_message(pair):
    """A byte at a time resets no clock (answers W34)."""
    frame = frames.encode(HELLO)

    def trickle():
        for byte in frame:
            try:
                pair[0].send(bytes([byte]))
            except OSError:
                return
            time.sleep(0.05)

    thread = threading.Thread(target=trickle)
    thread.start()
    with pytest.raises(reasons.Refusal) as caught:
        frames.receive(pair[1], soon(0.2), 1000)
    assert caught.value.reason is reasons.Reason.DeadlineExceeded
    pair[1].close()
    thread.join()


def test_a_reader_that_never_reads_meets_the_senders_deadline(pair):
    """A stalled peer must not hold the sender."""
    with pytest.raises(reasons.Refusal) as caught:
        frames.send(pair[0], bytes(64 << 20), soon(0.2))
    assert caught.value.reason is reasons.Reason.DeadlineExceeded


def test_half_a_message_is_an_error_that_says_how_much_came(pair):
    """The peer died in mid-sentence."""
    pair[0].sendall(frames.LENGTH.pack(100) + bytes(40))
    pair[0].close()
    with pytest.raises(reasons.Refusal, match="40 of 100") as caught:
        frames.receive(pair[1], soon(), 1000)
    assert caught.value.reason is reasons.Reason.DaemonUnreachable


def test_descriptors_that_came_with_a_broken_message_are_closed(pair, tmp_path):
    """A bad peer must not fill this process' descriptor table."""
    before = set(os.listdir("/proc/self/fd"))
    (tmp_path / "f").touch()
    descriptor = os.open(tmp_path / "f", os.O_RDONLY)
    socket.send_fds(pair[0], [frames.LENGTH.pack(2 << 30)], [descriptor])
    os.close(descriptor)
    with pytest.raises(reasons.Refusal):
        frames.receive(pair[1], soon(), 1000)
    assert set(os.listdir("/proc/self/fd")) == before


def test_more_descriptors_than_linux_passes_are_refused_here():
    """SCM_MAX_FD is 253: the kernel would drop the rest, silently."""
    with socket.socket(socket.AF_UNIX) as sock, pytest.raises(reasons.Refusal, match="254 descriptors"):
        frames.send(sock, b"x", soon(), range(254))


def test_an_unknown_field_or_message_is_refused():
    """What the other end means and this end ignores is a misunderstanding."""
    import msgspec

    body = msgspec.msgpack.encode({"type": "Status", "extra": 1})
    with pytest.raises(reasons.Refusal, match="extra"):
        frames.decode_request(body)
    with pytest.raises(reasons.Refusal, match="Nonsense"):
        frames.decode_request(msgspec.msgpack.encode({"type": "Nonsense"}))
