"""Mixtures of experts equal `transformers`: Mixtral, OLMoE, DeepSeek-V3; losses, gradients, the balance, the router."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from transformers import DeepseekV3Config, MixtralConfig, MixtralForCausalLM, OlmoeConfig, OlmoeForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.mixtral.modeling_mixtral import MixtralExperts, load_balancing_loss_func

from ironfn import tree
from ironfn.grad.value_and_grad import value_and_grad
from ironfn.loss.lm import lm_loss
from ironfn.mesh.axis import SINGLE, Axis
from ironfn.model import fused
from ironfn.model import grouped as kernels
from ironfn.model.arch import Arch
from ironfn.model.counting import flops_per_token, matmul_parameters, parameters
from ironfn.model.experts import Choice, grouped, written_out
from ironfn.model.forward import Forward
from ironfn.model.init import shapes
from ironfn.model.moe import mixture
from ironfn.model.transformer import logits
from ironfn.spec.records import MoeSpec
from ironfn.types import Params
from property_tests.strategies import params_of
from tests import peers

NAMES = tuple(row for row in peers.LLAMA_NAMES if not row[0].startswith("mlp"))


def arch_of(**moe: Any) -> Arch:
    spec = MoeSpec(**({"experts": 6, "top_k": 2, "ffn": 40, "balance_weight": 0.02} | moe))
    return peers.make_arch("llama", 101, kv_heads=2, tied=False, moe=spec)


def peer(arch: Arch, kind: str, seed: int = 0) -> tuple[nn.Module, Params]:
    """Return a random Mixtral or OLMoE of this architecture, in float64, and its weights as our tree."""
    torch.manual_seed(seed)
    moe = arch.moe
    assert moe is not None
    fields: dict[str, Any] = {
        "vocab_size": arch.vocab, "hidden_size": arch.width, "num_hidden_layers": arch.layers,
        "num_attention_heads": arch.heads, "num_key_value_heads": arch.kv_heads, "intermediate_size": moe.ffn,
        "max_position_embeddings": arch.context, "rms_norm_eps": arch.norm_eps, "initializer_range": 0.2,
        "rope_parameters": {"rope_type": "default", "rope_theta": arch.rope_theta}, "tie_word_embeddings": False,
        "num_experts_per_tok": moe.top_k, "attn_implementation": "eager", "experts_implementation": "eager",
        "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None,
    }  # fmt: skip
    if kind == "mixtral":
        model = MixtralForCausalLM(MixtralConfig(**fields, num_local_experts=moe.experts, sliding_window=None))
    else:
        model = OlmoeForCausalLM(OlmoeConfig(**fields, num_experts=moe.experts, norm_topk_prob=moe.renormalize))
        for layer in model.model.layers:  # OLMoE norms its queries and keys, we do not
            layer.self_attn.q_norm = layer.self_attn.k_norm = nn.Identity()
    return model.double().eval(), as_tree(model, arch)


def as_tree(model: nn.Module, arch: Arch, of: str = "data") -> Params:
    """Return the weights (``of="grad"``: the gradients) as our tree; gate and up lie in one tensor there."""
    theirs: dict[str, Tensor] = {n: getattr(p, of).detach().clone() for n, p in model.named_parameters()}
    flat = {"embed/tokens": theirs["model.embed_tokens.weight"], "norm/scale": theirs["model.norm.weight"]}
    flat["head/w"] = theirs["lm_head.weight"]
    for layer in range(arch.layers):
        there, here = f"model.layers.{layer}.", f"blocks/{layer}/"
        for ours, name, transposed in NAMES:
            if (weight := theirs.get(there + name)) is not None:
                flat[here + ours] = weight.t().contiguous() if transposed else weight
        flat[f"{here}mlp/router/w"] = theirs[f"{there}mlp.gate.weight"].t().contiguous()
        gate, up = theirs[f"{there}mlp.experts.gate_up_proj"].transpose(1, 2).chunk(2, 2)
        down = theirs[f"{there}mlp.experts.down_proj"].transpose(1, 2)
        flat |= {f"{here}mlp/experts/w_{n}": w.contiguous() for n, w in (("gate", gate), ("up", up), ("down", down))}
    return tree.unflatten(flat)


CASES = {
    "mixtral": ("mixtral", {}),
    "olmoe": ("olmoe", {"renormalize": False, "top_k": 3}),
    "softmax_chosen": ("mixtral", {"score": "softmax_chosen", "top_k": 1}),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_equal_transformers(case: str) -> None:
    kind, moe = CASES[case]
    arch = arch_of(**moe, balance="batch", balance_weight=0.0)
    model, params = peer(arch, kind)
    assert {p: tuple(x.shape) for p, x in tree.flatten(params).items()} == shapes(arch)
    tokens = torch.randint(0, arch.vocab, (3, 21))
    theirs = model(tokens[:, :-1]).logits
    ours = logits(params, {"tokens": tokens[:, :-1]}, arch, SINGLE)
    # they compute softmax in float32
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    F.cross_entropy(theirs.transpose(1, 2), tokens[:, 1:], reduction="sum").backward()
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weight": torch.ones(3, 20)}
    for how in (Forward(), Forward(experts=written_out)):
        _, grads = value_and_grad(lm_loss(arch, how))(params, batch, SINGLE)
        expected = tree.flatten(as_tree(model, arch, "grad"))
        for path, grad in tree.flatten(grads).items():
            torch.testing.assert_close(grad, expected[path], rtol=1e-5, atol=1e-5, msg=lambda m, p=path: f"{p}: {m}")


@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("pad", [0, 6])
def test_the_balance_of_a_batch_is_that_of_transformers(top_k: int, pad: int) -> None:
    """Theirs is top_k where all is even, and ours is 1; of several blocks theirs is no sum."""
    arch = peers.make_arch("llama", 101, layers=1, moe=arch_of(top_k=top_k, balance="batch", renormalize=False).moe)
    params = params_of(arch)
    tokens = torch.randint(0, arch.vocab, (3, 20))
    segment = torch.zeros(3, 20, dtype=torch.long)
    segment[1, 20 - pad :] = -1
    batch = {"tokens": tokens, "targets": tokens, "weight": (segment == 0).double(), "segment": segment}
    router_logits: list[Tensor] = []
    router = tree.flatten(params)["blocks/0/mlp/router/w"]

    def spy(x: Tensor, choice: Choice, p: Params, act: fused.Activation, ep: Axis) -> Tensor:
        router_logits.append((x @ router).flatten(0, 1))
        return grouped(x, choice, p, act, ep)

    loss, _ = value_and_grad(lm_loss(arch, Forward(experts=spy)))(params, batch, SINGLE)
    theirs = load_balancing_loss_func((router_logits[0].detach(),), 6, top_k, (segment == 0).long())
    assert float(loss.metrics["balance"] / loss.weight) == pytest.approx(float(theirs) / top_k, rel=1e-6)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("renormalize", [True, False])
def test_a_block_of_deepseek_v3(renormalize: bool, groups: int) -> None:
    """Sigmoids, a bias on the choice, groups, a scale, and shared experts: one feed-forward there as here."""
    fields: dict[str, Any] = {"score": "sigmoid", "renormalize": renormalize, "scale": 2.5, "shared": 2}
    arch = arch_of(**fields, bias_rate=0.1, balance="none", groups=groups, group_top_k=1)
    moe = arch.moe
    assert moe is not None
    torch.manual_seed(0)
    config = DeepseekV3Config(
        hidden_size=48, moe_intermediate_size=40, n_routed_experts=6, num_local_experts=6, num_experts_per_tok=2,
        n_shared_experts=2, n_group=groups, topk_group=1, norm_topk_prob=renormalize, routed_scaling_factor=2.5,
        experts_implementation="eager",
    )  # fmt: skip
    block = DeepseekV3MoE(config)
    with torch.no_grad():
        for weight in block.parameters():
            weight.normal_(0, 0.2)
        block.gate.e_score_correction_bias.normal_(0, 0.3)
    gate_up, down = block.experts.gate_up_proj.transpose(1, 2), block.experts.down_proj.transpose(1, 2)
    shared = {f"w_{n}": getattr(block.shared_experts, f"{n}_proj").weight.t() for n in ("gate", "up", "down")}
    p: Params = {
        "router": {"w": block.gate.weight.t(), "bias": block.gate.e_score_correction_bias},
        "experts": {"w_gate": gate_up[..., :40], "w_up": gate_up[..., 40:], "w_down": down},
        "shared": shared,
    }
    x = torch.randn(3, 20, 48)
    ours, _ = mixture(x, p, 0, arch, SINGLE, Forward(), {"tokens": torch.zeros(3, 20, dtype=torch.long)})
    torch.testing.assert_close(ours, block(x), rtol=1e-5, atol=1e-5)
    unbiased: Params = p | {"router": {"w": block.gate.weight.t()}}
    other, _ = mixture(x, unbiased, 0, arch, SINGLE, Forward(), {"tokens": torch.zeros(3, 20, dtype=torch.long)})
    assert not torch.allclose(ours, other, atol=1e-3), "the bias chose nothing"
    if groups > 1:
        free = arch_of(**fields, bias_rate=0.1, balance="none")
        other, _ = mixture(x, p, 0, free, SINGLE, Forward(), {"tokens": torch.zeros(3, 20, dtype=torch.long)})
        assert not torch.allclose(ours, other, atol=1e-3), "the groups shut nobody out"


def test_parameters_and_operations_of_active_experts_alone() -> None:
    arch = arch_of()
    model, params = peer(arch, "mixtral")
    assert parameters(arch) == model.num_parameters() == tree.count(params)  # type: ignore[operator]
    all_experts = 6 * 3 * 48 * 40 * arch.layers
    everything = sum(p.numel() for p in tree.leaves(params) if p.ndim > 1) - arch.rows * 48  # the input table
    assert matmul_parameters(arch) == everything - all_experts + all_experts * 2 // 6
    tokens = torch.randint(0, arch.vocab, (3, 16))
    with FlopCounterMode(display=False) as counter:
        model(tokens, use_cache=False).logits.sum().backward()
    assert counter.get_total_flops() == flops_per_token(arch, 16) * tokens.numel()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mlp", ["swiglu", "gelu"])
def test_grouped_products_are_those_of_a_loop(dtype: torch.dtype, mlp: str) -> None:
    """Against experts written out, with one idle, some choices not kept, and every subset of gradients wanted."""
    g = torch.Generator().manual_seed(0)
    x, k = torch.randn(2, 9, 16, generator=g, dtype=torch.float64).to(dtype), 2
    ids = torch.stack([torch.randperm(4, generator=g)[:k] for _ in range(18)]).view(2, 9, k)
    kept = torch.rand(2, 9, k, generator=g) < 0.8
    weights = torch.rand(2, 9, k, generator=g, dtype=torch.float64)
    weights = weights if dtype == torch.float64 else weights.float()
    names = ["w_gate", "w_up"] if mlp == "swiglu" else ["w_up"]
    p = {n: torch.randn(5, 16, 24, generator=g, dtype=torch.float64).to(dtype) for n in names}
    p["w_down"] = torch.randn(5, 24, 16, generator=g, dtype=torch.float64).to(dtype)
    act = fused.SILU if mlp == "swiglu" else fused.GELU
    leaves = {"x": x, "weights": weights, **p}
    close: dict[str, Any] = {
        torch.float64: {"rtol": 1e-12, "atol": 1e-12},
        torch.float32: {"rtol": 1e-4, "atol": 1e-4},
    }.get(dtype, {"rtol": 0.05, "atol": 0.5})

    def grads(way: Any, wanted: list[str]) -> list[Tensor]:
        at = {n: t.clone().requires_grad_(n in wanted) for n, t in leaves.items()}
        y = way(at["x"], Choice(ids, at["weights"], kept), {n: at[n] for n in p}, act, Axis("ep"))
        return [y.detach(), *torch.autograd.grad(y.square().sum() / 100, [at[n] for n in wanted])]

    for wanted in [list(leaves), *([name] for name in leaves)]:
        for mine, theirs in zip(grads(grouped, wanted), grads(written_out, wanted), strict=True):
            assert mine.dtype == theirs.dtype
            torch.testing.assert_close(mine, theirs, **close)


@pytest.mark.parametrize("mlp", ["swiglu", "gelu"])
def test_the_kernel_of_other_devices_gives_the_same(mlp: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch runs `grouped_mm` on a CPU too, which is how its calls are held to the loop's where there is no GPU."""
    g = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return (0.3 * torch.randn(shape, generator=g)).requires_grad_()

    x, gate, up, down = draw(20, 16), draw(4, 16, 24) if mlp == "swiglu" else None, draw(4, 16, 24), draw(4, 24, 16)
    leaves = [leaf for leaf in (x, gate, up, down) if leaf is not None]
    found = []
    for sizes in (torch.tensor([5, 0, 9, 3]), torch.tensor([0, 0, 0, 0])):
        for one_kernel in (False, True):
            monkeypatch.setattr(kernels, "_one_kernel", lambda *_, one=one_kernel: one)
            y = kernels.grouped_mlp(x, gate, up, down, sizes, fused.SILU if gate is not None else fused.GELU)
            assert y[int(sizes.sum()) :].eq(0).all()
            found.append([y.detach(), *torch.autograd.grad(y.square().sum(), leaves)])
    for mine, theirs in ((found[0], found[1]), (found[2], found[3])):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_one_block_of_experts_is_that_of_transformers() -> None:
    config = MixtralConfig(hidden_size=16, intermediate_size=24, num_local_experts=5, experts_implementation="eager")
    module = MixtralExperts(config)
    with torch.no_grad():
        for weight in module.parameters():
            weight.normal_(0, 0.3)
    gate, up = module.gate_up_proj.transpose(1, 2).chunk(2, 2)
    p: Params = {"w_gate": gate, "w_up": up, "w_down": module.down_proj.transpose(1, 2)}
    x, weights = torch.randn(3, 7, 16), torch.rand(3, 7, 2)
    ids = torch.rand(3, 7, 5).topk(2).indices
    ours = grouped(x, Choice(ids, weights, torch.ones_like(ids, dtype=torch.bool)), p, fused.SILU, Axis("ep"))
    theirs = module(x.flatten(0, 1), ids.flatten(0, 1), weights.flatten(0, 1)).view_as(x)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
