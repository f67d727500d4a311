"""The peak of a device, utilisation, pace and memory."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from ironfn.report.meter import Meter, peak_memory
from ironfn.report.mfu import PEAKS, find_peak, known_peak, measure_peak, mfu


def test_utilisation_is_of_all_devices_together() -> None:
    """6N + 12 L H Q T with N 1000, L 2, H 2, Q 8, T 16 is 12144 FLOPs a token."""
    flops = 6 * 1000 + 12 * 2 * 2 * 8 * 16
    assert flops == 12144
    assert mfu(flops, tokens_per_s=500.0, peak=12144e3, devices=1) == 0.5
    assert mfu(flops, tokens_per_s=4 * 500.0, peak=12144e3, devices=4) == 0.5


@pytest.mark.parametrize(
    ("name", "half", "tf32", "fp32"),
    [
        ("NVIDIA A100-SXM4-80GB", 312, 156, 19.5),
        ("NVIDIA A100 80GB PCIe", 312, 156, 19.5),
        ("NVIDIA H100 80GB HBM3", 989.4, 494.7, 66.9),
        ("NVIDIA H100 PCIe", 756, 378, 51.2),
        ("NVIDIA H100 NVL", 835.5, 417.5, 60),
        ("NVIDIA H200", 989.4, 494.7, 66.9),
        ("NVIDIA GH200 480GB", 989.4, 494.7, 66.9),
        ("NVIDIA B200", 2250, 1125, 75),
        ("NVIDIA GB200", 2500, 1250, 80),
        ("NVIDIA L4", 121, 60, 30.3),
        ("NVIDIA L40", 181.05, 90.5, 90.5),
        ("NVIDIA L40S", 362.05, 183, 91.6),
        ("NVIDIA A10", 125, 62.5, 31.2),
        ("NVIDIA GeForce RTX 3090", 71, 35.6, 35.6),
        ("NVIDIA GeForce RTX 4090", 165.2, 82.6, 82.6),
        ("AMD Instinct MI300X", 1307.4, 653.7, 163.4),
    ],
)
def test_known_gpus(name: str, half: float, tf32: float, fp32: float) -> None:
    assert known_peak(name, torch.bfloat16) == known_peak(name, torch.float16) == half * 1e12
    assert known_peak(name, torch.float32) == fp32 * 1e12
    assert known_peak(name, torch.float32, tf32=True) == tf32 * 1e12


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA A10G",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
        "NVIDIA H2000",
        "",
    ],
)
def test_a_name_that_only_resembles_a_known_one_is_unknown(name: str) -> None:
    assert known_peak(name, torch.bfloat16) is None
    assert known_peak(name, torch.float32) is None


def test_old_tensor_cores_take_float16_only() -> None:
    for name, half in (("Tesla T4", 65e12), ("Tesla V100-SXM2-32GB", 125e12), ("Tesla V100-PCIE-16GB", 112e12)):
        assert known_peak(name, torch.float16) == half
        assert known_peak(name, torch.bfloat16) is None


def test_every_known_peak_names_its_source_and_is_ordered() -> None:
    assert all(peak.source and peak.half > peak.tf32 >= peak.fp32 > 0 for peak in PEAKS)


def test_a_measured_peak_is_at_least_what_one_product_reaches() -> None:
    """Against a product timed here: the best of many cannot be far below it."""
    peak = measure_peak(torch.device("cpu"), torch.float32, 0.3)
    a = torch.randn(1024, 1024)
    a @ a
    start = time.perf_counter()
    a @ a
    assert peak > 0.2 * 2 * 1024**3 / (time.perf_counter() - start)


def test_a_given_peak_is_taken_and_a_wrong_one_refused() -> None:
    assert find_peak(torch.device("cpu"), torch.float32, given=5e12) == 5e12
    for wrong in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=r"report\.peak_flops is"):
            find_peak(torch.device("cpu"), torch.float32, given=wrong)


def test_a_gpu_is_looked_up_by_the_precision_it_runs_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert find_peak(torch.device("cuda"), torch.float32) == 156e12
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "highest")
    assert find_peak(torch.device("cuda"), torch.float32) == 19.5e12
    assert find_peak(torch.device("cuda"), torch.bfloat16) == 312e12


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_the_pace_counts_training_only_and_the_seconds_count_all() -> None:
    clock = Clock()
    meter = Meter(steps=100, step=20, before=50.0, clock=clock)
    clock.now += 10
    assert meter.look(30, 5000) == (500.0, 70.0)
    clock.now += 10
    with meter.away():
        clock.now += 1000
    pace, left = meter.look(40, 5000)
    assert pace == 500.0
    assert left == pytest.approx(60.0)
    assert meter.seconds == 50.0 + 1020.0
    clock.now += 60
    assert meter.look(100, 6000) == (100.0, 0.0)


def test_a_clock_that_stands_still_divides_nothing_by_zero() -> None:
    meter = Meter(steps=10, step=0, before=0.0, clock=Clock())
    pace, left = meter.look(1, 100)
    assert pace > 0
    assert left >= 0


def test_peak_memory_sees_what_this_process_used_and_not_its_parent() -> None:
    """A child that touches 200 MB reports them; one started by this large process does not report our size."""
    if not Path("/proc/self/status").exists():
        pytest.skip("the comparison reads /proc")
    import psutil

    script = (
        "from ironfn.report.meter import peak_memory; import torch, sys\n"
        "before = peak_memory(torch.device('cpu'))\n"
        "held = bytearray(b'x') * 200_000_000\n"
        "del held\n"
        "print(before, peak_memory(torch.device('cpu')))\n"
    )
    held = bytearray(b"x") * 700_000_000
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    del held
    before, after = map(int, done.stdout.split())
    assert 190_000_000 < after - before < 260_000_000
    assert before < 650_000_000
    assert peak_memory(torch.device("cpu")) >= psutil.Process().memory_info().rss * 0.5
