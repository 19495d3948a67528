"""One list of reasons, so that a failure reads the same in a log, an exit code, a status and a condition.

A program that fails in ten places with ten wordings leaves the person on call to guess whether they are one fault.
Here every refusal has a fixed CamelCase name, an exit code of its own, and a next step; the message carries the
figures of the case at hand.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

__all__ = ["MEANINGS", "Meaning", "Reason", "Refusal", "exit_code"]


class Reason(enum.StrEnum):
    """The fixed names. Adding one means adding its row in :data:`MEANINGS`; renaming one breaks users' alerts."""

    SettingsInvalid = "SettingsInvalid"
    SocketPathTooLong = "SocketPathTooLong"
    RootInvalid = "RootInvalid"
    GPUOwnedByAnother = "GPUOwnedByAnother"
    GPUNotFound = "GPUNotFound"
    NotEnoughGPUs = "NotEnoughGPUs"
    MIGNotSupported = "MIGNotSupported"
    InsufficientGPUMemory = "InsufficientGPUMemory"
    InsufficientHostMemory = "InsufficientHostMemory"
    CheckpointNotFound = "CheckpointNotFound"
    CheckpointIncomplete = "CheckpointIncomplete"
    CheckpointInvalid = "CheckpointInvalid"
    CheckpointChanged = "CheckpointChanged"
    ScaleInvalid = "ScaleInvalid"
    UnsupportedArchitecture = "UnsupportedArchitecture"
    UnsupportedQuantization = "UnsupportedQuantization"
    BackendCannotPreprocess = "BackendCannotPreprocess"
    ExpertsMoveAtRuntime = "ExpertsMoveAtRuntime"
    ParallelismDoesNotDivide = "ParallelismDoesNotDivide"
    LoaderDied = "LoaderDied"
    ArenaInvalid = "ArenaInvalid"
    VerifyImpossible = "VerifyImpossible"
    Damaged = "Damaged"
    ProtocolViolated = "ProtocolViolated"
    ProtocolVersionMismatch = "ProtocolVersionMismatch"
    DaemonUnreachable = "DaemonUnreachable"
    PeerNotTrusted = "PeerNotTrusted"
    DeadlineExceeded = "DeadlineExceeded"
    KeyMismatch = "KeyMismatch"
    ContentUnproven = "ContentUnproven"
    NotReady = "NotReady"
    Draining = "Draining"
    ClaimRequired = "ClaimRequired"
    GroupTaken = "GroupTaken"
    GPUsNotVisible = "GPUsNotVisible"
    Superseded = "Superseded"
    LeasesOpen = "LeasesOpen"
    Forbidden = "Forbidden"
    WeightsDoNotFit = "WeightsDoNotFit"
    InternalError = "InternalError"


class Meaning(NamedTuple):
    """What a reason means to the person who reads it.

    ``exit_code``: of the process that ends with it (unique). ``retry``: whether waiting can mend it without a change
    of settings, checkpoint or node.
    """

    exit_code: int
    retry: bool
    meaning: str
    next_step: str


