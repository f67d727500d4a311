"""Spoil a Hugging Face directory in every way that its maker could: used by the tests, and by a child of theirs."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Spoil = Callable[[Path], None]
FILE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"


def split(path: Path) -> tuple[dict[str, Any], bytes]:
    """Return the header and the numbers of a safetensors file."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def join(path: Path, header: str | dict[str, Any], numbers: bytes) -> None:
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + numbers)


def header(change: Callable[[dict[str, Any]], Any]) -> Spoil:
    """Change what the header of the file says, and not the numbers."""

    def spoil(path: Path) -> None:
        described, numbers = split(path / FILE)
        change(described)
        join(path / FILE, described, numbers)

    return spoil


def tensor(**changes: Any) -> Spoil:
    """Change what the header says of one tensor."""
    return header(lambda described: described["model.norm.weight"].update(changes))


def config(**changes: Any) -> Spoil:
    def spoil(path: Path) -> None:
        found = json.loads((path / CONFIG).read_text()) | changes
        (path / CONFIG).write_text(json.dumps(found))

    return spoil


def text(name: str, change: Callable[[str], str]) -> Spoil:
    def spoil(path: Path) -> None:
        (path / name).write_text(change((path / name).read_text()))

    return spoil


def raw(name: str, data: bytes) -> Spoil:
    return lambda path: (path / name).write_bytes(data) and None


def indexed(file: str, extra: str | None = None) -> Spoil:
    """Add an index that says that all tensors lie in ``file``."""

    def spoil(path: Path) -> None:
        described, _ = split(path / FILE)
        weight_map = {name: file for name in described if name != "__metadata__"}
        (path / INDEX).write_text(json.dumps({"weight_map": weight_map | ({extra: file} if extra else {})}))

    return spoil


def outside(name: str) -> Spoil:
    """Move a file beside the directory and leave a link to it."""

    def spoil(path: Path) -> None:
        shutil.move(path / name, path.parent / f"outside-{name}")
        (path / name).symlink_to(path.parent / f"outside-{name}")

    return spoil


def moved(path: Path) -> None:
    (path / FILE).rename(path / "pytorch_model.bin")


def pipe(path: Path) -> None:
    (path / FILE).unlink()
    os.mkfifo(path / FILE)


def folder(path: Path) -> None:
    (path / FILE).unlink()
    (path / FILE).mkdir()


def many(path: Path) -> None:
    one = '"dtype":"F32","shape":[0],"data_offsets":[0,0]'
    join(path / FILE, "{" + ",".join(f'"t{n}":{{{one}}}' for n in range(300_000)) + "}", b"")


def overlapping(described: dict[str, Any]) -> None:
    described["model.layers.0.input_layernorm.weight"]["data_offsets"] = described["model.norm.weight"]["data_offsets"]


DEEP = "[" * 200_000 + "]" * 200_000

