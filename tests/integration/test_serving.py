"""The daemon's sockets under friends, strangers and fools: real sockets, the real serving code, arenas made by hand."""

import os
import socket
import stat
import struct
import subprocess
import sys
import threading
import time

import msgspec
import pytest

from tests.support import servers
from weightcache.daemon import connections, sessions, states
from weightcache.wire import evidence, frames, keys, protocol, reasons

PROOF = evidence.Evidence(cache_uid=servers.REF.uid)


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setattr(connections, "MESSAGE_SECONDS", 0.5)
    tensor = ("w", "U8", [1000], os.urandom(1000))
    arenas = [[servers.make_arena([tensor], device=f"host-{2 * g + r}") for r in range(2)] for g in range(2)]
    with servers.ArenaServer(tmp_path / "root", arenas) as running:
        yield running


class Talk:
    """A client that says exactly what it is told to."""

    def __init__(self, path, hello=True):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(str(path))
        self.descriptors = []
        if hello:
            self.welcome = self.ask(protocol.Hello(protocol=1, client=protocol.Client(name="t", namespace="n")))

    def ask(self, message):
        frames.send(self.socket, frames.encode(message), time.monotonic() + 5)
        return self.hear()

    def hear(self, seconds=5):
        body, found = frames.receive(self.socket, time.monotonic() + seconds, frames.ANSWER_LIMIT_BYTES)
        self.descriptors += found
        return frames.decode_answer(body)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()
        for descriptor in self.descriptors:
            os.close(descriptor)


def daemon_socket(server):
    return server.directory / "daemon.sock"


def rank_socket(server, index=0):
    return server.directory / f"{index:016x}.sock"


def rank_key(rank=0, **change):
    position = msgspec.structs.replace(servers.KEY.position, tensor_rank=rank)
    return msgspec.structs.replace(servers.KEY, position=position, **change)


def claim(talk, **change):
    return talk.ask(protocol.Claim(**{"key": servers.KEY, "proof": PROOF, **change}))


def eventually(check, seconds=5.0):
    limit = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < limit, "it did not become so"
        time.sleep(0.01)


# --- who gets what --------------------------------------------------------------------------------------------------
def test_a_claim_then_an_attach_gives_the_arena_and_counts_until_the_connection_ends(server):
    """The connection is the lease: nothing else is needed, and nothing outlives it (answers W25, W36)."""
    with Talk(daemon_socket(server)) as front, Talk(rank_socket(server)) as rank:
        assert (rank.welcome.gpu, front.welcome.gpu) == ("host-0", "")
        claimed = claim(front)
        assert isinstance(claimed, protocol.Claimed)
        assert (claimed.group, claimed.gpus, claimed.shared_with) == (0, ["host-0", "host-1"], 0)
        attached = rank.ask(protocol.Attach(key=rank_key(), proof=PROOF, token=claimed.token))
        assert isinstance(attached, protocol.Attached) and len(rank.descriptors) == 1
        with Talk(daemon_socket(server)) as watcher:
            (lease,) = watcher.ask(protocol.Status()).groups[0].ranks[0].leases
            assert (lease.client.name, lease.pid, lease.uid) == ("t", os.getpid(), os.getuid())
    with Talk(daemon_socket(server)) as watcher:
        eventually(lambda: not watcher.ask(protocol.Status()).groups[0].ranks[0].leases)
        assert watcher.ask(protocol.Status()).groups[0].claims == []


