"""Reading GGUF files: numbers as ggml defines them, and nothing believed that a file says of itself."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from ironfn.hf.gguf_file import TYPES, package, read

gguf = package()
KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def tensor_info(name: str = "a", dims: tuple[int, ...] = (32, 2), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def whole(
    keys: tuple[bytes, ...] = (), infos: tuple[bytes, ...] | None = None, *, data: int = 256, version: int = 3,
    tensors: int | None = None, count: int | None = None,
) -> bytes:  # fmt: skip
    infos = (tensor_info(),) if infos is None else infos
    head = b"GGUF" + struct.pack(
        "<IQQ", version, len(infos) if tensors is None else tensors, len(keys) if count is None else count
    )
    head += b"".join(keys) + b"".join(infos)
    return head + b"\0" * (-len(head) % 32) + b"\0" * data


def key(name: str | bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


U32 = struct.pack("<I", 1)
HUGE = struct.pack("<Q", 1 << 62)
FAULTS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "no GGUF file"),
    "pickle": (b"\x80\x04\x95" + b"\0" * 40, "does not begin with GGUF"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + b"\0" * 32, "big-endian"),
    "version": (whole(version=9), "version 9"),
    "tensor-count": (whole(tensors=1 << 62), "at most"),
    "key-count": (whole(count=1 << 62), "at most"),
    "key-length": (whole((HUGE + b"x",)), "should follow"),
    "text-length": (whole((key("k", 8, HUGE),)), "should follow"),
    "array-of-texts": (whole((key("k", 9, struct.pack("<I", 8) + HUGE),)), "more than 2,000,000 items"),
    "array-of-numbers": (whole((key("k", 9, struct.pack("<IQ", 10, 1_900_000)),)), "should follow"),
    "array-in-array": (whole((key("k", 9, struct.pack("<IQ", 9, 1) + U32),)), "array of the unknown type 9"),
    "value-type": (whole((key("k", 77, U32),)), "unknown type 77"),
    "twice-a-key": (whole((key("k", 4, U32), key("k", 4, U32))), "twice"),
    "not-utf8": (whole((key(b"\xff\xfe", 4, U32),)), "not UTF-8"),
    "alignment": (whole((key("general.alignment", 4, struct.pack("<I", 3)),)), "no power of two"),
    "alignment-text": (whole((key("general.alignment", 8, text("32")),)), "no power of two"),
    "dimensions": (whole(infos=(text("a") + struct.pack("<I", 1 << 31),)), "dimensions"),
    "shape": (whole(infos=(tensor_info(dims=(1 << 62, 1 << 62)),)), "impossible shape"),
    "zero": (whole(infos=(tensor_info(dims=(0, 4)),)), "impossible shape"),
    "block": (whole(infos=(tensor_info(dims=(33, 2), kind=8),)), "impossible shape"),
    "ggml-type": (whole(infos=(tensor_info(kind=39),)), "ggml type 39"),
    "offset": (whole(infos=(tensor_info(offset=1 << 50),)), "not behind the one before"),
    "over-another": (whole(infos=(tensor_info(), tensor_info("b"))), "not behind the one before"),
    "twice-a-tensor": (whole(infos=(tensor_info(), tensor_info(offset=256)), data=512), "twice"),
    "cut-off": (whole(data=255), "cut off"),
    "added": (whole(data=300), "something was added"),
}


@pytest.mark.parametrize("name", list(FAULTS))
def test_a_file_that_lies_is_refused_before_memory_is_taken(name: str, tmp_path: Path) -> None:
    data, what = FAULTS[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=what) as caught:
            read(path)
        assert tracemalloc.get_traced_memory()[1] < 50e6
    finally:
        tracemalloc.stop()
    assert str(path) in str(caught.value)


def test_what_was_not_damaged_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(
        whole((key("k", 6, struct.pack("<f", 1e-5)), key("words", 9, struct.pack("<IQ", 8, 1) + text("é"))))
    )
    file = read(path)
    assert dict(file.metadata) == {"k": 1e-5, "words": ["é"]}
    assert file.tensor("a").equal(torch.zeros(2, 32))


def test_every_beginning_of_a_file_is_refused(tmp_path: Path) -> None:
    data = whole((key("k", 4, U32), key("w", 9, struct.pack("<IQ", 8, 2) + text("ab") + text("c"))))
    path = tmp_path / "model.gguf"
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(ValueError, match=r"model\.gguf"):
            read(path)


def test_a_flipped_byte_is_read_or_refused_and_nothing_else(tmp_path: Path) -> None:
    data = whole((key("k", 4, U32), key("w", 9, struct.pack("<IQ", 8, 2) + text("ab") + text("c"))))
    path = tmp_path / "model.gguf"
    refused = 0
    for at in range(len(data) - 256):
        for flip in (1, 0x80, 0xFF):
            path.write_bytes(data[:at] + bytes([data[at] ^ flip]) + data[at + 1 :])
            try:
                read(path)
            except ValueError:
                refused += 1
    assert refused > 300


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a file"):
        read(tmp_path)


def half(data: bytes, at: int) -> float:
    return float(np.frombuffer(data, np.float16, 1, at)[0])


def q8_0(b: bytes) -> list[float]:
    return [half(b, 0) * q for q in np.frombuffer(b, np.int8, 32, 2).tolist()]


def q4_0(b: bytes) -> list[float]:
    return [half(b, 0) * (q - 8) for q in [x & 15 for x in b[2:]] + [x >> 4 for x in b[2:]]]


def q4_1(b: bytes) -> list[float]:
    return [half(b, 0) * q + half(b, 2) for q in [x & 15 for x in b[4:]] + [x >> 4 for x in b[4:]]]


def q4_k(b: bytes) -> list[float]:
    """ggml's block of 256: eight groups of 32, whose scales and minima have 6 bits each in 12 bytes."""
    packed, out = b[4:16], list[float]()
    for group in range(8):
        if group < 4:
            scale, least = packed[group] & 63, packed[group + 4] & 63
        else:
            scale = (packed[group + 4] & 15) | (packed[group - 4] >> 6) << 4
            least = (packed[group + 4] >> 4) | (packed[group] >> 6) << 4
        quants = b[16 + 32 * (group // 2) :][:32]
        for q in quants:
            out.append(half(b, 0) * scale * (q >> 4 if group % 2 else q & 15) - half(b, 2) * least)
    return out


def q6_k(b: bytes) -> list[float]:
    """ggml's block of 256: low 4 bits, high 2 bits, an int8 scale for each 16."""
    low, high, scales = b[:128], b[128:192], np.frombuffer(b, np.int8, 16, 192).tolist()
    out = [0.0] * 256
    for n in range(256):
        part, rest = divmod(n, 128)
        quarter, i = divmod(rest, 32)
        nibble = low[64 * part + i + 32 * (quarter % 2)] >> (4 * (quarter // 2)) & 15
        bits = high[32 * part + i] >> (2 * quarter) & 3
        out[n] = half(b, 208) * scales[n // 16] * ((nibble | bits << 4) - 32)
    return out


BLOCKS: dict[str, Callable[[bytes], list[float]]] = {
    "Q8_0": q8_0, "Q4_0": q4_0, "Q4_1": q4_1, "Q4_K": q4_k, "Q6_K": q6_k,
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_what_ggml_defines(kind: str, tmp_path: Path) -> None:
    g = np.random.default_rng(0)
    number, block, size = TYPES[kind]
    rows, width = 3, 512
    raw = g.integers(0, 256, rows * width // block * size, np.uint8)
    if kind in BLOCKS:
        for at in range(0, len(raw), size):  # scales that are numbers
            for place in {"Q4_1": (0, 2), "Q4_K": (0, 2), "Q6_K": (208,)}.get(kind, (0,)):
                raw[at + place : at + place + 2] = np.frombuffer(np.float16(g.uniform(0.01, 1)).tobytes(), np.uint8)
        expected = [x for at in range(0, len(raw), size) for x in BLOCKS[kind](raw[at : at + size].tobytes())]
        right = torch.tensor(expected, dtype=torch.float64).view(rows, width)
    else:
        plain = torch.from_numpy(g.normal(size=(rows, width))).to(
            {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
        )
        raw, right = plain.view(torch.uint8).numpy(), plain.double()
    path = tmp_path / "model.gguf"
    data = whole(infos=(tensor_info(dims=(width, rows), kind=number),), data=0) + raw.tobytes()
    path.write_bytes(data + b"\0" * (-len(data) % 32))
    found = read(path).tensor("a")
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), right, rtol=1e-6, atol=1e-6)
    theirs = gguf.GGUFReader(path).tensors[0]
    assert np.array_equal(found.numpy(), gguf.quants.dequantize(theirs.data, theirs.tensor_type).reshape(rows, width))