CASES: dict[str, tuple[Spoil, str]] = {
    "an index that climbs": (indexed("../outside.safetensors"), "not the name of a file"),
    "an index that is absolute": (indexed("/etc/hostname.safetensors"), "not the name of a file"),
    "an index into a folder": (indexed("a/b.safetensors"), "not the name of a file"),
    "an index of a null byte": (indexed("a\0.safetensors"), "not the name of a file"),
    "an index of a pickle": (indexed("pytorch_model.bin"), "no safetensors file"),
    "an index of nothing": (indexed(FILE, "no.such"), "no.such"),
    "an index without a map": (raw(INDEX, b'{"weight_map": []}'), "weight_map"),
    "weights behind a link": (outside(FILE), "link out of its directory"),
    "a config behind a link": (outside(CONFIG), "link out of its directory"),
    "a tokenizer behind a link": (outside("tokenizer.json"), "link out of its directory"),
    "a header of 2^62 bytes": (raw(FILE, (1 << 62).to_bytes(8, "little") + b"{}"), "no safetensors file"),
    "a header longer than the file": (raw(FILE, (99).to_bytes(8, "little") + b"{}"), "no safetensors file"),
    "a file of three bytes": (raw(FILE, b"abc"), "no safetensors file"),
    "300,000 tensors": (many, "100,000 tensors"),
    "tensors over each other": (header(overlapping), "the next free one"),
    "an offset that lies": (tensor(data_offsets=[1 << 40, (1 << 40) + 128]), "the next free one"),
    "offsets that run backwards": (tensor(data_offsets=[128, 0]), "has -128 bytes"),
    "a shape that lies": (tensor(shape=[1 << 40]), "has 128 bytes"),
    "a negative shape": (tensor(shape=[-1, -32]), "impossible shape"),
    "a shape with a fraction": (tensor(shape=[32.0]), "impossible shape"),
    "a true shape": (tensor(shape=[True, 32]), "impossible shape"),
    "a shape of no end": (tensor(shape=[1] * 100_000), "impossible shape"),
    "a dtype that is none": (tensor(dtype="F33"), "unknown dtype"),
    "a tensor that says more": (tensor(more=1), "not described"),
    "a shard that is cut off": (lambda p: os.truncate(p / FILE, (p / FILE).stat().st_size - 1), "cut off"),
    "a shard with a tail": (lambda p: raw(FILE, (p / FILE).read_bytes() + b"x")(p), "something added"),
    "a name that comes twice": (
        lambda p: join(p / FILE, '{"a":{},"a":{}}', b""), "comes twice",
    ),
    "a deep header": (lambda p: join(p / FILE, DEEP, b""), "not JSON that can be used"),
    "a deep config": (raw(CONFIG, DEEP.encode()), "not JSON that can be used"),
    "a deep index": (raw(INDEX, DEEP.encode()), "not JSON that can be used"),
    "a key that comes twice": (text(CONFIG, lambda s: s.replace("{", '{"vocab_size": 7,', 1)), "comes twice"),
    "not a number": (config(rms_norm_eps=float("nan")), "NaN is not a number"),
    "an infinite number": (text(CONFIG, lambda s: s.replace("0.001", "1e999")), "not a finite number"),
    "a number of 5,000 digits": (text(CONFIG, lambda s: s.replace("64", "6" * 5000)), "not JSON that can be used"),
    "a negative width": (config(hidden_size=-32), "hidden_size"),
    "no layers": (config(num_hidden_layers=0), "num_hidden_layers"),
    "a fraction of a layer": (config(num_hidden_layers=1.5), "num_hidden_layers"),
    "layers without end": (config(num_hidden_layers=10**9), "num_hidden_layers"),
    "a vocabulary without end": (config(vocab_size=10**15), "the config calls for"),
    "a width without end": (config(hidden_size=4 * 10**15, head_dim=8), "the config calls for"),
    "a list of widths": (config(hidden_size=[32]), "hidden_size"),
    "a config that is a list": (raw(CONFIG, b"[1]"), "not a JSON object"),
    "a config that is no text": (raw(CONFIG, b"\xff\xfe{}"), "not JSON that can be used"),
    "an architecture of lists": (config(architectures=[["LlamaForCausalLM"]]), "known are"),
    "a pickle under another name": (raw(FILE, pickle.dumps({"a": [1] * 100})), "no safetensors file"),
    "an archive under another name": (raw(FILE, b"PK\x03\x04" + bytes(200)), "no safetensors file"),
    "a pickle alone": (moved, "is never read"),
    "a pipe": (pipe, "not a regular file"),
    "a folder": (folder, "not a regular file"),
    "rope_parameters of text": (config(rope_parameters="yarn"), "not an object"),
}  # fmt: skip


def refused(path: Path) -> str:
    """Return why a directory is refused. AssertionError where it is not."""
    from ironfn.hf.directory import describe, load_model
    from ironfn.mesh.axis import SINGLE
    from ironfn.model.arch import complete
    from ironfn.model.tables import table

    try:
        described = describe(path)
        load_model(described, complete(described.spec, 1), table(False), SINGLE)
    except ValueError as error:
        return str(error)
    raise AssertionError("it was taken in")


def main(good: Path, work: Path) -> None:
    """Spoil copies of a good directory in every way, and tell the most memory that this process had, in bytes."""
    for number, (spoil, why) in enumerate(CASES.values()):
        path = work / str(number) / "d"
        shutil.copytree(good, path)
        spoil(path)
        assert why in refused(path), why
    # not ru_maxrss: it remembers the process that this one was forked from
    status = Path("/proc/self/status").read_text()
    print(next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM")))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