def test_two_engines_at_once_get_two_groups_and_the_third_is_told_who_holds_them(server):
    """No race gives one group to two engines."""
    talks, answers = [Talk(daemon_socket(server)) for _ in range(3)], []
    threads = [threading.Thread(target=lambda one=one: answers.append(claim(one))) for one in talks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    groups = sorted(answer.group for answer in answers if isinstance(answer, protocol.Claimed))
    (refused,) = [answer for answer in answers if isinstance(answer, protocol.Refused)]
    assert groups == [0, 1] and refused.reason == "GroupTaken" and "n/t (pid" in refused.message
    with Talk(daemon_socket(server)) as fourth:
        shared = claim(fourth, share=True)
        assert isinstance(shared, protocol.Claimed) and shared.shared_with == 1
    for one in talks:
        one.socket.close()


def test_an_attach_without_the_groups_token_is_refused(server):
    """Nobody maps a rank of a group that another engine holds, or with another group's token."""
    with Talk(daemon_socket(server)) as front, Talk(rank_socket(server, 2)) as other, Talk(rank_socket(server)) as bare:
        token = claim(front).token
        assert other.ask(protocol.Attach(key=rank_key(0), proof=PROOF, token=token)).reason == "ClaimRequired"
        assert bare.ask(protocol.Attach(key=rank_key(), proof=PROOF, token="x")).reason == "ClaimRequired"
        assert not other.descriptors and not bare.descriptors


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"tensor_size": 4}, "tensor_size"),
        ({"expert_placement": "round_robin"}, "expert_placement"),
        ({"moe_layout": "trtllm"}, "moe_layout"),
        ({"dtype": "float16"}, "dtype"),
        ({"role": "draft"}, "role"),
        ({"config": "other"}, "config"),
    ],
)
def test_a_wrong_key_is_told_every_field_and_maps_nothing(server, change, field):
    """The engine learns what to change; no descriptor leaves (answers W4, W5, W8, W9, W26)."""
    with Talk(daemon_socket(server)) as front, Talk(daemon_socket(server)) as good, Talk(rank_socket(server)) as rank:
        answer = claim(front, key=msgspec.structs.replace(servers.KEY, **change))
        assert [found.field for found in answer.differences] == [field]
        token = claim(good).token
        answer = rank.ask(protocol.Attach(key=rank_key(**change), proof=PROOF, token=token))
        assert isinstance(answer, protocol.KeyMismatch) and not rank.descriptors
        assert front.ask(protocol.Status()).misses[field] == 2


def test_another_rank_of_the_same_group_is_another_key(server):
    """Two jobs both have a rank 0: the socket is the GPU's, and the position is compared (answers W1)."""
    with Talk(daemon_socket(server)) as front, Talk(rank_socket(server, 1)) as rank:
        token = claim(front).token
        answer = rank.ask(protocol.Attach(key=rank_key(0), proof=PROOF, token=token))
        assert [(d.field, d.wanted, d.held) for d in answer.differences] == [("position.tensor_rank", "0", "1")]


def test_content_that_nothing_proves_is_asked_for_and_other_content_is_a_mismatch(server):
    """Equal shapes and settings with other bytes never attach (answers W3)."""
    with Talk(daemon_socket(server)) as front:
        assert isinstance(claim(front, proof=evidence.Evidence()), protocol.ContentUnproven)
        other = claim(front, proof=evidence.Evidence(digest="2" * 32))
        assert [found.field for found in other.differences] == ["content"] and "1" * 32 in other.differences[0].held
        assert isinstance(claim(front, proof=evidence.Evidence(digest="1" * 32)), protocol.Claimed)


def test_a_rank_that_fails_makes_its_group_not_ready_at_once(server):
    """The next question already meets it; the other group is served on (answers W37)."""
    rank = server.cache.groups[0].ranks[1]
    rank.state, rank.reason, rank.message = states.FAILED, "Damaged", "host-1: w differs"
    with Talk(daemon_socket(server)) as front:
        claimed = claim(front)
        assert claimed.group == 1
        waiting = claim_of_group(server, 0)
        assert (waiting.state, waiting.reason, waiting.message) == (states.FAILED, "Damaged", "host-1: w differs")


def claim_of_group(server, group):
    with Talk(daemon_socket(server)) as talk:
        return claim(talk, group=group)


def test_a_drain_refuses_new_claims_and_leaves_the_others_alone(server):
    """Existing holds live on; ranks of an engine that claimed before may still attach."""
    with Talk(daemon_socket(server)) as front, Talk(daemon_socket(server)) as admin, Talk(rank_socket(server)) as rank:
        token = claim(front).token
        assert admin.ask(protocol.Drain()).state == states.DRAINING
        assert isinstance(claim_of_group(server, None), protocol.Draining)
        attach = protocol.Attach(key=rank_key(), proof=PROOF, token=token)
        assert isinstance(rank.ask(attach), protocol.Attached)
        assert admin.ask(protocol.Resume()).state == states.READY
        assert claim_of_group(server, None).group == 1


def test_release_needs_the_key_and_no_leases(server):
    """One client must not empty the cache of all (answers W27)."""
    with Talk(daemon_socket(server)) as front, Talk(rank_socket(server)) as rank, Talk(daemon_socket(server)) as admin:
        token = claim(front).token
        rank.ask(protocol.Attach(key=rank_key(), proof=PROOF, token=token))
        digest = admin.ask(protocol.Status()).key_digest
        assert admin.ask(protocol.Release(key_digest="")).reason == "KeyMismatch"
        refused = admin.ask(protocol.Release(key_digest=digest))
        assert refused.reason == "LeasesOpen" and "n/t (pid" in refused.message


