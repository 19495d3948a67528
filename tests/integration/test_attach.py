"""Attaching: real sockets, the daemon's serving code; what an engine gets, is refused, and keeps when others die."""

import asyncio
import gc
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import types

import msgspec
import pytest
import torch

from tests.support import servers
from weightcache.daemon import roots, states
from weightcache.engine import attaching, claims, connecting, leases, proving
from weightcache.wire import digests, evidence, keys, protocol, reasons

KEY, UID = servers.KEY, servers.REF.uid
WEIGHT = struct.pack("<6f", 1, 2, 3, 4, 5, 6)
TENSORS = [("embed", "F32", [2, 3], WEIGHT), ("norm", "BF16", [2], b"\x80\x3f\x00\x40"), ("empty", "I8", [0], b"")]
NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be two users")


def arena(device="host-0", generation="a" * 16, tensors=TENSORS):
    """A small arena with a tied head and kernel metadata."""
    return servers.make_arena(
        tensors, device=device, generation=generation, aliases={"head": "embed"}, metadata={"alpha": [0.5]}
    )


@pytest.fixture
def server(tmp_path):
    """One group of one rank, ready."""
    with servers.ArenaServer(tmp_path / "root", [[arena()]]) as running:
        yield running


@pytest.fixture
def pair(tmp_path):
    """One group of two ranks; rank 1's weights are the double of rank 0's."""
    doubled = [("embed", "F32", [2, 3], struct.pack("<6f", 2, 4, 6, 8, 10, 12)), *TENSORS[1:]]
    with servers.ArenaServer(tmp_path / "root", [[arena(), arena("host-1", tensors=doubled)]]) as running:
        yield running


@pytest.fixture(autouse=True)
def nothing_left_open():
    """Whatever a test does, every descriptor of an arena or a connection is closed again."""
    before = open_things()
    yield
    until(lambda: gc.collect() >= 0 and open_things() <= before)


def open_things():
    """How many arenas and sockets this process has open."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{name}").startswith(("/memfd:weightcache", "socket:"))
        except OSError:
            continue
    return found


def until(condition, seconds=10.0):
    """Wait for what another thread does."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def attach(server, key=KEY, **options):
    """Attach with the evidence of an engine that has no weight files."""
    options = {"cache_uid": UID, **options}
    return attaching.attach(server.directory, key, **options)


def refusal(server, key=KEY, **options):
    """The refusal of an attach that must map nothing and leave no lease."""
    maps = arenas_mapped()
    with pytest.raises(reasons.Refusal) as caught:
        attach(server, key, **options)
    assert arenas_mapped() == maps
    until(lambda: not server.cache.groups or not holders(server))
    return caught.value


def arenas_mapped():
    """How many arenas this process has mapped."""
    with open("/proc/self/maps") as maps:
        return sum("memfd:weightcache" in line for line in maps)


def holders(server):
    """Every lease and claim that the server counts."""
    return [lease for group in server.cache.groups for lease in group.holders()]


# --- what an engine gets ----------------------------------------------------------------------------------------------
def test_an_engine_gets_the_bytes_that_were_put_and_their_metadata(server):
    """The main thing: values, shapes, dtypes, aliases and kernel metadata, by the attached path (answers W24)."""
    with attach(server) as attached:
        assert attached.tensors["embed"].tolist() == [[1, 2, 3], [4, 5, 6]]
        assert attached.tensors["norm"].dtype == torch.bfloat16 and attached.tensors["norm"].tolist() == [1, 2]
        assert attached.tensors["empty"].shape == (0,)
        assert attached.tensors["head"] is attached.tensors["embed"]
        assert attached.metadata == {"alpha": [0.5]}
        assert (attached.path, attached.gpu, attached.generation) == ("attached", "host-0", "a" * 16)


def test_the_by_name_link_leads_to_the_cache(server):
    """Manifests are written before a UID exists."""
    link = server.root.by_name_directory / "default" / "served"
    with attaching.attach(link, KEY, cache_uid=UID) as attached:
        assert attached.tensors["embed"].sum().item() == 21


