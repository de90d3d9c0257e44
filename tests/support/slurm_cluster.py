"""A real Slurm on this machine: one slurmctld and a slurmd per emulated node, from Debian's slurm-wlm and munge packages. Needs root.
Everything lies in one folder, with a munge key and ports of its own, so that several may run beside each other."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from examples.common.ports import free_port
from tests.support.hosts import Host
from tests.support.proc import PATIENCE, PYTHON, ROOT

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "sinfo", "scontrol")


def missing() -> str | None:
    gone = [p for p in PROGRAMS if shutil.which(p) is None]
    if gone:
        return f"{', '.join(gone)} not installed: apt-get install slurm-wlm munge"
    if os.geteuid() != 0:
        return "slurmd starts jobs as other users, so it wants root"
    return None


def _on(host: Host | None, *words: str) -> list[str]:
    return list(words) if host is None else host.command(*words)


class Cluster:
    """`hosts`: the nodes, the first of them also for slurmctld. Without them, `nodes` on this machine."""

    def __init__(self, folder: Path, nodes: int = 2, cpus: int = 16, hosts: Sequence[Host] = ()):
        self.folder = Path(folder)
        self._hosts: Sequence[Host | None] = hosts or [None] * nodes
        self.nodes = [f"n{i + 1}" for i in range(len(self._hosts))]
        self._conf = self.folder / "slurm.conf"
        self._cpus = cpus
        pythons = {f"{side.upper()}_PYTHON": python for side, python in PYTHON.items()}
        self.env = {**os.environ, "SLURM_CONF": str(self._conf), **pythons}
        self._daemons: list[subprocess.Popen] = []

    def __enter__(self) -> Cluster:
        try:
            for name in ("state", "log", "run"):
                (self.folder / name).mkdir(parents=True)
            key = self.folder / "munge.key"
            key.write_bytes(secrets.token_bytes(128))
            key.chmod(0o400)
            sock = self.folder / "munge.socket"
            self._start(None, "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={sock}",
                        f"--pid-file={self.folder}/munged.pid",
                        f"--log-file={self.folder}/log/munged.log", f"--seed-file={self.folder}/munged.seed")  # fmt: skip
            self._until(sock.exists, "munged")
            self._conf.write_text(self._text(sock))
            self._start(self._hosts[0], "slurmctld", "-D")
            for node, host in zip(self.nodes, self._hosts):
                self._start(host, "slurmd", "-D", "-N", node)
            self._until(self._idle, "all nodes are idle")
        except BaseException:
            self.__exit__()
            raise
        return self

    def _text(self, sock: Path) -> str:
        f, here = self.folder, (socket.gethostname(), "127.0.0.1")
        where = [here if h is None else (h.name, h.address) for h in self._hosts]
        name, address = where[0]
        lines = [
            "ClusterName=local", f"SlurmctldHost={name}({address})", "SlurmUser=root", "AuthType=auth/munge", "CredType=cred/munge",
            f"AuthInfo=socket={sock}", f"SlurmctldPort={free_port()}", f"StateSaveLocation={f}/state", f"SlurmdSpoolDir={f}/spool-%n",
            f"SlurmctldPidFile={f}/run/slurmctld.pid", f"SlurmdPidFile={f}/run/slurmd-%n.pid", f"SlurmctldLogFile={f}/log/slurmctld.log",
            f"SlurmdLogFile={f}/log/slurmd-%n.log", "ProctrackType=proctrack/linuxproc", "TaskPlugin=task/none",
            "SelectType=select/cons_tres", "SelectTypeParameters=CR_Core", "ReturnToService=2", "SlurmdParameters=config_overrides",
            "MpiDefault=none", "KillWait=5", "SlurmdTimeout=600", "MessageTimeout=60", "InactiveLimit=0",
            *(f"NodeName={n} NodeHostname={h} NodeAddr={at} Port={free_port()} CPUs={self._cpus}" for n, (h, at) in zip(self.nodes, where)),
            f"PartitionName=debug Nodes={','.join(self.nodes)} Default=YES MaxTime=INFINITE State=UP",
        ]  # fmt: skip
        return "\n".join(lines) + "\n"

    def run(self, *words: str, timeout: float = 120, check: bool = False, **env: str) -> subprocess.CompletedProcess:
        """Runs `words` in this repository, where programs of Slurm reach the cluster. env: more variables."""
        how = dict(cwd=ROOT, env={**self.env, **env}, capture_output=True, text=True)
        return subprocess.run(_on(self._hosts[0], *words), timeout=timeout, check=check, **how)

    def _start(self, host: Host | None, *command: str) -> None:
        name = f"{'-'.join(command[:1] + command[2:4])[:40].replace('/', '_')}.out"
        with open(self.folder / "log" / name, "w") as log:
            how = dict(env=self.env, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True)
            self._daemons.append(subprocess.Popen(_on(host, *command), **how))

    def _idle(self) -> bool:
        said = self.run("sinfo", "-h", "-N", "-o", "%N %t")
        return sorted(said.stdout.split("\n"))[1:] == [f"{n} idle" for n in self.nodes]

    def _until(self, condition, what: str, seconds: float = 60) -> None:
        end = time.monotonic() + seconds * PATIENCE
        while not condition():
            dead = [p.args[0] for p in self._daemons if p.poll() is not None]
            if dead or time.monotonic() > end:
                logs = "\n".join(f"--- {p.name}\n{p.read_text()[-1500:]}" for p in (self.folder / "log").iterdir())
                raise RuntimeError(f"{what}: not within {seconds:.0f} s; ended: {dead}\n{logs}")
            time.sleep(0.2)

    def __exit__(self, *exc) -> None:
        if self._daemons and self._conf.exists():
            self.run("scancel", "--full", "--signal=KILL", "--user=root")
        for p in reversed(self._daemons):  # munged last: the others speak through it
            p.terminate()
            try:
                p.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(p.pid, signal.SIGKILL)
                p.wait(10)
