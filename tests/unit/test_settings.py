"""What a daemon is told: unknown or impossible settings are refused with their path."""

import pytest

from weightcache.daemon import settings
from weightcache.wire import reasons

MODEL = "model: {hostPath: /models, path: qwen}\n"


def read(tmp_path, text):
    path = tmp_path / "qwen.yaml"
    path.write_text(text)
    return settings.read_document(path)


def test_a_bare_spec_is_named_after_its_file(tmp_path):
    """The shortest way to try a checkpoint on a workstation."""
    spec, cache = read(tmp_path, MODEL)
    assert (cache.namespace, cache.name) == ("default", "qwen")
    assert settings.checkpoint_directory(spec).as_posix() == "/models/qwen"
    assert read(tmp_path, MODEL)[1].uid == cache.uid, "the same file names the same cache each time"


def test_a_whole_document_brings_its_own_name_and_uid(tmp_path):
    """The file that kubectl applies is the file that runs here."""
    text = (
        "apiVersion: weightcache.dev/v1alpha1\nkind: WeightCache\n"
        "metadata: {name: a, namespace: b, uid: 01234567-89ab-cdef-0123-456789abcdef, labels: {x: y}}\n"
        f"spec: {{{MODEL.strip()}, memory: Host}}\n"
    )
    spec, cache = read(tmp_path, text)
    assert (cache.namespace, cache.name, cache.uid) == ("b", "a", "01234567-89ab-cdef-0123-456789abcdef")
    assert str(spec.memory) == "Host"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (MODEL + "parallelism: {tensro: 2}\n", r"tensro.*\$\.parallelism"),
        (MODEL + "parallelism: {tensor: 0}\n", r">= 1.*\$\.parallelism\.tensor"),
        (MODEL + "memory: Disk\n", r"Disk.*\$\.memory"),
        (MODEL + "eplb: true\n", "eplb"),
        (MODEL + "parallelism: {expert: {enabled: true, redundantExperts: 2}}\n", "redundantExperts"),
        ("parallelism: {tensor: 2}\n", "model"),
        ("model: {hostPath: models}\n", "not absolute"),
        ("model: {hostPath: /m, path: ../x}\n", "leaves model.hostPath"),
        (MODEL + "parallelism: {tensor: 2}\ngpus: {perNode: 3}\n", "3 is not a multiple of the world size 2"),
        ("kind: Pod\napiVersion: v1\nspec: {}\n", r"\$"),
        ("{", "qwen.yaml"),
        ("[1]", "object"),
    ],
)
def test_a_bad_setting_is_refused_with_the_file_and_its_path(tmp_path, text, words):
    """A typo that is ignored is a cache in the wrong layout (answers W6: redundant experts cannot even be written)."""
    with pytest.raises(reasons.Refusal, match=words) as caught:
        read(tmp_path, text)
    assert caught.value.reason is reasons.Reason.SettingsInvalid
    assert "qwen.yaml" in caught.value.message


@pytest.mark.parametrize("name", ["..", "a/b", "x" * 254, "."])
def test_a_name_that_is_no_directory_name_is_refused(tmp_path, name):
    """The name becomes a path below the root."""
    head = "apiVersion: weightcache.dev/v1alpha1\nkind: WeightCache\n"
    text = f"{head}metadata: {{name: '{name}'}}\nspec: {{{MODEL.strip()}}}\n"
    with pytest.raises(reasons.Refusal, match=r"metadata\.name"):
        read(tmp_path, text)
