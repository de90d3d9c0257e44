"""What is forked for a test is as one that is started anew: its words, files, environment, session, and end."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.support import forge
from tests.support.proc import ROOT, environment

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
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("forge") / "child.py"
    path.write_text(CHILD)
    return path


@pytest.fixture(autouse=True, scope="module")
def forges():
    """Of these tests alone: another's was made in the environment that its first child asked for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forge, "_forges", made := {})
        yield
        for f in made.values():
            f.close()


@pytest.fixture(params=["forked", "anew"])
def start(request, script, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("XFER_TEST_FORGE", "0" if request.param == "anew" else "1")
    monkeypatch.delenv("XFER_JITTER_CHILDREN", raising=False)
    started = []

    def start(*args, **env):
        with open(tmp_path / "err", "w") as err:
            p = forge.start(sys.executable, [str(script), *args], environment(**env), tmp_path, None, err)
        assert isinstance(p, forge.Forged) == (request.param == "forked")
        started.append(p)
        return p, json.loads(p.stdout.readline())

    yield start
    for p in started:
        p.kill()
        p.wait(10)
        p.stdin.close()
        p.stdout.close()


def say(p, word):
    p.stdin.write(word + "\n")
    p.stdin.flush()


def test_a_process_sees_what_it_would_see_started_anew(start, script, tmp_path):
    p, said = start("a b", "c", RANK="3")
    assert said.pop("torch") == isinstance(p, forge.Forged)
    assert len({said.pop("drawn"), *(start()[1]["drawn"] for _ in range(2))}) == 3, "each has random numbers of its own"
    assert not {"pipe", "socket"} & set(said.pop("open")), "of others, who would not see them closed"
    assert said == dict(
        argv=["a b", "c"], main="__main__", here=str(script.parent), cwd=str(tmp_path), sid=True, rank="3", dies=True
    )
    assert p.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        p.wait(0.05)


@pytest.mark.parametrize("word, code", [("0", 0), ("7", 7), ("raise", 1), ("words", 1)])
def test_it_ends_as_it_would(start, tmp_path, word, code):
    p, _ = start()
    say(p, word)
    assert p.wait(10) == p.poll() == code and p.stdout.read() == "at exit\n"
    assert ("ValueError: as told" in (tmp_path / "err").read_text()) == (word == "raise")
    assert ("in words" in (tmp_path / "err").read_text()) == (word == "words")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
def test_it_is_ended_by_signals_with_the_stacks_of_its_threads(start, tmp_path, number):
    p, _ = start()
    say(p, "hang")
    time.sleep(0.2)
    os.killpg(p.pid, number)
    assert p.wait(10) == -number
    assert ("child.py" in (tmp_path / "err").read_text()) == (number == signal.SIGABRT)


@pytest.fixture
def forgeable(monkeypatch):
    """TORCHINDUCTOR_CACHE_DIR: a test before this one may have set it."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("XFER_TEST_FORGE", "XFER_JITTER_CHILDREN", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)


def test_a_child_with_other_settings_of_a_framework_is_started_anew(forgeable):
    assert forge.forge_of(sys.executable, "any", environment(RANK="1", XFER_FAULT="x")) is not None
    for other in (dict(OMP_NUM_THREADS="2"), dict(VLLM_LOGGING_LEVEL="DEBUG"), dict(CUDA_VISIBLE_DEVICES="0")):
        assert forge.forge_of(sys.executable, "any", environment(**other)) is None, other


def test_settings_that_an_import_makes_do_not_matter(forgeable):
    """Tests import frameworks too, in any order; all of them import torch's compiler, which sets a variable."""
    code = "import json, os, torch._dynamo; print(json.dumps(dict(os.environ)))"
    before = environment()
    told = subprocess.run([sys.executable, "-c", code], env=before, capture_output=True, check=True, timeout=120).stdout
    after = json.loads(told.splitlines()[-1])
    assert after != before, "it sets nothing, so this tests nothing"
    assert forge.forge_of(sys.executable, "any", before) is forge.forge_of(sys.executable, "any", after) is not None


def test_a_forge_that_cannot_import_says_why(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    broken = forge.Forge(sys.executable, "no such imports", environment())
    with open(os.devnull) as nothing, pytest.raises(RuntimeError, match="KeyError: 'no such imports'"):
        broken.fork(forge.Request(("x.py",), {}, str(ROOT)), *[nothing.fileno()] * 3)


def test_children_that_are_named_are_modules_and_scripts_of_the_tests():
    places = [ROOT / p for p in ("tests/support", "tests/functional", "examples/demo")]
    assert not [n for n in forge.OF if not any((p / f"{n}.py").exists() for p in places)]
