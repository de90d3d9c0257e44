"""Forges: processes that have imported a framework, and fork the ranks and engines of functional tests.

Megatron-Bridge and vLLM take longer to import than most tests need a rank. A forked process has its own session, files,
environment and exit status; multiprocessing's forkserver would leave it the server's files and environment. Four things
differ from a process that is started anew, so XFER_TEST_FORGE=0 starts all anew, as a step of scripts/nightly.sh does:

- Strings have one hash in all processes of a forge, so an order that depends on hashes differs only between trainers and engines.
- Settings that are read at import are the forge's, so a child with other settings of a framework is started anew.
- Its gloo groups share a thread, workers of vLLM sleep where they would spin, and what the forge has imported is never collected:
  processes that wait leave the processors to others.
- A forked process ends after its threads and atexit functions, and does not take its modules apart.

proc.py starts processes with it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import hashlib
import json
import os
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from tests.support.hosts import Host

ROOT = Path(__file__).resolve().parents[2]
PR_SET_CHILD_SUBREAPER = 36
SPINS_S = 0.002
"""For so long workers of vLLM look for a message before they sleep."""
FORKS_S = 120.0
"""Deadline of a fork, whose forge may have to import first."""
IDLE_S = 600.0
"""A forge ends when it has had no test process for so long."""
OURS = (
    "XFER_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_", "GLOO_", "NCCL_", "PYTEST_", "PYTHONWARNINGS", "COLUMNS",
    "TORCHINDUCTOR_", "TRITON_CACHE_AUTOTUNING", "PYTORCH_NVML_BASED_CUDA_CHECK", "TILELANG_CLEANUP_TEMP_FILES", "AITER_",
    "LD_LIBRARY_PATH",
)  # fmt: skip
"""Variables that are read when they are needed, not at import: in these, a child's environment may differ. Those from the second line on
are set where torch's compiler, vLLM or OpenCV is imported, so tests that import them have them, and so have their forges."""


def imports_torch() -> None:
    """Also what a rank would import at its first DTensor and at its first step of an optimizer: a second of a processor."""
    import torch._dynamo
    import torch.distributed.fsdp  # noqa: F401

    imports_xfer()


def imports_xfer() -> None:
    """What most ranks and engines use of it: half a second of a processor."""
    import xfer.layerwise
    import xfer.participants.controller
    import xfer.routes
    import xfer.trainers.dtensor
    import xfer.trainers.megatron  # noqa: F401


def imports_megatron() -> None:
    from examples.common import megatron_cpu

    megatron_cpu.install()
    megatron_cpu.import_bridge()
    imports_torch()


def imports_vllm() -> None:
    import vllm.entrypoints.llm
    import vllm.v1.engine.core
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    imports_xfer()
    # After each message a reader keeps a processor busy for a second, and here ten of them share two processors.
    SpinCondition.__init__.__defaults__ = (SPINS_S,)


IMPORTS = {"torch": imports_torch, "megatron": imports_megatron, "vllm": imports_vllm}
OF = {
    **dict.fromkeys(("megatron_main", "layerwise_megatron"), "megatron"),
    **{"trainer": "megatron", "engine": "vllm"},  # of examples.demo
    **dict.fromkeys(("megatron_worker", "megatron_hazards", "packed_bridge"), "megatron"),
    "fsdp_main": "megatron",  # its model is of transformers, which Bridge imports
    **dict.fromkeys(("vllm_main", "live_main", "async_main", "server_main", "external_main"), "vllm"),
}
"""The framework that a module or script imports. All others import torch, or nothing. Scripts that build Megatron as
`xfer plan` does (family_trainer) declare GPU packages before they import it."""


