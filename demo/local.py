"""The whole of weightcache on one machine, without a GPU and without Kubernetes: ``make demo-local``.

What a user must be able to trust is not that parts pass their tests but that real processes, sockets, locks and
memory keep their promises while processes die. So this script makes a checkpoint with the exporter of the field,
starts a daemon on it, attaches from other processes, compares every byte with a witness that knows nothing of
weightcache (:mod:`demo.slicing`), kills the daemon under a living client, and prints what each step took and what was
seen. It ends everything it started and removes its directory; the exit code is 0 only when every check held.

    .venv/bin/python -m demo.local
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from demo import processes
from weightcache.wire import protocol, reasons

EXPORTER = processes.TREE / ".venv-exporter" / "bin" / "python"
LIMIT_SECONDS = 300  # for everything, on a machine that has much else to do: a demo that hangs must say so
NUM_RANKS = 2
SPEC = """\
apiVersion: weightcache.dev/v1alpha1
kind: WeightCache
metadata: {{name: {name}, namespace: demo}}
spec:
  model: {{hostPath: "{checkpoint}"}}
  parallelism:
    tensor: 2
    expert: {{enabled: true, placement: linear}}
  memory: Host
"""


@dataclass
class Step:
    """A row of the final table."""

    name: str
    seconds: float = 0.0
    seen: str = ""


@dataclass
class Demo:
    """What the steps share. ``directory``: everything this run writes; ``ends``: how to end what was started."""

    directory: Path
    exporter: Path
    ends: contextlib.ExitStack
    steps: list[Step] = field(default_factory=list)

    @property
    def root(self) -> Path:
        """The node's root: locks, gate, sockets."""
        return self.directory / "root"

    @property
    def sockets(self) -> Path:
        """The cache's socket directory by its name, as an engine's settings would have it."""
        return self.root / "s" / "by-name" / "demo" / "tiny-moe"

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[Step]:
        """Time a step and print it; a step that fails is printed as such."""
        row = Step(name)
        self.steps.append(row)
        print(f"\n== {name}", flush=True)
        began = time.perf_counter()
        try:
            yield row
        except Exception:
            row.seen = f"FAILED {row.seen}"
            raise
        finally:
            row.seconds = time.perf_counter() - began
            print(f"   {row.seconds:.2f} s  {row.seen}", flush=True)

    def spec(self, name: str, checkpoint: Path) -> Path:
        """Write a WeightCache for two expert-parallel ranks in host memory."""
        path = self.directory / f"{name}.yaml"
        path.write_text(SPEC.format(name=name, checkpoint=checkpoint))
        return path


# --- the steps -------------------------------------------------------------------------------------------------------
def make_checkpoint(demo: Demo) -> Path:
    """A Qwen3-MoE of 8 experts, quantized to NVFP4 and exported by nvidia-modelopt."""
    with demo.step("make a Qwen3-MoE NVFP4 checkpoint with nvidia-modelopt") as step:
        command = [str(demo.exporter), str(processes.TREE / "demo" / "make_checkpoint.py"), "qwen3-moe"]
        log = demo.directory / "exporter.log"
        with log.open("w") as errors:
            made = subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, text=True, check=False)
        processes.check(made.returncode == 0, f"the exporter failed ({log.read_text()[-2000:]})")
        checkpoint = Path(made.stdout.split()[-1])
        size = (checkpoint / "model.safetensors").stat().st_size
        step.seen = f"{size:,} bytes, kept in {checkpoint}"
    return checkpoint


def start_daemon(demo: Demo, spec: Path, name: str) -> tuple[processes.Daemon, protocol.DaemonStatus]:
    """A daemon with two expert-parallel ranks on host slots, waited for by its status."""
    with demo.step(name) as step:
        daemon = processes.Daemon(spec, demo.root, NUM_RANKS, demo.ends)
        status = daemon.wait_until_ready()
        ranks = status.groups[0].ranks
        processes.check(len(ranks) == NUM_RANKS, f"{len(ranks)} ranks, expected {NUM_RANKS}")
        loads = [sum(rank.phases.values()) for rank in ranks]
        step.seen = (
            f"Ready: {', '.join(f'{rank.gpu} {rank.num_tensors} tensors {rank.arena_bytes:,} B' for rank in ranks)}; "
            f"phases of each load together {', '.join(f'{seconds:.2f}' for seconds in loads)} s"
        )
    return daemon, status


def show_status(demo: Demo) -> None:
    """What ``weightcache status`` prints."""
    with demo.step("weightcache status") as step:
        command = [sys.executable, "-m", "weightcache.cli.main", "status", "--root", str(demo.root)]
        shown = subprocess.run(command, cwd=processes.TREE, capture_output=True, text=True, timeout=30, check=False)
        print("".join(f"   {line}\n" for line in shown.stdout.splitlines()), end="")
        processes.check(shown.returncode == 0 and "Ready" in shown.stdout, f"exit {shown.returncode}: {shown.stderr}")
        step.seen = "exit code 0"


