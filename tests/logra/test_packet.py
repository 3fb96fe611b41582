"""Packets and full syncs as bytes: read back as they were, and refused when anything is wrong."""

import json
from dataclasses import replace

import hypothesis
import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from hilore_jax.logra import (
    FullSync,
    Packet,
    PacketError,
    Sketches,
    SyncError,
    make_packet,
    message,
    read_message,
)
from hilore_jax.logra.message import decode, encode
from small_run import packet_of, same_bits, start_of

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FACTORS = {"b.q": np.array([[1.5], [-2.0]], BFLOAT16), "a.v": np.array([[0.25]], BFLOAT16)}
PACKET = Packet(update=3, sketches=Sketches(rank=1, seed=9), factors=FACTORS, run="a1")
FIELDS = {
    "update": "3",
    "run": "a1",
    "generator": PACKET.generator,
    "rank": "1",
    "seed": "9",
    "kind": "rademacher",
    "dtype": "float32",
}


@st.composite
def packets(draw):
    kind = draw(st.sampled_from(["rademacher", "gaussian"]))
    dtype = draw(st.sampled_from(["float32", "bfloat16"]))
    rank, seed = draw(st.integers(1, 5)), draw(st.integers(0, 2**64 - 1))
    layers = draw(st.sets(st.text(min_size=1), min_size=1, max_size=4)) - {"__metadata__"}
    hypothesis.assume(layers)
    bits = st.integers(0, 2**16 - 1).filter(lambda x: x & 0x7F80 != 0x7F80)
    factors = {}
    for layer in layers:
        rows = draw(st.integers(1, 4))
        drawn = draw(st.lists(bits, min_size=rows * rank, max_size=rows * rank))
        factors[layer] = np.array(drawn, np.uint16).view(BFLOAT16).reshape(rows, rank)
    sketches = Sketches(rank=rank, seed=seed, kind=kind, dtype=dtype)
    update, run = draw(st.integers(0, 2**31 - 1)), draw(st.text(max_size=3))
    return Packet(update=update, sketches=sketches, factors=factors, run=run)


@hypothesis.given(packets())
def test_a_packet_comes_back_as_it_was(packet):
    data = packet.to_bytes()
    found = Packet.from_bytes(data)
    assert (found.update, found.sketches) == (packet.update, packet.sketches)
    assert found.run == packet.run
    assert found.generator == packet.generator and same_bits(found.factors, packet.factors)
    assert found.to_bytes() == data
    backwards = dict(reversed(packet.factors.items()))
    assert replace(packet, factors=backwards).to_bytes() == data
    assert packet.nbytes == sum(2 * factor.size for factor in packet.factors.values())


def test_a_full_sync_comes_back_as_it_was():
    for dtype in (np.float32, BFLOAT16):
        full = replace(start_of(dtype, 2), run="a1")
        found = FullSync.from_bytes(memoryview(bytearray(full.to_bytes())))
        assert (found.update, found.sketches, found.run) == (2, full.sketches, "a1")
        assert same_bits(found.kernels, full.kernels)
        assert isinstance(read_message(full.to_bytes()), FullSync)
    assert isinstance(read_message(PACKET.to_bytes()), Packet)


def test_the_bytes_are_a_safetensors_file(tmp_path):
    factors = {**FACTORS, "c": np.ones((3, 1), BFLOAT16)}
    data = replace(PACKET, factors=factors).to_bytes()
    found = {name: (t["dtype"], t["shape"]) for name, t in safetensors.deserialize(data)}
    assert found == {"b.q": ("BF16", [2, 1]), "a.v": ("BF16", [1, 1]), "c": ("BF16", [3, 1])}
    path = tmp_path / "packet.safetensors"
    path.write_bytes(data)
    with safetensors.safe_open(path, "np") as file:
        assert FIELDS.items() <= file.metadata().items()


@pytest.mark.parametrize("sent", [PACKET, start_of()], ids=["packet", "full"])
def test_a_flipped_bit_anywhere_is_refused(sent):
    data = bytearray(sent.to_bytes())
    for place in range(0, len(data), 1 if len(data) < 2000 else 13):
        for bit in (1, 4, 32) if len(data) < 2000 else (1 << place % 8,):
            data[place] ^= bit
            with pytest.raises(PacketError):
                read_message(data)
            data[place] ^= bit
    read_message(data)


def test_blanks_of_the_header_are_checked_too():
    data = next(
        data
        for n in range(8)
        if b"} " in (data := replace(PACKET, factors={"q" * (n + 1): FACTORS["b.q"]}).to_bytes())
    )
    with pytest.raises(PacketError, match="checksum is wrong"):
        read_message(data.replace(b"} ", b"}\n", 1))


def test_what_is_cut_short_or_too_long_is_refused():
    data = PACKET.to_bytes()
    for size in range(len(data)):
        with pytest.raises(PacketError, match=r"cut short|checksum"):
            read_message(data[:size])
    with pytest.raises(PacketError, match=rf"cut short: {len(data) - 1} bytes, expected"):
        read_message(data[:-1])
    with pytest.raises(PacketError, match="bytes after its end"):
        read_message(data + b"\0")


def header(fields):
    text = json.dumps(fields).encode()
    return len(text).to_bytes(8, "little") + text


