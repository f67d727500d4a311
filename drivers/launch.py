"""Find out which process of a run this is, from what torchrun, or whoever started it, wrote into the environment."""

from __future__ import annotations

import os
import shlex
from collections.abc import Generator, Mapping, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    import torch

    from ironfn.mesh.axis import Mesh
    from ironfn.spec.records import RunSpec

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

_KERNELS = MappingProxyType(dict.fromkeys(("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"), "256"))
"""How many kernels for products of one shape torch, and oneDNN inside it, keep. Both keep 1024 by themselves."""


def bound_kernels(environment: MutableMapping[str, str] = os.environ) -> None:
    """Bound the memory of the kernels that are made for each shape of a product, 1 MB each, before torch is loaded.

    What the environment says already is left as it is.
    """
    for name, count in _KERNELS.items():
        environment.setdefault(name, count)


@frozen
class Ranks:
    """Tell which of ``size`` processes this is, and which of the ``local_size`` on this machine.

    address, port: where they meet; "" and 0 for a process alone. hosted: whether the launcher keeps the store there.
    attempt: how often the launcher has started the run anew.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    address: str = ""
    port: int = 0
    hosted: bool = False
    attempt: int = 0

    @staticmethod
    def here(environment: Mapping[str, str] = os.environ) -> Ranks:
        """Read the environment. ValueError where what torchrun writes is there in part, or makes no sense."""
        if "WORLD_SIZE" not in environment:
            return Ranks()
        size = _number(environment, "WORLD_SIZE", 1)
        if size == 1:
            return Ranks()
        missing = [name for name in RANK_VARIABLES if name not in environment]
        if missing:
            raise ValueError(
                f"WORLD_SIZE is {size}, but {', '.join(missing)} is not set; start the ranks with torchrun"
            )
        rank = _number(environment, "RANK", 0, size)
        local_size = _number(environment, "LOCAL_WORLD_SIZE", 1) if "LOCAL_WORLD_SIZE" in environment else size
        local_rank = _number(environment, "LOCAL_RANK", 0, local_size) if "LOCAL_RANK" in environment else rank
        port = _number(environment, "MASTER_PORT", 1, 1 << 16)
        hosted = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        attempt = _number(environment, "TORCHELASTIC_RESTART_COUNT", 0) if hosted else 0
        return Ranks(rank, size, local_rank, local_size, environment["MASTER_ADDR"], port, hosted, attempt)

    @property
    def speaks(self) -> bool:
        """Tell whether this process speaks for the machine before the ranks know of each other."""
        return self.local_rank == 0


def _number(environment: Mapping[str, str], name: str, low: int, end: int | None = None) -> int:
    text = environment[name]
    if not text.isdecimal() or int(text) < low or (end is not None and int(text) >= end):
        limit = f"at least {low}" if end is None else f"from {low} to {end - 1}"
        raise ValueError(f"the environment variable {name} is {text!r}, not a number {limit}; torchrun sets it")
    return int(text)


def quieten(environment: MutableMapping[str, str] = os.environ) -> None:
    """Keep torch's warnings of lost connections to itself, 30 lines of C++ frames each: the error says it in one.

    To be called before torch is loaded. Its errors, such as NCCL's, are shown, and so is all where a level is set.
    """
    if Ranks.here(environment).size > 1:
        environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def processes() -> int:
    """Count the processes of this run."""
    return Ranks.here().size


@contextmanager
def launched(spec: RunSpec) -> Generator[tuple[Mesh, torch.device]]:
    """Join the processes of a run into the mesh of its spec; yield it, and the device of this rank.

    ValueError for a device that is not there; MeshError where the others do not come within ``mesh.timeout`` seconds.
    """
    import torch

    from ironfn.mesh.axis import SINGLE
    from ironfn.mesh.call import MeshError
    from ironfn.mesh.processes import connect, tcp_store

    from .build import pick_device

    ranks = Ranks.here()
    device = pick_device(spec.train.device, ranks.local_rank)
    if ranks.size == 1:
        yield SINGLE, device
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    serve, timeout = ranks.rank == 0 and not ranks.hosted, spec.mesh.timeout
    try:
        store = tcp_store(ranks.address, ranks.port, serve=serve, attempt=ranks.attempt, timeout=timeout)
    except (RuntimeError, TimeoutError) as error:
        why = str(error).partition("\n")[0]
        raise MeshError(
            f"rank {ranks.rank} cannot reach the store at {ranks.address}:{ranks.port} ({why}): rank 0 or the launcher "
            "has to be there within mesh.timeout seconds"
        ) from error
    mesh, backend = spec.mesh, "nccl" if device.type == "cuda" else "gloo"
    with connect(
        store, ranks.rank, ranks.size, dp=mesh.dp, tp=mesh.tp, ep=mesh.ep,
        sequence_parallel=mesh.sequence_parallel, backend=backend, timeout=timeout,
        holder="the launcher" if ranks.hosted else "rank 0",
    ) as joined:  # fmt: skip
        yield joined, device


def threads(given: int | None, local_size: int) -> int | None:
    """Return how many threads a rank computes with: those given, else its share of the cores; None if torch decides."""
    if given is not None or local_size == 1:
        return given
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // local_size)


def command(spec: Path, size: int, local_size: int | None = None, verb: str = "pretrain") -> str:
    """Return the command that starts, or goes on with, the run of a spec on ``size`` ranks.

    >>> command(Path("a.yaml"), 1)
    'ironfn pretrain a.yaml'
    >>> command(Path("a.yaml"), 4)
    'torchrun --nproc-per-node 4 -m ironfn pretrain a.yaml'
    >>> command(Path("a.yaml"), 16, 8)
    'torchrun --nnodes 2 --nproc-per-node 8 … -m ironfn pretrain a.yaml'
    """
    local = local_size or size
    if size == 1:
        start = "ironfn"
    elif local == size:
        start = f"torchrun --nproc-per-node {size} -m ironfn"
    else:  # where the nodes meet is not ours to know
        start = f"torchrun --nnodes {-(-size // local)} --nproc-per-node {local} … -m ironfn"
    return f"{start} {verb} {shlex.quote(str(spec))}"
