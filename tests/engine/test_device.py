"""The choice of device and dtype, from texts of processors that are not here."""

import pytest
import torch

from oneloop.engine.device import cpu_flags, pick_device, pick_dtype
from oneloop.engine.hub import ModelError

AMX = "processor\t: 0\nflags\t\t: fpu avx2 fma avx512f avx512_bf16 amx_bf16 amx_tile\n"
AVX512_BF16 = "flags\t\t: avx2 avx512f avx512_bf16\n"
AVX512 = "flags\t\t: avx2 avx512f avx512_vnni\n"
AVX2 = "flags\t\t: avx2 fma\n"
GRAVITON = "processor\t: 0\nFeatures\t: fp asimd i8mm bf16 sve svebf16\n"
OLD_ARM = "Features\t: fp asimd crc32\n"
MAC_M2 = "hw.optional.arm.FEAT_BF16: 1\nhw.optional.arm.FEAT_I8MM: 1\nhw.optional.floatingpoint: 1\n"
MAC_M1 = "hw.optional.arm.FEAT_BF16: 0\n"


@pytest.mark.parametrize("text", [AMX, AVX512_BF16, GRAVITON, MAC_M2])
def test_bf16_where_the_processor_multiplies_it(text):
    assert pick_dtype("auto", "cpu", cpuinfo=text) is torch.bfloat16


@pytest.mark.parametrize("text", [AVX512, AVX2, OLD_ARM, MAC_M1, "", "flags\t\t:\n", "model name\t: fast bf16 chip\n"])
def test_fp32_everywhere_else(text):
    assert pick_dtype("auto", "cpu", cpuinfo=text) is torch.float32


def test_a_library_without_these_kernels_gets_fp32(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert pick_dtype("auto", "cpu", cpuinfo=AMX) is torch.float32


def test_only_what_every_core_has_counts():
    assert cpu_flags(AMX + AVX2) == ("avx2", "fma")
    assert cpu_flags(AMX) == ("avx2", "fma", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16")
    assert cpu_flags(MAC_M2) == ("bf16", "i8mm")
    assert cpu_flags("") == ()


def test_flags_of_this_machine_are_words():
    assert all(flag.isidentifier() for flag in cpu_flags())
    assert pick_dtype() in (torch.bfloat16, torch.float32)


@pytest.mark.parametrize(("wish", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32), ("fp64", torch.float64)])
def test_a_wish_is_granted_on_any_processor(wish, dtype):
    assert pick_dtype(wish, "cpu", cpuinfo=AVX2) is dtype
    assert pick_dtype(str(dtype).removeprefix("torch."), "cpu", cpuinfo=AMX) is dtype


@pytest.mark.parametrize(("wish", "says"), [("bf61", "did you mean 'bf16'"), ("int3", "the names are"), ("fp16", "bf16 or")])
def test_a_dtype_that_is_none(wish, says):
    with pytest.raises(ModelError, match=says):
        pick_dtype(wish, "cpu")


def test_devices():
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(
    ("wish", "says"),
    [
        ("cdua", "did you mean 'cuda'"),
        ("cuda:x", "no device"),
        ("cuda:99", "not here"),
        ("cpu:1", "not here"),
        ("", "names"),
    ],
)
def test_a_device_that_is_none(wish, says):
    with pytest.raises(ModelError, match=says):
        pick_device(wish)