META = {"checksum": "0" * 64, "message": "packet", "schema": str(message.SCHEMA)}


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "no sync message"),
        (b"\x02\0\0\0\0\0\0\0{]", "its header is no JSON"),
        (header([1]), "no JSON object"),
        (header({}), "without the header of one"),
        (safetensors.numpy.save({"a": np.ones(2, np.float32)}), "without the header of one"),
        (header({"__metadata__": {**META, "update": 3}}), "values that are no text"),
        (header({"__metadata__": {**META, "schema": "one"}}), "schema 'one', expected 2"),
        (header({"__metadata__": {**META, "schema": "1"}}), "schema '1', expected 2"),
        (header({"__metadata__": META}), "checksum is wrong"),
        (header({"__metadata__": META, "q": 1}), "no tensors that fit"),
        (
            header({"__metadata__": META, "q": {"dtype": "I8", "shape": [], "data_offsets": []}}),
            "no tensors that fit",
        ),
        (
            header(
                {"__metadata__": META, "q": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}
            ),
            "no tensors that fit",
        ),
    ],
)
def test_what_is_no_packet_is_called_that(data, told):
    with pytest.raises(PacketError, match=told):
        read_message(data)


def test_a_newer_schema_says_to_upgrade(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(message, "SCHEMA", message.SCHEMA + 1)
        data = PACKET.to_bytes()
    with pytest.raises(PacketError, match=r"schema 3, .* reads up to 2: .* newer version"):
        Packet.from_bytes(data)


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_is_needed(field):
    rest = {name: text for name, text in FIELDS.items() if name != field}
    with pytest.raises(PacketError, match=f"lacks the field '{field}', it has"):
        Packet.from_bytes(encode("packet", rest, FACTORS))
    assert Packet.from_bytes(encode("packet", FIELDS, FACTORS)).update == 3


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"generator": "philox"}, "draws projections with 'philox', this hilore_jax with 'three"),
        ({"update": "-1"}, "update is '-1', expected a whole number"),
        ({"update": str(2**31)}, "from 0 to 2"),
        ({"rank": "0"}, "rank is 0"),
        ({"rank": "2"}, r"factor \(1, 1\), expected bfloat16 \[out, 2\]"),
        ({"seed": str(2**64)}, "seed is 1844"),
        ({"kind": "uniform"}, "projections are 'uniform', expected rademacher or gaussian"),
        ({"dtype": "float16"}, "dtype is 'float16'"),
    ],
)
def test_fields_are_checked(changes, told):
    with pytest.raises(PacketError, match=told):
        Packet.from_bytes(encode("packet", FIELDS | changes, FACTORS))
    if "rank" not in changes:
        with pytest.raises(PacketError, match=told):
            FullSync.from_bytes(encode("full sync", FIELDS | changes, FACTORS))


@pytest.mark.parametrize(
    ("factor", "told"),
    [
        (np.ones((2, 1), np.float32), r"a float32 factor \(2, 1\), expected bfloat16 \[out, 1\]"),
        (np.ones((2, 3), BFLOAT16), r"a bfloat16 factor \(2, 3\)"),
        (np.ones(1, BFLOAT16), r"a bfloat16 factor \(1,\)"),
        (np.full((2, 1), np.inf, BFLOAT16), "not finite"),
        (np.full((2, 1), np.nan, BFLOAT16), "not finite"),
    ],
)
def test_factors_are_checked_when_sent_and_when_read(factor, told):
    with pytest.raises(PacketError, match=rf"update 3 holds for q .*{told}"):
        Packet.from_bytes(encode("packet", FIELDS, {"q": factor}))
    if factor.ndim == 2:
        with pytest.raises(PacketError, match=told):
            make_packet(3, Sketches(rank=1), {"q": factor})


def test_layers_need_names_and_kernels_are_matrices():
    for factors in ({}, {"": FACTORS["b.q"]}, {"__metadata__": FACTORS["b.q"]}):
        with pytest.raises(PacketError, match="expected at least one"):
            replace(PACKET, factors=factors)
    with pytest.raises(PacketError, match=r"a float32 kernel \(2, 3, 4\), expected float32 or"):
        FullSync(update=0, sketches=Sketches(), kernels={"q": np.ones((2, 3, 4), np.float32)})
    with pytest.raises(PacketError, match="a float64 kernel"):
        FullSync(update=0, sketches=Sketches(), kernels={"q": np.ones((2, 3))})


def test_one_message_is_not_taken_for_the_other():
    with pytest.raises(PacketError, match="is a 'full sync', expected a packet"):
        Packet.from_bytes(start_of().to_bytes())
    with pytest.raises(PacketError, match="is a 'packet', expected a full sync"):
        FullSync.from_bytes(PACKET.to_bytes())
    with pytest.raises(PacketError, match="is a 'letter', expected a packet"):
        read_message(encode("letter", FIELDS, FACTORS))
    assert issubclass(PacketError, SyncError) and issubclass(SyncError, ValueError)


def test_reading_copies_nothing():
    data = packet_of(0).to_bytes()
    tensors = decode(data).tensors
    whole = np.frombuffer(data, np.uint8)
    assert all(np.shares_memory(array, whole) for array in tensors.values())
