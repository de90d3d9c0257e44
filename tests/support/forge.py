"""Forges: processes that have imported a framework, which takes longer than most tests need a rank, and fork the processes of tests.
Unlike one that is started anew (XFER_TEST_FORGE=0, a step of scripts/nightly.sh), forked ones share one hash of strings and one thread of
gloo's groups; what was imported is never collected nor taken apart; workers of vLLM sleep where they would spin.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import hashlib
import io
import json
import os
import runpy
import select
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
    """A process that a forge has forked, with those calls of `subprocess.Popen` that tests use. `status`: where its exit status comes."""

    def __init__(self, pid: int, status: io.FileIO, stdin: IO[str] | None, stdout: IO[str] | None):
        self.pid, self.returncode, self.stdin, self.stdout = pid, None, stdin, stdout
        self._status, self._lock = status, threading.Lock()

    def wait(self, timeout: float | None = None) -> int:
        if not select.select([self._status], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(f"forked process {self.pid}", timeout)
        with self._lock:  # several threads may wait
            if self.returncode is None:
                self.returncode = int(self._status.read() or -signal.SIGKILL)  # empty if its parent has been killed
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
    """A forge, whose environment is `env`, as a test process sees it. It is started when there is none, and ends when its socket is
    removed or when nobody has asked it for `IDLE_S`. All test processes of a run share the forges of one folder, XFER_TEST_FORGES."""

    def __init__(self, python: str, imports: str, env: dict[str, str]):
        self._command, self.env = [python, "-m", "tests.support.forge", imports], env
        self._place = Path(os.environ["XFER_TEST_FORGES"], f"{imports}-{hashlib.sha1(python.encode()).hexdigest()[:8]}")
        self._connect().close()
        self.env = json.loads(self._place.with_suffix(".json").read_text())

    def _connect(self) -> socket.socket:
        to_it = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with open(self._place.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                to_it.connect(str(self._place))
            except OSError:  # there is none, or it has ended
                self._place.unlink(missing_ok=True)
                self._place.with_suffix(".json").write_text(json.dumps(self.env))
                self._start()
                to_it.connect(str(self._place))
        return to_it

    def _start(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asked:
            asked.bind(str(self._place))
            asked.listen(64)
            with open(self._place.with_suffix(".log"), "w") as log:
                subprocess.Popen(
                    [*self._command, str(asked.fileno())], env=self.env, cwd=ROOT, pass_fds=[asked.fileno()],
                    start_new_session=True, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                )  # fmt: skip

    def fork(self, request: Request, *streams: int) -> tuple[int, io.FileIO]:
        """Returns the child's pid, and where its exit status comes. RuntimeError if the forge cannot fork. `streams`: for its standard
        ones."""
        said, says = os.pipe()
        status = open(said, "rb", buffering=0)
        try:
            with open(says, "wb"), self._connect() as to_it:
                socket.send_fds(to_it, [json.dumps(asdict(request)).encode()], [*streams, says])
            return int(status.readline()), status
        except (OSError, ValueError) as e:  # ValueError: nothing came, it has ended
            log = self._place.with_suffix(".log").read_text()[-3000:]
            raise RuntimeError(f"the forge {self._place.stem} does not fork: {e}\n{log}") from e


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
    """Runs `python run…` in a session of its own, forked if that is possible. `out`: file for standard output, with empty standard input;
    None: both are pipes to the caller, as text. `host`: an emulated host to run on."""
    name = run[1].rpartition(".")[2] if run[0] == "-m" else Path(run[0]).stem
    forge = forge_of(python, name, env)
    if forge is None:
        ours = (subprocess.PIPE, subprocess.PIPE) if out is None else (subprocess.DEVNULL, out)
        command = [python, *run] if host is None else host.command(python, *run)
        return subprocess.Popen(
            command, env=env, cwd=cwd, text=True, start_new_session=True, stdin=ours[0], stdout=ours[1], stderr=err
        )
    request = Request(tuple(run), env, str(cwd), host)
    if out is not None:
        with open(os.devnull) as nothing:
            return Forged(*forge.fork(request, nothing.fileno(), out.fileno(), err.fileno()), None, None)
    (its_in, to_it), (from_it, its_out) = os.pipe(), os.pipe()
    with open(its_in), open(its_out, "w"):
        stdin, stdout = open(to_it, "w"), open(from_it)
        return Forged(*forge.fork(request, its_in, its_out, err.fileno()), stdin, stdout)


# ---- in the forge


def serve(asked: socket.socket) -> Request | None:
    """Forks at each request. Returns in each child its request; None when the tests have ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for parents of children
    asked.settimeout(1.0)
    place, served = asked.getsockname(), time.monotonic()
    while os.path.exists(place) and time.monotonic() < served + IDLE_S:
        with contextlib.suppress(TimeoutError):
            conn, _ = asked.accept()
            said, streams, _, _ = socket.recv_fds(conn, 1 << 20, 4)
            conn.close()
            if said and not os.fork():
                asked.close()
                parent(*streams)
                fields = json.loads(said)
                return Request(**{**fields, "host": fields["host"] and Host(**fields["host"])})
            for fd in streams:
                os.close(fd)
            served = time.monotonic()
    return None


def parent(stdin: int, stdout: int, stderr: int, status: int) -> None:
    """Forks the child, where it returns. Elsewhere it writes the child's pid, waits for it and for the orphans that it leaves, since nobody
    else may, and writes its exit status."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if not (child := os.fork()):
        os.setsid()
        for fd, stream in enumerate((stdin, stdout, stderr)):
            os.dup2(stream, fd)
        for fd in (stdin, stdout, stderr, status):
            os.close(fd)
        return
    for fd in (stdin, stdout, stderr):
        os.close(fd)
    with contextlib.suppress(ChildProcessError), open(status, "wb", buffering=0) as tells:
        tells.write(f"{child}\n".encode())
        while True:
            pid, ended = os.wait()
            if pid == child:
                with contextlib.suppress(BrokenPipeError), tells:  # the test process may have ended
                    tells.write(str(os.waitstatus_to_exitcode(ended)).encode())
    os._exit(0)


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
        os._exit(0)  # taking frameworks apart takes seconds
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
