"""Tensors in large pages are tensors, and lie where they are meant to."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from ironfn import pages


@pytest.mark.parametrize("shape", [(), (0, 3), (5, 7), (3, 1 << 19), (1 << 21,)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64])
def test_they_are_zeros_of_their_own(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    one, other = pages.zeros(shape, dtype), pages.zeros(shape, dtype)
    assert torch.equal(one, torch.zeros(shape, dtype=dtype))
    assert one.dtype == dtype
    assert one.is_contiguous()
    one.fill_(1)
    assert not other.any()
    assert torch.equal(pages.copied(one), torch.ones(shape, dtype=dtype))


def test_a_system_without_them_gives_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_ADVICE", 9999)  # no kernel knows this one
    assert not pages.zeros((1 << 20,), torch.float32).any()
    monkeypatch.setattr(pages, "_ADVICE", None)
    assert not pages.zeros((1 << 20,), torch.float32).any()


CHOICE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(
    not CHOICE.exists() or "[never]" in CHOICE.read_text(), reason="this system has no transparent large pages"
)
def test_the_system_is_asked_for_large_pages_at_their_bounds() -> None:
    x = pages.zeros((8 << 20,), torch.uint8).fill_(1)
    assert x.data_ptr() % (2 << 20) == 0
    maps = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    mine = [text for text in maps if int(text.split("-")[0], 16) <= x.data_ptr() < int(re.split("[- ]", text)[1], 16)]
    (flags,) = re.findall(r"VmFlags: (.*)", mine[0])
    assert "hg" in flags.split()