def test_each_rank_gets_its_own_weights_by_its_position(pair):
    """Rank 1 must not map rank 0's weights, which have the same shapes (answers W1)."""
    with claims.claim(pair.directory, KEY, cache_uid=UID) as claim:
        for rank in (1, 0):
            key = msgspec.structs.replace(KEY, tensor_size=1, position=keys.Position(tensor_rank=rank))
            with attaching.attach(pair.directory, key, claim=claim) as attached:
                assert attached.tensors["embed"].sum().item() == 21 * (rank + 1)
                assert attached.gpu == claim.gpus[rank]


def test_a_claim_travels_as_plain_data(pair):
    """The front end claims, and its workers are other processes: a ticket in any form is enough."""
    with claims.claim(pair.directory, KEY, cache_uid=UID) as claim:
        ticket = msgspec.json.decode(msgspec.json.encode(claim.ticket), type=claims.Ticket)
        with attaching.attach(pair.directory, KEY, claim=ticket) as attached:
            assert attached.gpu == "host-0"


def test_a_claim_ends_with_its_connection_and_the_lease_does_not(server):
    """A front end that ends must not take the weights from its ranks, nor hold the group for ever."""
    claim = claims.claim(server.directory, KEY, cache_uid=UID)
    attached = attaching.attach(server.directory, KEY, claim=claim)
    claim.close()
    until(lambda: [lease.identity for lease in holders(server)] == [attached.lease.identity])
    attached.close()
    until(lambda: not holders(server))


def test_the_lease_says_who_it_is(server):
    """Someone who looks for what holds the memory finds a pod, not a number."""
    client = protocol.Client(name="engine-0", namespace="prod", pod_uid="u", pid=1, version="v")
    with attach(server, client=client):
        assert [lease.client for lease in holders(server)] == [client]


def test_dropping_the_object_keeps_the_lease(server):
    """An engine that keeps only the tensors uses the memory all the same."""
    lease = attach(server).lease
    gc.collect()
    assert [held.identity for held in holders(server)] == [lease.identity]
    lease.close()


def test_tensors_outlive_close_and_the_last_one_frees_the_memory(server):
    """Never a dangling pointer: the lease ends at once, the memory with its last tensor."""
    maps = arenas_mapped()
    attached = attach(server)
    kept = attached.tensors["embed"]
    attached.close()
    attached.close()
    until(lambda: not holders(server))
    gc.collect()
    assert kept.tolist() == [[1, 2, 3], [4, 5, 6]] and arenas_mapped() == maps + 1
    assert attached.tensors == {} and attached.state is leases.State.Closed
    del kept
    gc.collect()
    assert arenas_mapped() == maps


