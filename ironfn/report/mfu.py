"""Relate a run's speed to the device's peak: model FLOPs utilisation (Chowdhery et al. 2022, arXiv 2204.02311, B)."""

from __future__ import annotations

import itertools
import re
import time

import torch
from attrs import frozen

_T = 1e12


@frozen
class Peak:
    """Give a GPU's dense matmul peaks in FLOP/s, without structured sparsity, products summed in float32.

    name: a regular expression for a part of the device's name. half: bfloat16 and float16. tf32, fp32: float32
    inputs with and without tensor cores. bfloat16: whether the tensor cores take it. source: the maker's document.
    """

    name: str
    half: float
    tf32: float
    fp32: float
    source: str
    bfloat16: bool = True


_BLACKWELL = "NVIDIA Blackwell Architecture Technical Brief"
_HOPPER = "NVIDIA H100 Tensor Core GPU Architecture white paper"
_AMPERE = "NVIDIA A100 Tensor Core GPU Architecture white paper"
_ADA = "NVIDIA Ada GPU Architecture white paper, appendix A"
_GA102 = "NVIDIA Ampere GA102 GPU Architecture white paper, appendix A"

PEAKS: tuple[Peak, ...] = (
    Peak(r"GB200", 2500 * _T, 1250 * _T, 80 * _T, _BLACKWELL),
    Peak(r"B200", 2250 * _T, 1125 * _T, 75 * _T, _BLACKWELL),
    Peak(r"B100", 1750 * _T, 875 * _T, 60 * _T, _BLACKWELL),
    Peak(r"H200 NVL", 835.5 * _T, 417.5 * _T, 60 * _T, "NVIDIA H200 data sheet"),
    Peak(r"G?H200", 989.4 * _T, 494.7 * _T, 66.9 * _T, "NVIDIA H200 and GH200 data sheets"),
    Peak(r"H100 NVL", 835.5 * _T, 417.5 * _T, 60 * _T, "NVIDIA H100 data sheet"),
    Peak(r"H[18]00 PCIe", 756 * _T, 378 * _T, 51.2 * _T, _HOPPER),
    Peak(r"H[18]00", 989.4 * _T, 494.7 * _T, 66.9 * _T, _HOPPER),
    Peak(r"H20", 148 * _T, 74 * _T, 44 * _T, "NVIDIA H20 data sheet"),
    Peak(r"A[18]00", 312 * _T, 156 * _T, 19.5 * _T, _AMPERE),
    Peak(r"A30", 165 * _T, 82 * _T, 10.3 * _T, "NVIDIA A30 data sheet"),
    Peak(r"A40", 149.7 * _T, 74.8 * _T, 37.4 * _T, "NVIDIA A40 data sheet"),
    Peak(r"A10", 125 * _T, 62.5 * _T, 31.2 * _T, "NVIDIA A10 data sheet"),
    Peak(r"L40S", 362.05 * _T, 183 * _T, 91.6 * _T, "NVIDIA L40S data sheet"),
    Peak(r"L40", 181.05 * _T, 90.5 * _T, 90.5 * _T, "NVIDIA L40 data sheet"),
    Peak(r"L4", 121 * _T, 60 * _T, 30.3 * _T, "NVIDIA L4 data sheet"),
    Peak(r"RTX 6000 Ada", 364.2 * _T, 182.1 * _T, 91.1 * _T, _ADA),
    Peak(r"RTX A6000$", 154.8 * _T, 77.4 * _T, 38.7 * _T, _GA102),
    Peak(r"RTX 5090$", 209.5 * _T, 104.8 * _T, 104.8 * _T, "NVIDIA RTX Blackwell GPU Architecture white paper"),
    Peak(r"RTX 4090$", 165.2 * _T, 82.6 * _T, 82.6 * _T, _ADA),
    Peak(r"RTX 4080$", 97.5 * _T, 48.7 * _T, 48.7 * _T, _ADA),
    Peak(r"RTX 3090$", 71 * _T, 35.6 * _T, 35.6 * _T, _GA102),
    Peak(r"T4", 65 * _T, 8.1 * _T, 8.1 * _T, "NVIDIA T4 data sheet", bfloat16=False),
    Peak(r"V100-SXM\d", 125 * _T, 15.7 * _T, 15.7 * _T, "NVIDIA V100 data sheet", bfloat16=False),
    Peak(r"V100-PCIE", 112 * _T, 14 * _T, 14 * _T, "NVIDIA V100 data sheet", bfloat16=False),
    Peak(r"MI3(00|25)X", 1307.4 * _T, 653.7 * _T, 163.4 * _T, "AMD Instinct MI300X data sheet"),
)
"""The first whose name is found, as whole words, in the device's is taken: the longer names stand first."""