def test_rejoin_counts_the_lease_again_or_says_that_it_is_superseded(server):
    """After a lost connection the engine is counted under the generation it has mapped."""
    with Talk(rank_socket(server)) as same, Talk(rank_socket(server)) as older, Talk(daemon_socket(server)) as front:
        current = server.cache.groups[0].ranks[0].arena.generation
        rejoined = same.ask(protocol.Rejoin(generation=current, key=rank_key(), token=""))
        assert isinstance(rejoined, protocol.Rejoined)
        answer = older.ask(protocol.Rejoin(generation="f" * 16, key=rank_key(), token=""))
        assert isinstance(answer, protocol.Superseded) and answer.generation == current
        leases = front.ask(protocol.Status()).groups[0].ranks[0].leases
        assert {lease.generation for lease in leases} == {current, "f" * 16}
        assert claim(front).group == 1, "a superseded engine still sits on its GPUs"


def test_requests_on_the_wrong_socket_are_refused(server):
    """Attach belongs on a rank's socket, claims on the daemon's."""
    with Talk(daemon_socket(server)) as front:
        answer = front.ask(protocol.Attach(key=rank_key(), proof=PROOF, token=""))
        assert answer.reason == "ProtocolViolated" and "daemon socket, which takes Claim" in answer.message


# --- strangers and fools --------------------------------------------------------------------------------------------
def test_an_old_client_is_told_both_versions(server):
    """Upgrades must part with a clear text."""
    with Talk(daemon_socket(server), hello=False) as talk:
        answer = talk.ask(protocol.Hello(protocol=99, client=protocol.Client(version="9.9")))
        assert answer.reason == "ProtocolVersionMismatch" and "protocol 99 (weightcache 9.9)" in answer.message


def closes_within(talk, seconds):
    talk.socket.settimeout(seconds)
    try:
        while talk.socket.recv(65536):
            pass
        return True
    except ConnectionError:
        return True
    except TimeoutError:
        return False


def garbage(talk):
    talk.socket.sendall(b"GET / HTTP/1.1\r\n\r\n")


def two_gigabytes(talk):
    talk.socket.sendall(struct.pack(">I", 2 << 30))


def half_a_message(talk):
    talk.socket.sendall(struct.pack(">I", 100) + b"x" * 50)


def silence(talk):
    pass


def a_byte_at_a_time(talk):
    def trickle():
        try:
            for byte in struct.pack(">I", 100) + b"x" * 100:
                talk.socket.send(bytes([byte]))
                time.sleep(0.1)
        except OSError:
            return

    threading.Thread(target=trickle, daemon=True).start()


def wrong_first_message(talk):
    talk.socket.sendall(frames.encode(protocol.Status()))


@pytest.mark.parametrize(
    "behave", [garbage, two_gigabytes, half_a_message, silence, a_byte_at_a_time, wrong_first_message]
)
def test_a_bad_peer_is_dropped_by_its_deadline_and_holds_up_nobody(server, behave, monkeypatch):
    """Each gets at most one message's time; a good client beside it is served before that (answers W34)."""
    monkeypatch.setattr(connections, "MESSAGE_SECONDS", 2.0)
    with Talk(daemon_socket(server), hello=False) as bad:
        behave(bad)
        began = time.monotonic()
        with Talk(daemon_socket(server)) as good:
            assert isinstance(good.ask(protocol.Status()), protocol.DaemonStatus)
        assert time.monotonic() - began < 1.9, "a bad peer held up a good one for its whole deadline"
        assert closes_within(bad, 8.0), "a bad peer was kept"


def test_a_connection_that_asks_nothing_is_dropped_but_a_claim_may_be_silent(server, monkeypatch):
    """Idle strangers do not pile up; an engine's claim is silent for weeks."""
    monkeypatch.setattr(sessions, "IDLE_SECONDS", 0.3)
    with Talk(daemon_socket(server)) as idle, Talk(daemon_socket(server)) as holder:
        assert isinstance(claim(holder), protocol.Claimed)
        assert closes_within(idle, 3.0)
        time.sleep(0.5)
        holder.socket.settimeout(0.2)
        with pytest.raises(TimeoutError):
            holder.socket.recv(1)
        with Talk(daemon_socket(server)) as watcher:
            assert len(watcher.ask(protocol.Status()).groups[0].claims) == 1