def test_many_attaches_at_once_get_the_same_weights(server):
    """Clients are served side by side; a serial holder made the eighth engine wait 0.7 s."""
    found = []

    def one():
        with attach(server, share=True) as attached:
            found.append(attached.tensors["embed"].sum().item())

    threads = [threading.Thread(target=one) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [21] * 20


def test_a_write_ends_the_writer_and_harms_nobody(server, tmp_path):
    """One engine must not change the weights under the others (answers W20, W30)."""
    script = (
        "import sys; from tests.support import servers; from weightcache.engine import attaching\n"
        "found = attaching.attach(sys.argv[1], servers.KEY, cache_uid=servers.REF.uid, share=True)\n"
        "print('attached', flush=True); found.tensors['embed'].fill_(9)\n"
    )
    with attach(server) as attached:
        done = subprocess.run(
            [sys.executable, "-c", script, str(server.directory)],
            stdout=subprocess.PIPE,
            text=True,
            check=False,
            timeout=60,
        )
        assert (done.stdout, done.returncode) == ("attached\n", -signal.SIGSEGV)
        assert attached.tensors["embed"].sum().item() == 21
        assert attached.damaged() == []


# --- what it is refused -----------------------------------------------------------------------------------------------
def test_a_mismatch_lists_every_field_with_both_values_and_the_remedy(server):
    """Nobody should have to find the second difference after mending the first (answers W4, W5, W8)."""
    key = msgspec.structs.replace(KEY, tensor_size=2, moe_layout="trtllm", position=keys.Position(experts="0-3"))
    found = refusal(server, key)
    assert isinstance(found, attaching.KeyMismatch)
    assert [(row.field, row.wanted, row.held) for row in found.differences] == [
        ("tensor_size", "2", "1"),
        ("moe_layout", "trtllm", "(none)"),
    ]
    assert "tensor_size  2       1       make parallelism.tensor and" in found.message
    assert "nothing was mapped" in found.message and str(server.directory) in found.message


def test_a_rank_that_differs_in_position_alone_is_refused(server):
    """The claim is about the group, so the attach has to compare the position (answers W5)."""
    found = refusal(server, msgspec.structs.replace(KEY, position=keys.Position(experts="0-3")))
    assert [row.field for row in found.differences] == ["position.experts"]


def test_a_rank_beyond_the_group_is_refused(server):
    """Two ranks wanted, one there: no socket is guessed."""
    found = refusal(server, msgspec.structs.replace(KEY, position=keys.Position(tensor_rank=1)))
    assert "rank 1 was asked for, group 0 has 1" in found.message


def test_a_socket_under_another_ranks_name_is_refused_before_mapping(pair):
    """A directory put together wrongly leads to a live rank with equal shapes: the UUID tells (answers W1, W2)."""
    first, second = (pair.directory / roots.rank_socket_name(f"host-{rank}") for rank in (0, 1))
    first.rename(first.with_suffix(".swap"))
    second.rename(first)
    first.with_suffix(".swap").rename(second)
    key = msgspec.structs.replace(KEY, position=keys.Position(tensor_rank=1))
    pair.cache.groups[0].ranks[0].key = key  # only the UUID is left to tell them apart
    found = refusal(pair, key)
    assert found.reason is reasons.Reason.ArenaInvalid
    assert "the claim gave this rank host-1, the socket belongs to host-0" in found.message


def test_a_manifest_larger_than_the_memory_is_refused(server):
    """Views beyond the arena would show the next mapping's bytes."""
    rank = server.cache.groups[0].ranks[0]
    small = servers.make_arena([("embed", "U8", [1], b"x")])
    held = msgspec.msgpack.decode(rank.arena.manifest)
    manifest = msgspec.msgpack.encode({**held, "arena_bytes": 1 << 20})
    os.close(rank.arena.descriptors[0])
    rank.arena = type(small)(**{**small.__dict__, "manifest": manifest})
    found = refusal(server)
    assert found.reason is reasons.Reason.ArenaInvalid
    assert "chunks of 4096 bytes (1) cannot hold the 1048576 bytes" in found.message


def test_another_number_of_descriptors_is_refused(server):
    """A dropped descriptor must not shift the others."""
    server.cache.groups[0].ranks[0].arena.chunk_sizes.append(4096)
    assert "1 descriptors came for 2 chunks of host-0" in refusal(server).message


def test_damaged_bytes_are_found_when_asked_for(server):
    """`verify` recomputes every digest over what was mapped; the damaged tensor is named."""
    rank = server.cache.groups[0].ranks[0]
    other = arena(tensors=[("embed", "F32", [2, 3], WEIGHT[:-1] + b"\0"), *TENSORS[1:]])
    os.close(rank.arena.descriptors[0])
    rank.arena = type(other)(**{**other.__dict__, "manifest": rank.arena.manifest})
    found = refusal(server, verify=True)
    assert found.reason is reasons.Reason.Damaged
    assert "1 of 3 tensors differ from their digests: embed;" in found.message


def test_sound_bytes_pass_verification(server):
    """The other half of the promise."""
    with attach(server, verify=True) as attached:
        assert attached.timings.verify > 0


def test_a_taken_group_is_refused_with_its_holder_and_shared_on_request(server):
    """Two engines never get one group by a race; sharing is said out loud (answers W35)."""
    with attach(server, client=protocol.Client(name="first", namespace="prod")):
        with pytest.raises(reasons.Refusal, match=r"GroupTaken: .*prod/first"):
            attach(server)
        with attach(server, share=True) as second:
            assert second.tensors["embed"].sum().item() == 21


def test_only_groups_on_visible_gpus_count(server):
    """An engine that cannot see the GPU must not be given it."""
    assert refusal(server, gpus=["host-7"]).reason is reasons.Reason.GPUsNotVisible
    with attach(server, gpus=["host-0", "host-7"]) as attached:
        assert attached.gpu == "host-0"


def test_an_attach_without_anything_to_prove_content_is_refused(server):
    """Equal shapes are no proof (answers W3)."""
    with pytest.raises(reasons.Refusal, match="SettingsInvalid: nothing proves which weights are meant"):
        attaching.attach(server.directory, KEY)


def test_another_caches_uid_is_refused(server):
    """A pod that names a cache which was deleted and made again must not get the new one's weights (answers K9)."""
    assert [row.field for row in refusal(server, cache_uid="f" * 36).differences] == ["content"]


# --- evidence ---------------------------------------------------------------------------------------------------------
@pytest.fixture
def checkpoint(tmp_path):
    """Two weight files and an index that names them."""
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    (directory / "a.safetensors").write_bytes(os.urandom(5000))
    (directory / "b.safetensors").write_bytes(os.urandom(9000))
    (directory / "model.safetensors.index.json").write_bytes(
        msgspec.json.encode({"metadata": {}, "weight_map": {"x": "b.safetensors", "y": "a.safetensors"}})
    )
    return directory


def content_of(directory, settled=True):
    """What a daemon that read ``directory`` holds."""
    files = []
    for name in ("a.safetensors", "b.safetensors"):
        stat = evidence.file_stat(directory / name)
        digest = digests.digest_of_file(directory / name)
        files.append(evidence.HeldFile(name=name, stat=stat, settled=settled, blob="", digest=digest))
    rows = [digests.FileDigest(file.name, file.stat.size_bytes, file.digest) for file in files]
    return evidence.HeldContent(digest=digests.digest_of_checkpoint(rows), files=files, cache_uid=UID)


def attach_with(checkpoint, content, tmp_path, **options):
    """Attach with a checkpoint as evidence to a server that holds ``content``; the sum of the first tensor."""
    with (
        servers.ArenaServer(tmp_path / "root", [[arena()]], content=content) as server,
        attach(server, cache_uid="", checkpoint=checkpoint, **options) as attached,
    ):
        return attached.tensors["embed"].sum().item()


def test_the_same_files_are_proven_by_their_stat_alone(checkpoint, tmp_path, monkeypatch):
    """The usual case reads no weight byte."""
    monkeypatch.setattr(proving.Prover, "strengthen", None)
    assert attach_with(checkpoint, content_of(checkpoint), tmp_path) == 21


def test_a_copy_of_the_checkpoint_is_proven_by_its_full_digest(checkpoint, tmp_path):
    """Other inodes prove nothing, so the bytes are read; once, where the stat can be trusted."""
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    store = evidence.DigestStore(tmp_path / "store")
    assert attach_with(copy, content_of(checkpoint), tmp_path, digest_store=store) == 21


def test_files_too_young_to_trust_are_proven_by_their_full_digest(checkpoint, tmp_path):
    """The daemon read them within the clock's granularity of a write (answers W3)."""
    store = evidence.DigestStore(tmp_path / "store")
    assert attach_with(checkpoint, content_of(checkpoint, settled=False), tmp_path, digest_store=store) == 21


def test_one_changed_byte_is_a_mismatch_of_content(checkpoint, tmp_path):
    """Same names, sizes and headers, other weights: nothing is mapped (answers W3)."""
    content = content_of(checkpoint)
    with open(checkpoint / "a.safetensors", "r+b") as file:
        first = file.read(1)
        file.seek(0)
        file.write(bytes([first[0] ^ 1]))
    maps = arenas_mapped()
    with pytest.raises(attaching.KeyMismatch) as caught:
        attach_with(checkpoint, content, tmp_path, digest_store=evidence.DigestStore(tmp_path / "store"))
    assert [row.field for row in caught.value.differences] == ["content"] and arenas_mapped() == maps


def test_a_full_digest_is_kept_for_the_next_start(checkpoint, tmp_path, monkeypatch):
    """Reading 400 GB once is a nuisance, at every start it would cost what the cache was to save."""
    monkeypatch.setattr(evidence, "is_settled", lambda stat, taken_at=None: True)
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert attach_with(copy, content_of(checkpoint), tmp_path) == 21
    monkeypatch.setattr(digests, "digest_of_file", None)
    assert attach_with(copy, content_of_stored(content=tmp_path / "cache", copy=copy), tmp_path) == 21


def content_of_stored(content, copy):
    """A daemon's view of the same bytes under other inodes, without computing a digest again."""
    store = evidence.DigestStore(content / "weightcache" / "digests")
    names = ("a.safetensors", "b.safetensors")
    digest = evidence.checkpoint_digest(copy, names, store)
    files = [
        evidence.HeldFile(
            name=name,
            stat=msgspec.structs.replace(evidence.file_stat(copy / name), inode=1),
            settled=True,
            blob="",
            digest=store.digest_of(copy / name),
        )
        for name in names
    ]
    return evidence.HeldContent(digest=digest, files=files, cache_uid=UID)


def test_a_missing_checkpoint_is_refused_by_its_path(server, tmp_path):
    """A typing error in a path is not a mismatch."""
    found = refusal(server, cache_uid="", checkpoint=tmp_path / "nowhere")
    assert found.reason is reasons.Reason.CheckpointNotFound and str(tmp_path / "nowhere") in found.message


# --- waiting ----------------------------------------------------------------------------------------------------------
def test_without_waiting_a_loading_daemon_is_refused_with_its_progress(server):
    """The engine's log shows how far the load is."""
    rank = server.cache.groups[0].ranks[0]
    rank.state = states.READING
    rank.progress = protocol.Progress(bytes_done=3_200_000_000, bytes_total=10_000_000_000)
    found = refusal(server)
    assert found.reason is reasons.Reason.NotReady
    assert "state Loading, 3.2 of 10.0 GB read" in found.message


def test_waiting_ends_when_the_weights_are_ready(server):
    """A pod that starts with its daemon needs no restart (answers K18)."""
    rank = server.cache.groups[0].ranks[0]
    rank.state = states.READING
    threading.Timer(0.4, lambda: setattr(rank, "state", states.READY)).start()
    with attach(server, wait_seconds=10) as attached:
        assert attached.timings.waited > 0.3 and attached.timings.total < attached.timings.waited + 1


def test_waiting_has_an_end(server):
    """The last refusal stands, not a hang."""
    server.cache.draining = True
    began = time.monotonic()
    assert refusal(server, wait_seconds=0.3).reason is reasons.Reason.Draining
    assert 0.3 <= time.monotonic() - began < 5


def test_a_daemon_that_is_not_there_yet_can_be_waited_for(tmp_path):
    """No directory, then a stale socket, then a daemon: an engine may come first."""
    directory = tmp_path / "root" / "s" / UID.replace("-", "")[:10]
    with pytest.raises(reasons.Refusal, match=r"DaemonUnreachable: .*does not exist"):
        attaching.attach(directory, KEY, cache_uid=UID)
    found = []

    def wait():
        with attaching.attach(directory, KEY, cache_uid=UID, wait_seconds=20) as attached:
            found.append(attached.tensors["embed"].sum().item())

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.2)
    with servers.ArenaServer(tmp_path / "root", [[arena()]]):
        waiting.join(20)
    assert found == [21]