def known_peak(name: str, dtype: torch.dtype, tf32: bool = False) -> float | None:
    """Return the peak in FLOP/s of a GPU by the name that ``torch.cuda.get_device_name`` gives; None if unknown.

    tf32: whether float32 products may use the tensor cores (``torch.set_float32_matmul_precision("high")``).

    >>> known_peak("NVIDIA H100 80GB HBM3", torch.bfloat16), known_peak("NVIDIA A10G", torch.bfloat16)
    (989400000000000.0, None)
    """
    if " MIG " in name:  # a slice of a GPU has a slice of its peak
        return None
    for peak in PEAKS:
        if re.search(rf"(?<![A-Za-z0-9]){peak.name}(?![A-Za-z0-9])", name.strip()):
            if dtype == torch.float32:
                return peak.tf32 if tf32 else peak.fp32
            has_tensor_cores = dtype == torch.float16 or (dtype == torch.bfloat16 and peak.bfloat16)
            return peak.half if has_tensor_cores else None
    return None


def measure_peak(device: torch.device, dtype: torch.dtype, seconds: float = 1.0) -> float:
    """Return the best FLOP/s of several large matrix products, taken in turns for about ``seconds``.

    On a CPU it holds for as many threads as torch uses now.
    """
    on_cuda = device.type == "cuda"
    sizes = (
        [(4096,) * 3, (8192,) * 3, (16384, 8192, 8192)] if on_cuda else [(1024,) * 3, (2048,) * 3, (2048, 512, 2048)]
    )
    repeats = 8 if on_cuda else 1
    pairs = [
        (torch.randn(m, k, device=device, dtype=dtype), torch.randn(k, n, device=device, dtype=dtype))
        for m, k, n in sizes
    ]
    best, end = 0.0, time.perf_counter() + seconds
    with torch.no_grad():
        for turn, (a, b) in enumerate(itertools.cycle(pairs)):
            spent = _time_product(a, b, repeats)
            if turn >= len(pairs):  # the first round warms up
                best = max(best, 2.0 * a.shape[0] * a.shape[1] * b.shape[1] * repeats / spent)
            if turn + 1 >= 2 * len(pairs) and time.perf_counter() > end:
                return best
    raise AssertionError("unreachable: the cycle has no end")


def _time_product(a: torch.Tensor, b: torch.Tensor, repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        torch.matmul(a, b)
    if a.is_cuda:
        torch.cuda.synchronize(a.device)
    return time.perf_counter() - start


def find_peak(device: torch.device, dtype: torch.dtype, given: float | None = None, seconds: float = 1.0) -> float:
    """Return one device's peak in FLOP/s: the one given, else by the GPU's name, else measured for ``seconds``."""
    if given is not None:
        if not given > 0:
            raise ValueError(f"report.peak_flops is {given}: give the device's FLOP/s, or leave it out to measure them")
        return given
    if device.type == "cuda":
        tf32 = torch.get_float32_matmul_precision() != "highest"
        peak = known_peak(torch.cuda.get_device_name(device), dtype, tf32)
        if peak is not None:
            return peak
    return measure_peak(device, dtype, seconds)


def mfu(flops_per_token: float, tokens_per_s: float, peak: float, devices: int) -> float:
    """Return the share of the peak of all devices together that the model's FLOPs take.

    flops_per_token: forward and backward, recomputation not counted. tokens_per_s: of all devices.

    >>> mfu(12144, tokens_per_s=1000, peak=24.288e6, devices=2)
    0.25
    """
    return flops_per_token * tokens_per_s / (peak * devices)