def test_two_hundred_clients_at_once_are_all_answered(server):
    """A node's worth of engines and probes, none behind another (answers W34)."""
    talks = [Talk(daemon_socket(server)) for _ in range(200)]
    for talk in talks:
        frames.send(talk.socket, frames.encode(protocol.Status()), time.monotonic() + 5)
    answers = [talk.hear() for talk in talks]
    assert len(answers) == 200 and {answer.state for answer in answers} == {states.READY}
    for talk in talks:
        talk.socket.close()


def test_a_reader_that_never_reads_does_not_hold_the_arena_or_the_server(server):
    """A stalled engine's answer is given up; its descriptors do not pile up in the daemon."""
    before = len(os.listdir("/proc/self/fd"))
    with Talk(rank_socket(server), hello=False) as stalled:
        for _ in range(2000):
            try:
                stalled.socket.settimeout(0.05)
                stalled.socket.sendall(frames.encode(protocol.Hello(protocol=1, client=protocol.Client())))
            except OSError:
                break
        with Talk(daemon_socket(server)) as good:
            assert isinstance(good.ask(protocol.Status()), protocol.DaemonStatus)
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= before)


# --- files ----------------------------------------------------------------------------------------------------------
def test_sockets_appear_by_rename_with_the_groups_rights_only(server):
    """0660 and no temporary names left (answers W33)."""
    names = sorted(entry.name for entry in server.directory.iterdir() if ".sock" in entry.name)
    assert names == sorted([*(f"{index:016x}.sock" for index in range(4)), "daemon.sock"])
    for name in names:
        assert stat.S_IMODE((server.directory / name).stat().st_mode) == 0o660


def test_a_second_listener_takes_over_without_a_moment_of_absence(tmp_path):
    """A restarting daemon's socket is there before and after, and old connections stay open (answers K19)."""
    path = str(tmp_path / "x.sock")
    first = connections.listen(path, 0o600)
    client = socket.socket(socket.AF_UNIX)
    client.connect(path)
    second = connections.listen(path, 0o600)
    assert client.send(b"still open") == 10
    late = socket.socket(socket.AF_UNIX)
    late.connect(path)
    first.setblocking(True)
    second.setblocking(True)
    second.settimeout(2)
    second.accept()[0].close()
    for one in (first, second, client, late):
        one.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="another uid needs root")
def test_a_stranger_of_the_socket_group_may_not_order_drain_or_release(server):
    """Group members may map; only root and the daemon's uid control (answers W27)."""
    os.chmod(server.root.path, 0o755)
    script = (
        "import os,sys,time,socket\n"
        "from weightcache.wire import frames, protocol\n"
        "os.setresgid(0,0,0); os.setresuid(65534,65534,65534)\n"
        "s=socket.socket(socket.AF_UNIX); s.connect(sys.argv[1])\n"
        "def ask(m):\n"
        "    frames.send(s, frames.encode(m), time.monotonic()+5)\n"
        "    return frames.decode_answer(frames.receive(s, time.monotonic()+5, 1<<20)[0])\n"
        "ask(protocol.Hello(protocol=1, client=protocol.Client()))\n"
        "for m in (protocol.Drain(), protocol.Resume(), protocol.Release(key_digest='x', force=True)):\n"
        "    print(ask(m).reason)\n"
        "print(type(ask(protocol.Status())).__name__)\n"
    )
    for path in (server.root.path, *server.root.path.parents):
        if str(path).startswith("/tmp/") and path != path.parent:
            os.chmod(path, path.stat().st_mode | 0o055)
    run = subprocess.run(
        [sys.executable, "-c", script, str(daemon_socket(server))],
        check=False,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert run.stdout.split() == ["Forbidden"] * 3 + ["DaemonStatus"], run.stderr


def test_every_reason_has_a_meaning_and_an_exit_code_of_its_own():
    """A reason without a next step, or two with one code, leave people guessing."""
    assert set(reasons.MEANINGS) == set(reasons.Reason)
    codes = [meaning.exit_code for meaning in reasons.MEANINGS.values()]
    assert len(set(codes)) == len(codes) and all(2 <= code < 126 for code in codes)
    assert all(meaning.meaning and meaning.next_step for meaning in reasons.MEANINGS.values())


def test_keys_travel_unchanged(server):
    """What status shows is the key that is compared."""
    with Talk(daemon_socket(server)) as watcher:
        status = watcher.ask(protocol.Status())
        assert status.key == msgspec.structs.replace(rank_key(), content="1" * 32)
        assert status.key_digest == keys.key_digest(status.key)