def test_a_stale_socket_says_that_its_daemon_ended(tmp_path):
    """A file that outlived its listener (answers K19)."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "daemon.sock"))
    with pytest.raises(reasons.Refusal, match=r"DaemonUnreachable: .*no listener"):
        attaching.attach(tmp_path, KEY, cache_uid=UID)


def test_a_daemon_that_says_nothing_is_given_up_at_the_deadline(tmp_path):
    """A hung daemon must not hang the engine (answers W34)."""
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "daemon.sock"))
        silent.listen()
        began = time.monotonic()
        with pytest.raises(reasons.Refusal, match=r"DeadlineExceeded: .*daemon.sock"):
            attaching.attach(tmp_path, KEY, cache_uid=UID, deadline_seconds=0.3)
        assert time.monotonic() - began < 3


def test_a_full_queue_of_connections_is_waited_for_within_the_deadline(tmp_path):
    """A listener that accepts nobody looks like EAGAIN, not like a dead daemon."""
    with socket.socket(socket.AF_UNIX) as full:
        full.bind(str(tmp_path / "daemon.sock"))
        full.listen(0)
        taken = []
        try:
            while True:
                taken.append(socket.socket(socket.AF_UNIX))
                taken[-1].setblocking(False)
                taken[-1].connect(str(tmp_path / "daemon.sock"))
        except BlockingIOError:
            pass
        with pytest.raises(reasons.Refusal, match=r"DeadlineExceeded: .*queue of connections"):
            attaching.attach(tmp_path, KEY, cache_uid=UID, deadline_seconds=0.2)
        for sock in taken:
            sock.close()


# --- who listens there ------------------------------------------------------------------------------------------------
def test_a_path_too_long_for_a_socket_is_refused_with_its_length(tmp_path):
    """The engine's own mount path counts; the kernel would only say invalid argument (answers K20)."""
    deep = tmp_path / ("d" * (100 - len(str(tmp_path)) + 10))
    deep.mkdir()
    with pytest.raises(reasons.Refusal, match=r"SocketPathTooLong: .* is 1\d\d bytes, .* 107"):
        attaching.attach(deep, KEY, cache_uid=UID)


