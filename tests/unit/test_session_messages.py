"""Control messages: bytes decode to a valid message or raise ProtocolError, and nothing is unpickled."""

import ast
import pathlib
import pickle

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import xfer
from tests.support.examples import EXAMPLES
from xfer.coordinator import messages as m
from xfer.errors import _BY_NAME, PeerLost, ProtocolError, Unsupported, XferError, from_wire
from xfer.transport.group import Aborted

SAMPLES = [
    m.Hello("trainer", 0, 4, 0, "host", 1),
    m.Enter(1, m.Arguments("7", True, 1, 60.0)),
    m.Measured(9, 1, 2, b"\0\0\0\0", b"\0\0\x80\x3f"),
    m.Ready(1, 0.5, 3, True, sample=b"s"),
    m.Abort(0, 1, 2, m.WireError("PeerLost", "gone", ("a", "b"), "trainer 1")),
    m.Go(3, (0, 2), (1, 4), "7", True, 60.0),
    m.Done(3, (0, 2), (m.Moved(2, 10, 20, 0.1, 0.2, 0.3, 0.0, (m.Checksum(0, b"12345678"),)),)),
    m.StoreAsk(m.StoreCall.SET, ("r0/e1/key",), b"value"),
]


@st.composite
def damaged(draw) -> bytes:
    """A message of which a byte is changed, or that is cut."""
    wire = bytearray(m.encode(draw(st.sampled_from(SAMPLES))))
    at = draw(st.integers(0, len(wire) - 1))
    if draw(st.booleans()):
        return bytes(wire[:at])
    wire[at] ^= draw(st.integers(1, 255))
    return bytes(wire)


@settings(max_examples=2 * EXAMPLES, deadline=None)
@given(st.binary(max_size=300) | damaged())
def test_any_bytes_are_refused_or_are_a_valid_message(data):
    try:
        message = m.decode(data)
    except ProtocolError:
        return
    assert type(message) in m.Message.__args__ and m.decode(m.encode(message)) == message


def test_a_message_that_the_other_end_would_refuse_is_not_sent():
    for message in SAMPLES:
        assert m.decode(m.encode(message)) == message
    for label, want in (("x" * 300, 1), ("a", -1), ("a\ud800", 1)):
        with pytest.raises(ProtocolError, match="Enter cannot be sent"):
            m.encode(m.Enter(1, m.Arguments(label, False, want, 1.0)))
    told = m.Failed(m.WireError.of(ValueError("surrogates \udcff"), "x"))
    assert "surrogates" in m.decode(m.encode(told)).error.message


def test_unknown_fields_and_bounds_are_refused():
    raw = msgspec.to_builtins(SAMPLES[0])
    assert m.decode(msgspec.msgpack.encode(raw)) == SAMPLES[0]
    fields = ["tag", *m.Hello.__struct_fields__]
    for name, value in {"role": "root", "index": -1, "host": "x" * 300, "size": 1 << 40, "tag": "Unknown"}.items():
        bad = list(raw)
        bad[fields.index(name)] = value
        with pytest.raises(ProtocolError):
            m.decode(msgspec.msgpack.encode(bad))
    for bad in ([*raw, 1], raw[:3], dict(zip(fields, raw))):
        with pytest.raises(ProtocolError):
            m.decode(msgspec.msgpack.encode(bad))


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.text(max_size=300))
def test_store_keys_stay_inside_their_prefix(key):
    """Those that gloo and NCCL use are accepted."""
    for good in ("r1/e2/0/1", "r1/e2/rank_3", "r1/e12/nccl:0:p2p"):
        m.check_store_key(good, "r1/")
    try:
        m.check_store_key(key, "r1/")
    except ProtocolError:
        return
    assert key.startswith("r1/") and len(key) <= 256 and ".." not in key and key.isascii() and " " not in key


class Special(Unsupported):
    """A class that xfer.errors does not list."""


def test_every_error_crosses_the_wire_as_its_own_type():
    for cls in _BY_NAME.values():
        e = cls("text", ["a", "b"], where="trainer 2")
        back = m.WireError.of(e, "elsewhere").error()
        assert type(back) is cls and str(back) == str(e)
    assert type(from_wire("SystemExit", "boo", (), "")) is XferError
    for e, base in ((Special("text", ["a"]), Unsupported), (Aborted("text"), PeerLost)):
        assert type(m.WireError.of(e, "worker 1").error()) is base
        assert str(pickle.loads(pickle.dumps(e))) == str(e), "children of a test's pool raise them"
    assert "KeyError" in str(m.WireError.of(KeyError("x"), "trainer 1").error())


def test_nothing_in_the_package_unpickles_or_evaluates():
    """No pickle, marshal, eval, exec, torch.load or *_object collective is called anywhere in the library."""
    banned, found = {"pickle", "cloudpickle", "marshal", "shelve", "dill"}, []
    for path in pathlib.Path(xfer.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
                found += [f"{path.name}: imports {n}" for n in names if n.split(".")[0] in banned]
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            safe = any(k.arg == "allow_pickle" and getattr(k.value, "value", True) is False for k in node.keywords)
            if (
                called.endswith(("_object", "_object_list"))  # torch's collectives of objects unpickle what they get
                or called in ("eval", "exec", "torch.load")
                or called in ("np.load", "numpy.load")
                and not safe
            ):
                found.append(f"{path.name}:{node.lineno}: {called}()")
    assert not found, found
