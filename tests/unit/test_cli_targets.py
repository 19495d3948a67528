"""Which daemon a command means: by name, by part of a name, by what lies below the root."""

import pytest

from weightcache.cli import targets
from weightcache.daemon import roots
from weightcache.wire import protocol, reasons

CACHES = {
    ("default", "llama"): "11111111-1111-4111-8111-111111111111",
    ("default", "qwen"): "22222222-2222-4222-8222-222222222222",
    ("research", "qwen"): "33333333-3333-4333-8333-333333333333",
}


@pytest.fixture
def root(tmp_path):
    made = roots.prepare(tmp_path / "root")
    for (namespace, name), uid in CACHES.items():
        roots.make_cache_directory(made, protocol.CacheRef(namespace=namespace, name=name, uid=uid))
    return made.path


def names(found):
    return [target.name for target in found]


def test_without_a_name_every_cache_below_the_root_is_meant(root):
    """A status of the node must not leave out a cache."""
    assert names(targets.find(root, None, None)) == ["default/llama", "default/qwen", "research/qwen"]


def test_a_name_leads_to_the_socket_of_its_uid(root):
    """The directory is named after the UID: a cache that was made anew has another one."""
    (found,) = targets.find(root, "research/qwen", None)
    assert found.socket == root / "s" / "3333333333" / "daemon.sock"
    assert targets.find_one(root, "llama", None).name == "default/llama"


def test_a_bare_name_that_two_namespaces_have_is_refused(root):
    """Draining the wrong one of two must be impossible."""
    with pytest.raises(reasons.Refusal, match="default/qwen, research/qwen") as refusal:
        targets.find(root, "qwen", None)
    assert refusal.value.reason is reasons.Reason.SettingsInvalid


def test_an_order_without_a_name_is_refused_when_there_are_several(root):
    """`weightcache release` must not pick one by chance."""
    with pytest.raises(reasons.Refusal, match="name one") as refusal:
        targets.find_one(root, None, None)
    assert refusal.value.reason is reasons.Reason.SettingsInvalid


def test_a_name_that_is_not_there_is_answered_with_those_that_are(root):
    """A typo is seen at once."""
    with pytest.raises(reasons.Refusal, match="default/llama, default/qwen") as refusal:
        targets.find(root, "lama", None)
    assert refusal.value.reason is reasons.Reason.DaemonUnreachable


@pytest.mark.parametrize("cache", [None, "qwen"])
def test_a_root_with_nothing_in_it_has_no_daemon(tmp_path, cache):
    """Nothing there is the same failure as nobody there."""
    with pytest.raises(reasons.Refusal, match="no cache") as refusal:
        targets.find(tmp_path, cache, None)
    assert refusal.value.reason is reasons.Reason.DaemonUnreachable


def test_the_mount_of_an_engines_pod_serves_as_root(root):
    """Such a pod sees the sockets' directory alone."""
    assert names(targets.find(root / "s", "llama", None)) == ["default/llama"]


def test_a_directory_that_no_name_leads_to_is_still_shown(root):
    """A leftover of a deleted cache may still have a daemon behind it."""
    (root / "s" / "by-name" / "default" / "llama").unlink()
    assert names(targets.find(root, None, None)) == ["1111111111", "default/qwen", "research/qwen"]


def test_a_link_to_a_directory_that_is_gone_is_no_cache(root):
    """Only what can hold a socket counts."""
    roots.remove_cache_directory(
        roots.open_root(root), protocol.CacheRef(namespace="x", name="y", uid=CACHES["default", "llama"])
    )
    assert names(targets.list_below(root)) == ["default/qwen", "research/qwen"]