def test_a_socket_file_in_place_of_its_directory_is_refused(server):
    """A mounted socket file goes stale with its daemon (answers K19)."""
    with pytest.raises(reasons.Refusal, match=r"RootInvalid: .*not a directory"):
        attaching.attach(server.directory / "daemon.sock", KEY, cache_uid=UID)


@needs_root
def test_a_planted_socket_of_another_user_gets_nothing(tmp_path):
    """Whoever can write to the directory is not its owner; not even the greeting is sent (answers W33)."""
    os.chmod(tmp_path, 0o777)
    for parent in tmp_path.parents[:-2]:
        os.chmod(parent, 0o755)
    with socket.socket(socket.AF_UNIX) as planted:
        os.seteuid(NOBODY)
        try:
            planted.bind(str(tmp_path / "daemon.sock"))
            planted.listen()
        finally:
            os.seteuid(0)
        with pytest.raises(reasons.Refusal, match=rf"PeerNotTrusted: .*uid {NOBODY} listens .* uid 0 owns"):
            attaching.attach(tmp_path, KEY, cache_uid=UID)
        with planted.accept()[0] as peer:
            assert peer.recv(100) == b""


@needs_root
def test_no_permission_says_group_and_selinux(server, tmp_path):
    """Mode bits may be open and SELinux denies, or the group is missing: both look like EACCES (answers K21)."""
    for parent in server.directory.parents[:-2]:
        os.chmod(parent, os.stat(parent).st_mode | 0o111)
    groups = os.getgroups()
    os.setgroups([])
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        with pytest.raises(reasons.Refusal) as caught:
            connecting.converse(
                str(server.directory), "daemon.sock", protocol.Client(), protocol.Status(), time.monotonic() + 5
            )
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)
    assert caught.value.reason is reasons.Reason.Forbidden
    assert "spec.socket.group" in caught.value.message and "SELinux" in caught.value.message