class Forged:
    """A process that a forge has forked, with those calls of `subprocess.Popen` that tests use. Its parent, the forge, writes its exit
    status into a pipe."""

    def __init__(self, pid: int, status: IO[bytes], stdin: IO[str] | None, stdout: IO[str] | None):
        self.pid, self.returncode, self.stdin, self.stdout = pid, None, stdin, stdout
        self._status, self._lock = status, threading.Lock()

    def wait(self, timeout: float | None = None) -> int:
        if not select.select([self._status], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(f"forked process {self.pid}", timeout)
        with self._lock:  # several threads may wait
            if self.returncode is None:
                self.returncode = int(self._status.read() or -signal.SIGKILL)  # empty if the forge has been killed
        return self.returncode

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


@dataclass(frozen=True)
class Request:
    run: tuple[str, ...]  # ("-m", module, args…) or (script, args…), as python takes them
    env: dict[str, str]
    cwd: str
    host: Host | None = None  # an emulated one, where it runs


class Forge:
    """A test process's connection to a forge, which is started if there is none.

    All test processes of a run share the forges of one folder, XFER_TEST_FORGES. A forge ends when its socket is removed or when nobody has
    been connected for `IDLE_S`.

    Attributes:
        env: Environment of the forge.
    """

    def __init__(self, python: str, imports: str, env: dict[str, str]):
        self.imports, self._lock = imports, threading.Lock()
        place = Path(os.environ["XFER_TEST_FORGES"], f"{imports}-{hashlib.sha1(python.encode()).hexdigest()[:8]}")
        self._log, its_env = place.with_suffix(".log"), place.with_suffix(".json")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with open(place.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                self._socket.connect(str(place))
            except OSError:  # there is none, or it has ended
                place.unlink(missing_ok=True)
                its_env.write_text(json.dumps(env))
                self._start(python, place, env)
                self._socket.connect(str(place))
        self.env = json.loads(its_env.read_text())
        self._socket.settimeout(FORKS_S)

    def _start(self, python: str, place: Path, env: dict[str, str]) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asked, open(self._log, "w") as log:
            asked.bind(str(place))
            asked.listen(64)
            subprocess.Popen(
                [python, "-m", "tests.support.forge", self.imports, str(asked.fileno())],
                env=env, cwd=ROOT, pass_fds=[asked.fileno()], start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def close(self) -> None:
        self._socket.close()

    def fork(self, request: Request, *streams: int) -> int:
        """Returns the child's pid. Raises RuntimeError if the forge cannot fork.

        streams: for its standard input, output and error, and the pipe for its exit status.
        """
        try:
            said = json.dumps(asdict(request)).encode()
            with self._lock:
                socket.send_fds(self._socket, [said], streams)
                return int(self._socket.recv(64))
        except (OSError, ValueError) as e:  # ValueError: nothing came, it has ended
            raise RuntimeError(
                f"the forge that imports {self.imports} does not fork: {e}\n{self._log.read_text()[-3000:]}"
            ) from e


_forges: dict[tuple[str, str], Forge] = {}
_making = threading.Lock()


def forge_of(python: str, name: str, env: dict[str, str]) -> Forge | None:
    """The forge for a child of this name and environment; None if the child has to be started anew."""
    if (
        env.get("CUDA_VISIBLE_DEVICES") != ""
        or os.environ.get("XFER_TEST_FORGE") == "0"
        or "XFER_TEST_FORGES" not in os.environ  # not in pytest: of a benchmark, say
        or os.environ.get("XFER_JITTER_CHILDREN") == "1"
        or "XFER_TIMELINE" in env  # which xfer reads when it is imported
    ):
        return None
    imports = OF.get(name, "torch")
    theirs = {k: v for k, v in env.items() if not k.startswith(OURS)}
    with _making:
        forge = _forges.get((python, imports))
        if forge is None:
            _forges[python, imports] = forge = Forge(python, imports, theirs)
    return forge if theirs == forge.env else None


def start(
    python: str, run: Sequence[str], env: dict[str, str], cwd: Path, out: IO | None, err: IO, host: Host | None = None
) -> Forged | subprocess.Popen:
    """Runs `python run…` in a session of its own, forked if that is possible.

    Args:
        out: file for standard output, with empty standard input; None: both are pipes to the caller, as text.
        host: An emulated host to run on.
    """
    name = run[1].rpartition(".")[2] if run[0] == "-m" else Path(run[0]).stem
    forge = forge_of(python, name, env)
    if forge is None:
        ours = (subprocess.PIPE, subprocess.PIPE) if out is None else (subprocess.DEVNULL, out)
        command = [python, *run] if host is None else host.command(python, *run)
        return subprocess.Popen(
            command, env=env, cwd=cwd, text=True, start_new_session=True, stdin=ours[0], stdout=ours[1], stderr=err
        )
    request = Request(tuple(run), env, str(cwd), host)
    said, says = os.pipe()
    status = os.fdopen(said, "rb")
    with os.fdopen(says, "wb"):
        if out is not None:
            with open(os.devnull) as nothing:
                return Forged(
                    forge.fork(request, nothing.fileno(), out.fileno(), err.fileno(), says), status, None, None
                )
        (its_in, to_it), (from_it, its_out) = os.pipe(), os.pipe()
        with os.fdopen(its_in), os.fdopen(its_out, "w"):
            stdin, stdout = os.fdopen(to_it, "w"), os.fdopen(from_it)
            return Forged(forge.fork(request, its_in, its_out, err.fileno(), says), status, stdin, stdout)


# ---- in the forge


def serve(asked: socket.socket) -> Request | None:
    """Forks at each request. Returns in each child its request; None when the tests have ended."""
    # It becomes the parent of orphans among what it has forked: nobody else may wait for them.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    place, told_to, waits = asked.getsockname(), {}, selectors.DefaultSelector()
    woken, wakes = socket.socketpair()
    for s in (woken, wakes):
        s.setblocking(False)
    signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for s in (asked, woken):
        waits.register(s, selectors.EVENT_READ)
    served = time.monotonic()
    while os.path.exists(place) and time.monotonic() < served + IDLE_S:
        for key, _ in waits.select(1.0):
            if (s := key.fileobj) is woken:
                woken.recv(4096)
                tell_ended(told_to)
                continue
            if s is asked:
                waits.register(asked.accept()[0], selectors.EVENT_READ)
                continue
            said, streams, _, _ = socket.recv_fds(s, 1 << 20, 4)
            if not said:
                waits.unregister(s)
                s.close()
            elif pid := os.fork():
                *standard, told_to[pid] = streams
                for fd in standard:
                    os.close(fd)
                s.send(str(pid).encode())
            else:
                ours = [wakes, *(k.fileobj for k in waits.get_map().values())]
                waits.close()
                leave_forge(streams, [*(x.detach() for x in ours), *told_to.values()])
                fields = json.loads(said)
                return Request(**{**fields, "host": fields["host"] and Host(**fields["host"])})
        if len(waits.get_map()) > 2:
            served = time.monotonic()
    return None


def leave_forge(streams: Sequence[int], ours: Sequence[int]) -> None:
    """In a child: makes the first three of `streams` its standard ones, closes the forge's files, and leaves its session and signals."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for fd, stream in enumerate(streams[:3]):
        os.dup2(stream, fd)
    for fd in (*streams, *ours):
        os.close(fd)
    os.setsid()


def tell_ended(told_to: dict[int, int]) -> None:
    """Waits for all children that have ended, and writes the exit status of each that was asked for."""
    with contextlib.suppress(ChildProcessError):  # there are no others
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if (fd := told_to.pop(ended[0], None)) is not None:
                with contextlib.suppress(BrokenPipeError):  # the test process has ended
                    os.write(fd, str(os.waitstatus_to_exitcode(ended[1])).encode())
                os.close(fd)


def become(request: Request) -> None:
    """Runs the request as a new Python would."""
    os.environ.clear()
    os.environ.update(request.env)
    os.chdir(request.cwd)
    if request.host is None:
        run(request)
    else:
        request.host.run(run, request)


def run(request: Request) -> None:
    if request.env.get("PYTHONWARNINGS") == "ignore":
        warnings.simplefilter("ignore")
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # else all have the same numbers; a fork seeds Python's own anew
    if request.run[0] == "-m":
        sys.argv = [request.run[1], *request.run[2:]]
        runpy.run_module(request.run[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(request.run)
        sys.path[0] = str(Path(request.run[0]).resolve().parent)
        runpy.run_path(request.run[0], run_name="__main__")


def main() -> None:
    from examples.common.gloo_threads import few_threads

    asked = socket.socket(fileno=int(sys.argv[2]))
    IMPORTS[sys.argv[1]]()
    few_threads()
    gc.freeze()  # else each collection in each child visits all objects, and copies their pages
    # vLLM calls it when an engine ends, and collects then: seconds of a processor in each worker.
    gc.unfreeze = lambda: None
    if torch := sys.modules.get("torch"):
        # At its first use after a fork, torch makes a pool of threads anew, without a lock: of two threads that come then, one fails by
        # "Invalid thread pool!". The child's first thread comes before all others, also in what it forks itself.
        os.register_at_fork(after_in_child=lambda: torch.set_num_threads(torch.get_num_threads()))
    if (request := serve(asked)) is None:
        return
    code = 0
    try:
        become(request)
    except SystemExit as e:
        code = 0 if e.code is None else e.code
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