def refuse_rival(demo: Demo, checkpoint: Path, first: processes.Daemon, status: protocol.DaemonStatus) -> None:
    """A second daemon, of another cache, on the same slots ends with its own exit code and names the holder."""
    with demo.step("a second daemon on the same slots is refused") as step:
        rival = processes.Daemon(demo.spec("rival", checkpoint), demo.root, NUM_RANKS, demo.ends)
        code = rival.process.wait(timeout=30)
        wanted = reasons.exit_code(reasons.Reason.GPUOwnedByAnother)
        line = next((line for line in rival.log.read_text().splitlines() if "GPUOwnedByAnother" in line), "")
        processes.check(code == wanted, f"exit code {code}, expected {wanted}; log:\n{rival.log_tail()}")
        processes.check("tiny-moe" in line, f"the refusal does not name the holder demo/tiny-moe: {line!r}")
        print(f"   {line.strip()}")
        again = first.status()
        processes.check(
            again is not None and again.instance == status.instance and again.state == "Ready", "the first one fell"
        )
        step.seen = f"GPUOwnedByAnother, exit code {code}, holder named; the first one is Ready as before"


def attach(demo: Demo, spec: Path, name: str, *options: str) -> processes.Engine:
    """A fresh process attaches both ranks, and every byte is compared with the checkpoint."""
    with demo.step(name) as step:
        return _attach(demo, spec, step, *options)


def restart(demo: Demo, spec: Path, engine: processes.Engine) -> processes.Engine:
    """The engine process ends and a new one starts: the point of it all."""
    with demo.step("restart that process: it maps the same arenas") as step:
        digest = engine.attached()["digest"]
        code = engine.end()
        processes.check(code == 0, f"the client ended with exit code {code}")
        engine = _attach(demo, spec, step)
        processes.check(engine.attached()["digest"] == digest, "the restarted process sees other bytes")
    return engine


def _attach(demo: Demo, spec: Path, step: Step, *options: str) -> processes.Engine:
    began = time.perf_counter()
    engine = processes.Engine(spec, demo.sockets, demo.ends, "--check", *options)
    seen = engine.attached()
    starting = time.perf_counter() - began - seen["attach_seconds"] - seen["check_seconds"]
    print(f"   experts by rank: {seen['experts']}")
    step.seen = (
        f"claim and both ranks in {seen['attach_seconds'] * 1e3:.1f} ms (start and imports {starting:.2f} s, checking "
        f"{seen['check_seconds']:.2f} s); {sum(seen['tensors'])} tensors, {seen['bytes']:,} bytes as in the checkpoint"
    )
    return engine


def refuse_placement(demo: Demo, spec: Path) -> None:
    """Experts placed round-robin have the same shapes and other bytes: refused with the field, both values, advice."""
    with demo.step("an engine with another expert placement is refused") as step:
        engine = processes.Engine(spec, demo.sockets, demo.ends, "--placement", "round_robin", "--share")
        code = engine.process.wait(timeout=20)
        found = engine.first
        processes.check(
            found["event"] == "refused" and found["reason"] == "KeyMismatch", f"expected KeyMismatch, got {found}"
        )
        processes.check(code == reasons.exit_code(reasons.Reason.KeyMismatch), f"exit code {code}")
        processes.check(
            "expert_placement" in found["message"], f"the message does not name the field: {found['message']}"
        )
        print("".join(f"   {line}\n" for line in found["message"].splitlines()), end="")
        step.seen = f"KeyMismatch on expert_placement, exit code {code}, nothing mapped"


def kill_daemon(demo: Demo, daemon: processes.Daemon, engine: processes.Engine) -> None:
    """SIGKILL to the daemon while the engine lives: the engine's tensors must not change."""
    with demo.step("kill -9 the daemon under the living client") as step:
        before = engine.ask("bytes")
        daemon.process.kill()
        code = daemon.process.wait(timeout=20)
        processes.check(code == -signal.SIGKILL, f"the daemon ended with {code}")
        lost = engine.ask("leases Lost")
        processes.check(set(lost["states"]) == {"Lost"}, f"leases are {lost}")
        after = engine.ask("bytes")
        processes.check(
            not after["faults"] and after["digest"] == before["digest"], f"tensors changed: {after['faults'][:5]}"
        )
        step.seen = f"leases Lost; {after['bytes']:,} bytes unchanged, sha256 {after['digest'][:16]}"