def test_a_daemon_of_another_protocol_is_named_as_such(server, monkeypatch):
    """An upgrade of one end reads as what it is."""
    monkeypatch.setattr(connecting, "protocol", types.SimpleNamespace(**{**vars(protocol), "PROTOCOL": 98}))
    with pytest.raises(reasons.Refusal, match=r"ProtocolVersionMismatch: .*client speaks protocol 98 .*this daemon 1 "):
        attach(server)


# --- when the daemon goes ---------------------------------------------------------------------------------------------
def serve(tmp_path, generation="a" * 16):
    """A daemon's next life, on the same root."""
    return servers.ArenaServer(tmp_path / "root", [[arena(generation=generation)]])


def test_a_lost_connection_is_rejoined_under_its_generation(tmp_path):
    """The daemon counts the lease again; the engine did not stop for a moment."""
    seen = []
    with serve(tmp_path) as server:
        attached = attach(server, on_lease_change=seen.append)
    until(lambda: attached.state is leases.State.Lost)
    assert attached.tensors["embed"].sum().item() == 21
    with serve(tmp_path) as again:
        until(lambda: attached.state is leases.State.Rejoined)
        assert [(lease.identity, lease.generation) for lease in holders(again)] == [(attached.lease.identity, "a" * 16)]
        attached.close()
        until(lambda: not holders(again))
    assert seen == [leases.State.Lost, leases.State.Rejoined]


