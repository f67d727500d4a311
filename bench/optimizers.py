"""Measure the optimizers' updates against torch's, at the shapes of SmolLM2-135M."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from bench.figure import Figure, alternate
from ironfn import tree
from ironfn.optim.adamw import adamw
from ironfn.optim.muon import muon
from ironfn.optim.optimizer import Optimizer
from ironfn.types import Flat, Params

WIDTH, KEYS, FFN, VOCAB, LAYERS = 576, 192, 1536, 49152, 30
MATRICES = {
    "attn/wq": (WIDTH, WIDTH),
    "attn/wk": (WIDTH, KEYS),
    "attn/wv": (WIDTH, KEYS),
    "attn/wo": (WIDTH, WIDTH),
    "mlp/w_gate": (WIDTH, FFN),
    "mlp/w_up": (WIDTH, FFN),
    "mlp/w_down": (FFN, WIDTH),
}
NORMS = {"norm1/scale": (WIDTH,), "norm2/scale": (WIDTH,)}


def figures(layers: int = LAYERS, rounds: int = 5) -> Iterator[Figure]:
    """Yield the ratios of update times and of state bytes, each with its bar.

    Muon is measured on the matrices of the blocks in bfloat16, the only precision that torch's has, and once more in
    float32 against torch's code with its cast taken out. Fewer ``layers`` make a quick look of it.
    """
    blocks = {f"blocks/{layer}/{leaf}": shape for layer in range(layers) for leaf, shape in MATRICES.items()}
    norms = {f"blocks/{layer}/{leaf}": shape for layer in range(layers) for leaf, shape in NORMS.items()}
    whole = {"embed/tokens": (VOCAB, WIDTH), **blocks, **norms, "norm/scale": (WIDTH,)}

    yield _ratio("adamw_update_ratio", "<= 1.2", whole, adamw(), _fused_adamw, rounds)
    yield _ratio("muon_update_ratio", "<= 1.0", blocks, muon(precision=torch.bfloat16), _torch_muon, rounds)
    with _no_bfloat16():
        yield _ratio("muon_float32_update_ratio", "<= 1.0", blocks, muon(), _torch_muon, min(rounds, 3))
    yield _state_bytes("adamw_state_bytes_ratio", whole, adamw(), 2 * 4, 8)
    yield _state_bytes("muon_state_bytes_ratio", blocks, muon(), 4, 0)


def _fused_adamw(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def _torch_muon(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Muon(params, lr=1e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")


def _ratio(
    name: str,
    bar: str,
    shapes: dict[str, tuple[int, ...]],
    ours: Optimizer,
    make_peer: Callable[[list[Tensor]], torch.optim.Optimizer],
    rounds: int,
) -> Figure:
    params = _draw(shapes)
    grads, state = tree.map(torch.clone, params), ours.init(params)
    # torch keeps a linear layer's weight as [outputs, inputs].
    turned = make_peer is _torch_muon
    peers = [(p.T.contiguous() if turned else p.clone()).requires_grad_() for p in tree.leaves(params)]
    for p in peers:
        p.grad = p.detach().clone()
    peer = make_peer(peers)
    box = {"params": params, "state": state}

    def update() -> None:
        # The gradients are consumed; what is left of them is a gradient of the same cost.
        box["params"], box["state"] = ours.update(grads, box["state"], box["params"], 1e-3)

    seconds = alternate({"ironfn": update, "torch": peer.step}, rounds)
    note = ", ".join(f"{who} {1000 * s:.0f} ms" for who, s in seconds.items())
    return Figure(name, seconds["ironfn"] / seconds["torch"], bar, f"{note}, {len(shapes)} leaves")


def _state_bytes(name: str, shapes: dict[str, tuple[int, ...]], ours: Optimizer, each: int, once: int) -> Figure:
    params = _draw(shapes)
    theory = each * tree.count(params) + once
    measured = tree.nbytes(ours.init(params))
    return Figure(name, measured / theory, "== 1.0", f"{measured} bytes: {each} a number, {once} for the count")


def _draw(shapes: dict[str, tuple[int, ...]]) -> Params:
    generator = torch.Generator().manual_seed(0)
    flat: Flat = {path: 0.02 * torch.randn(shape, generator=generator) for path, shape in shapes.items()}
    return tree.unflatten(flat)


class _no_bfloat16:
    """Make ``Tensor.bfloat16`` a copy, so that torch.optim.Muon computes in float32."""

    def __enter__(self) -> None:
        torch.Tensor.bfloat16 = torch.Tensor.clone  # pyright: ignore[reportAttributeAccessIssue]

    def __exit__(self, *_: object) -> None:
        del torch.Tensor.bfloat16
