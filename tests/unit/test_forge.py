"""A process that is forked for a test is as one that is started anew: arguments, files, environment, session, and end."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import forge
from tests.support.hosts import ended
from tests.support.proc import environment
from tests.support.world import until_true

CHILD = '''
import atexit, json, os, random, signal, sys, time
atexit.register(lambda: print("at exit", flush=True))

def kinds():
    """Of the files that are open beside the standard ones."""
    for fd in os.listdir("/proc/self/fd"):
        if int(fd) > 2 and os.path.lexists(f"/proc/self/fd/{fd}"):  # else it was that of the listing
            yield os.readlink(f"/proc/self/fd/{fd}").split(":")[0]

print(json.dumps(dict(
    argv=sys.argv[1:], main=__name__, here=sys.path[0], cwd=os.getcwd(), sid=os.getsid(0) == os.getpid(), rank=os.environ.get("RANK"),
    open=sorted(kinds()),
    torch="torch" in sys.modules, drawn=random.random(), dies=signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL,
)), flush=True)
for line in sys.stdin:
    if "hang" in line: time.sleep(60)
    if "raise" in line: raise ValueError("as told")
    if "words" in line: sys.exit("in words")
    sys.exit(int(line))
'''


@pytest.fixture(scope="module")
def forges(tmp_path_factory):
    """Of these tests alone: another's was made in the environment that its first child asked for."""
    yield (folder := tmp_path_factory.mktemp("f"))
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def forking(monkeypatch, forges):
    """Whatever the variables of this test process are."""
    monkeypatch.setattr(forge, "_forges", {})
    for name, value in (("XFER_TEST_FORGES", str(forges)), ("XFER_TEST_FORGE", "1"), ("CUDA_VISIBLE_DEVICES", "")):
        monkeypatch.setenv(name, value)
    for name in ("XFER_JITTER_CHILDREN", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)


def started(tmp_path: Path, text: str, *args: str, **env: str):
    """A process that runs a script of this text, in this folder. Its standard error goes to `err` there."""
    script = tmp_path / "child.py"
    script.write_text(text)
    with open(tmp_path / "err", "w") as err:
        return forge.start(sys.executable, [str(script), *args], environment(**env), tmp_path, None, err)


ENDS = [
    ("0", 0, ""),
    ("raise", 1, "ValueError: as told"),
    ("words", 1, "in words"),
    ("hang", -9, ""),
    ("hang", -6, "child.py"),
]


@pytest.mark.parametrize("word, code, says", ENDS)
def test_a_process_sees_what_it_would_see_started_anew_and_ends_as_it_would(monkeypatch, tmp_path, word, code, says):
    """By itself or by a signal. SIGABRT prints the stacks of its threads."""
    drawn = set()
    for forked in (True, True, False):
        monkeypatch.setenv("XFER_TEST_FORGE", str(int(forked)))
        p = started(tmp_path, CHILD, "a b", "c", RANK="3")
        said = json.loads(p.stdout.readline())
        assert forked == isinstance(p, forge.Forged) == said.pop("torch")
        drawn.add(said.pop("drawn"))
        assert not {"pipe", "socket"} & set(said.pop("open")), "of others, who would not see them closed"
        places = dict(here=str(tmp_path), cwd=str(tmp_path))
        assert said == dict(argv=["a b", "c"], main="__main__", sid=True, rank="3", dies=True, **places)
        assert p.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            p.wait(0.05)
        p.stdin.write(word + "\n")
        p.stdin.flush()
        if code < 0:
            time.sleep(0.2)
            os.killpg(p.pid, -code)
        assert p.wait(10) == p.poll() == code and p.stdout.read() == ("at exit\n" if code >= 0 else "")
        err = (tmp_path / "err").read_text()
        assert says in err and (says or not err)
        p.stdin.close()
        p.stdout.close()
    assert len(drawn) == 3, "each has random numbers of its own"


def test_nothing_is_forked_where_no_folder_of_forges_is_named(monkeypatch):
    monkeypatch.delenv("XFER_TEST_FORGES")
    assert forge.forge_of(sys.executable, "child", environment()) is None


def test_settings_of_a_framework_that_differ_need_a_new_process():
    """Not those that an import makes: all tests import torch's compiler at some time, which sets a variable."""
    code = "import json, os, torch._dynamo; print(json.dumps(dict(os.environ)))"
    before = environment()
    told = subprocess.run([sys.executable, "-c", code], env=before, capture_output=True, check=True, timeout=120).stdout
    assert (after := json.loads(told.splitlines()[-1])) != before, "it sets nothing, so this tests nothing"
    mine = environment(RANK="1", XFER_FAULT="x")
    found = [forge.forge_of(sys.executable, "any", env) for env in (before, after, mine)]
    assert found[0] is found[1] is found[2] is not None
    for other in (dict(OMP_NUM_THREADS="2"), dict(VLLM_LOGGING_LEVEL="DEBUG"), dict(CUDA_VISIBLE_DEVICES="0")):
        assert forge.forge_of(sys.executable, "any", environment(**other)) is None, other


ORPHAN = """
import os, time
if not os.fork():
    os.setsid()
    print(os.getpid(), flush=True)
    time.sleep(60)
time.sleep(60)
"""


def test_test_processes_share_a_forge_that_waits_for_orphans_and_ends_with_its_folder(monkeypatch, tmp_path, forges):
    """Without anybody to wait for it, an orphan would stay a zombie where process 1 waits for none."""
    parents, children = [], []
    for _ in range(2):
        monkeypatch.setattr(forge, "_forges", {})
        children.append(started(tmp_path, ORPHAN))
        parents.append(parent_of(children[-1].pid))
    ours, theirs = map(parent_of, parents)
    assert ours == theirs and "forge" in Path(f"/proc/{ours}/cmdline").read_text()
    orphans = [int(p.stdout.readline()) for p in children]
    for p in children:
        os.killpg(p.pid, signal.SIGKILL)
        assert p.wait(10) == -signal.SIGKILL
    assert [parent_of(pid) for pid in orphans] == parents
    for pid in orphans:
        os.kill(pid, signal.SIGKILL)
    until_true(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in orphans))
    shutil.rmtree(forges)
    until_true(lambda: ended(ours))


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