def test_a_daemon_with_another_arena_supersedes_and_counts_the_old_lease(tmp_path):
    """The old weights stay valid and in use, and the new daemon knows why memory is missing (answers W25)."""
    with serve(tmp_path) as server:
        attached = attach(server)
    with serve(tmp_path, generation="b" * 16) as again:
        until(lambda: attached.state is leases.State.Superseded)
        assert (attached.generation, attached.lease.daemon_generation) == ("a" * 16, "b" * 16)
        assert [lease.generation for lease in holders(again)] == ["a" * 16]
        assert attached.tensors["embed"].sum().item() == 21
        attached.close()


def test_a_lease_comes_back_as_often_as_it_is_lost(tmp_path):
    """Two restarts are no harder than one."""
    with serve(tmp_path) as server:
        attached = attach(server)
    for _ in range(2):
        until(lambda: attached.state is leases.State.Lost)
        with serve(tmp_path):
            until(lambda: attached.state is leases.State.Rejoined)
    attached.close()


def test_while_no_daemon_is_there_the_engine_hardly_notices(tmp_path):
    """Looking for a daemon with back-off costs no core: less than 50 ms of CPU in a second."""
    with serve(tmp_path) as server:
        attached = attach(server)
    until(lambda: attached.state is leases.State.Lost)
    began = time.process_time()
    time.sleep(1.0)
    assert time.process_time() - began < 0.05
    assert "DaemonUnreachable" in attached.lease.trouble
    attached.close()


def test_a_fault_in_the_engines_callback_does_not_end_the_lease(tmp_path, caplog):
    """The callback is a courtesy; the lease is not."""

    def fail(state):
        raise ValueError(state)

    with serve(tmp_path) as server:
        attached = attach(server, on_lease_change=fail)
    with serve(tmp_path):
        until(lambda: attached.state is leases.State.Rejoined)
    attached.close()
    assert "the callback for a changed lease failed" in caplog.text


def test_a_daemon_that_talks_on_a_lease_is_no_busy_loop(server):
    """Whatever arrives unasked ends the connection; the lease is made again."""
    seen = []
    attached = attach(server, on_lease_change=seen.append)
    [session] = [session for session in server.server._sessions if session.lease == attached.lease.identity]
    answer = session._connection.answer(protocol.Draining(retry_after_seconds=1))
    asyncio.run_coroutine_threadsafe(answer, server._loop).result(5)
    until(lambda: attached.state is leases.State.Rejoined)
    until(lambda: len(holders(server)) == 1)
    assert seen == [leases.State.Lost, leases.State.Rejoined]
    attached.close()


def test_a_cut_lease_stays_valid_memory(server):
    """A forced release ends connections, never mappings."""
    attached = attach(server)
    server._loop.call_soon_threadsafe(server.server.cut_leases)
    until(lambda: attached.state is not leases.State.Held)
    assert attached.tensors["embed"].tolist() == [[1, 2, 3], [4, 5, 6]]
    attached.close()