_R = Reason
MEANINGS: dict[Reason, Meaning] = {
    _R.SettingsInvalid: Meaning(
        2, False, "a setting is unknown or out of bounds", "mend the setting that the path names"
    ),
    _R.SocketPathTooLong: Meaning(
        10, False, "a Unix socket path would be longer than 107 bytes", "choose a shorter root or mount path"
    ),
    _R.RootInvalid: Meaning(
        11, False, "the root directory cannot be used", "run `weightcache prepare-root` as root, or mend owner and mode"
    ),
    _R.GPUOwnedByAnother: Meaning(
        12, True, "another daemon holds the lock of a GPU this one needs", "end the named holder, or wait for it"
    ),
    _R.GPUNotFound: Meaning(13, True, "a GPU with this UUID is not on the node", "check the device and the driver"),
    _R.NotEnoughGPUs: Meaning(
        14, True, "the node has fewer GPUs than the cache wants", "lower gpus.perNode or choose other nodes"
    ),
    _R.MIGNotSupported: Meaning(
        15, False, "the GPU is in MIG mode", "use whole GPUs: memory is not shared across slices"
    ),
    _R.InsufficientGPUMemory: Meaning(
        16, True, "the GPU has less free memory than the weights need", "free the memory or use more ranks"
    ),
    _R.InsufficientHostMemory: Meaning(
        17, True, "the node or its cgroup has less memory than the weights need", "raise the limit or use more ranks"
    ),
    _R.CheckpointNotFound: Meaning(
        20, True, "the checkpoint directory or its config.json is missing", "check the path"
    ),
    _R.CheckpointIncomplete: Meaning(
        21, True, "a file or tensor that the checkpoint promises is missing", "download the checkpoint again"
    ),
    _R.CheckpointInvalid: Meaning(
        22, False, "a checkpoint file contradicts its format or its configuration", "download the checkpoint again"
    ),
    _R.CheckpointChanged: Meaning(
        23, True, "a checkpoint file changed while it was being read", "wait until the writer has finished"
    ),
    _R.ScaleInvalid: Meaning(
        24, False, "a quantization scale is zero, negative, infinite or not a number", "export the checkpoint again"
    ),
    _R.UnsupportedArchitecture: Meaning(
        25, False, "this preparer does not know the model's architecture", "use an architecture that the message lists"
    ),
    _R.UnsupportedQuantization: Meaning(
        26, False, "this preparer does not know the quantization method", "use a supported method"
    ),
    _R.BackendCannotPreprocess: Meaning(
        27, False, "the selected kernel backend cannot be prepared for", "select a supported backend"
    ),
    _R.ExpertsMoveAtRuntime: Meaning(
        28, False, "EPLB or redundant experts would move experts inside shared memory", "switch EPLB off"
    ),
    _R.ParallelismDoesNotDivide: Meaning(
        29, False, "a size of the model does not divide by the parallel layout", "choose sizes that divide"
    ),
    _R.LoaderDied: Meaning(30, True, "a loader process ended before its arena was whole", "see the loader's log"),
    _R.ArenaInvalid: Meaning(
        31, False, "shared memory does not have the size, seal or device it claims", "attach again"
    ),
    _R.VerifyImpossible: Meaning(
        32, True, "the verifier could not run", "see the message; the weights were not judged"
    ),
    _R.Damaged: Meaning(33, False, "resident bytes differ from their digests", "the named ranks are loaded again"),
    _R.ProtocolViolated: Meaning(40, False, "a message is not of the protocol", "check the versions of both ends"),
    _R.ProtocolVersionMismatch: Meaning(
        41, False, "both ends speak different protocol versions", "upgrade the older end"
    ),
    _R.DaemonUnreachable: Meaning(42, True, "no daemon answers on the socket", "start the daemon, or wait for it"),
    _R.PeerNotTrusted: Meaning(
        43, False, "the process behind the socket does not own the socket's directory", "check who runs there"
    ),
    _R.DeadlineExceeded: Meaning(44, True, "a whole message did not arrive in time", "try again"),
    _R.KeyMismatch: Meaning(50, False, "the daemon holds other weights than asked for", "make the listed fields equal"),
    _R.ContentUnproven: Meaning(
        51, True, "nothing cheap proves that both ends mean the same bytes", "send the full digest"
    ),
    _R.NotReady: Meaning(52, True, "the weights are not loaded yet", "wait"),
    _R.Draining: Meaning(53, True, "the daemon takes no new leases", "wait for the next daemon"),
    _R.ClaimRequired: Meaning(54, False, "an attach came without a claim on its group", "claim the group first"),
    _R.GroupTaken: Meaning(55, True, "every matching group is held by another engine", "wait, or ask to share"),
    _R.GPUsNotVisible: Meaning(56, False, "no group lies wholly on the GPUs this engine sees", "make the GPUs visible"),
    _R.Superseded: Meaning(57, False, "the arena of this generation is no longer the daemon's", "restart the engine"),
    _R.LeasesOpen: Meaning(
        58, True, "engines still hold leases", "end the named clients, or force with a grace period"
    ),
    _R.Forbidden: Meaning(59, False, "this peer may not order that", "use the owner's account"),
    _R.WeightsDoNotFit: Meaning(
        60, False, "the module's parameters and the arena's tensors differ", "see the names in the message"
    ),
    _R.InternalError: Meaning(70, False, "a fault of weightcache itself", "report it with the log"),
}


class Refusal(Exception):
    """A failure with a fixed reason. ``message`` names the file, tensor or field, both values and the next step.

    Nothing was half done when it is raised, unless the raiser's docstring says so.
    """

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.message = message


def exit_code(reason: Reason) -> int:
    """The process exit code of a reason. Pure."""
    return MEANINGS[reason].exit_code
