"""Content digests: published vectors, block rules, and that any changed byte shows."""

import os

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from weightcache.wire import digests


def test_the_algorithm_is_xxh3_128_with_canonical_bytes():
    """The empty input's digest as the xxHash project publishes it (its command line: ``xxhsum -H2 /dev/null``)."""
    assert digests.digest_block(b"").hex() == "99aa06d3014798d86001c324468d497f"


def test_a_file_digest_is_the_digest_of_its_block_digests(tmp_path):
    """Blocks are 4 MiB, the last one is short: computed here by hand from the library."""
    data = os.urandom(2 * (4 << 20) + 12345)
    path = tmp_path / "file"
    path.write_bytes(data)
    parts = [data[: 4 << 20], data[4 << 20 : 8 << 20], data[8 << 20 :]]
    wanted = xxhash.xxh3_128(b"".join(xxhash.xxh3_128(part).digest() for part in parts)).digest()
    assert digests.digest_of_file(path) == wanted
    assert digests.num_blocks(len(data)) == 3


def test_known_digests_never_change(tmp_path):
    """A digest stored by one version must be found again by the next: fixed vectors."""
    path = tmp_path / "zeros"
    path.write_bytes(bytes(5 << 20))
    assert digests.digest_of_file(path).hex() == "c3058b1a3e3051cdf7244c8e052b5e37"
    files = [digests.FileDigest("b", 2, bytes(16)), digests.FileDigest("a", 1, bytes(range(16)))]
    assert digests.digest_of_checkpoint(files) == "0e59b2bc6ef2914a8881bb7a5bb58fd0"
    assert digests.digest_of_checkpoint(files) == digests.digest_of_checkpoint(files[::-1])


@given(st.binary(min_size=1, max_size=5000), st.data())
def test_any_changed_byte_changes_the_digest(data, draw):
    """Two fine-tunes of equal size and header must differ (answers W3)."""
    index = draw.draw(st.integers(0, len(data) - 1))
    changed = bytearray(data)
    changed[index] ^= draw.draw(st.integers(1, 255))
    assert digests.digest_block(data) != digests.digest_block(bytes(changed))


def test_an_empty_file_has_no_blocks_and_a_digest(tmp_path):
    """An empty file is a file: it takes part in the checkpoint's digest by name."""
    path = tmp_path / "empty"
    path.touch()
    assert digests.digest_of_file(path) == xxhash.xxh3_128_digest(b"")


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path, monkeypatch):
    """Half a file must never pass for a whole one."""
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    monkeypatch.setattr(os, "pread", lambda *_: b"short")
    with pytest.raises(OSError, match="5 bytes at block 0, 100 expected"):
        digests.digest_of_file(path)