def rejoin(demo: Demo, spec: Path, engine: processes.Engine, status: protocol.DaemonStatus) -> processes.Engine:
    """The old client comes back by itself and is told whether its arena is still the daemon's; a new one attaches."""
    with demo.step("the client's leases come back by themselves") as step:
        seen = engine.ask("leases Rejoined Superseded")
        state, held = seen["states"][0], [rank.generation for rank in status.groups[0].ranks]
        processes.check(set(seen["states"]) == {state}, f"leases are {seen}")
        processes.check(seen["daemon_generations"] == held, f"the daemon holds {held}, the client was told {seen}")
        step.seen = f"{state}: generation {seen['generations'][0]}, the daemon now holds {held[0]}"
    with demo.step("attach a new client beside the old one (shared group)") as step:
        second = _attach(demo, spec, step, "--share")
        kept = second.attached()["memory"] == engine.attached()["memory"]
        processes.check(state == ("Rejoined" if kept else "Superseded"), f"leases are {state}, same memory: {kept}")
        old = engine.ask("bytes")
        processes.check(not old["faults"], f"the old client's tensors changed: {old['faults'][:5]}")
        whose = (
            "the memory of the old client"
            if kept
            else "other memory than the old client (a killed daemon's arenas live on in its clients only)"
        )
        step.seen += f"; {whose}, the old client's tensors are unchanged"
    return second


def end_all(demo: Demo, daemon: processes.Daemon, engines: list[processes.Engine]) -> None:
    """Clients and daemon end when asked, with exit code 0, and leave no socket behind."""
    with demo.step("end the clients and the daemon") as step:
        codes = [engine.end() for engine in engines]
        began = time.perf_counter()
        daemon.process.terminate()
        codes.append(daemon.process.wait(timeout=20))
        seconds = time.perf_counter() - began
        processes.check(set(codes) == {0}, f"exit codes {codes}; log:\n{daemon.log_tail()}")
        left = [str(path) for path in demo.directory.rglob("*.sock")]
        processes.check(not left, f"sockets are left: {left}")
        step.seen = f"exit codes 0, no socket left; the daemon ended {seconds:.2f} s after SIGTERM"


def run(demo: Demo) -> None:
    """Every step in order. Raises CheckFailed at the first that does not hold."""
    checkpoint = make_checkpoint(demo)
    spec = demo.spec("tiny-moe", checkpoint)
    print(f"\n{spec.read_text()}")
    daemon, status = start_daemon(demo, spec, "start the daemon: two expert-parallel ranks in host memory")
    show_status(demo)
    refuse_rival(demo, checkpoint, daemon, status)
    engine = attach(demo, spec, "attach from a second process, compare every byte")
    engine = restart(demo, spec, engine)
    refuse_placement(demo, spec)
    kill_daemon(demo, daemon, engine)
    daemon, status = start_daemon(demo, spec, "start the daemon again")
    second = rejoin(demo, spec, engine, status)
    end_all(demo, daemon, [engine, second])


def print_table(steps: list[Step]) -> None:
    """What each step took, and what was seen."""
    width = max(len(step.name) for step in steps)
    print(f"\n{'step':<{width}}  seconds  seen")
    for step in steps:
        print(f"{step.name:<{width}}  {step.seconds:7.2f}  {step.seen}")
    print(f"{'together':<{width}}  {sum(step.seconds for step in steps):7.2f}")


def main() -> int:
    """Run the demo; 0 when every check held, 1 when one did not, 2 when the exporter is missing."""
    parser = argparse.ArgumentParser(description="Load, attach, kill, restart: weightcache on one machine.")
    parser.add_argument("--exporter", type=Path, default=EXPORTER, help="Python that has nvidia-modelopt")
    options = parser.parse_args()
    if not options.exporter.exists():
        print(f"{options.exporter} does not exist: run `scripts/setup exporter` first", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGALRM, _time_is_up)
    signal.alarm(LIMIT_SECONDS)
    directory = Path(tempfile.mkdtemp(prefix="weightcache-demo-"))
    failure = ""
    with contextlib.ExitStack() as ends:
        ends.callback(shutil.rmtree, directory, ignore_errors=True)
        demo = Demo(directory, options.exporter, ends)
        try:
            run(demo)
        except (processes.CheckFailed, reasons.Refusal, OSError, subprocess.SubprocessError) as error:
            failure = f"{type(error).__name__}: {error}"
    print_table(demo.steps)
    print(f"\nFAILED: {failure}" if failure else "\nevery check held")
    return 1 if failure else 0


def _stop(_signal: int, _frame: object) -> None:
    raise KeyboardInterrupt  # so that what was started is ended on the way out


def _time_is_up(_signal: int, _frame: object) -> None:
    raise processes.CheckFailed(f"not done after {LIMIT_SECONDS} s")


if __name__ == "__main__":
    sys.exit(main())
