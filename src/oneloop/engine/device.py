"""Which device computes, and in which dtype.

bf16 pays on a CPU only where it multiplies bf16 natively (AMX-BF16 or AVX512-BF16 on x86, the bf16 extension on ARM);
elsewhere it is emulated and several times slower than fp32. The processor's own flags decide, read as text, because
torch answers this question by private calls only.
"""

import difflib
import platform
import re
import subprocess
from pathlib import Path

import torch

from oneloop.engine.hub import ModelError

DTYPES = {
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}
DEVICES = ("auto", "cpu", "cuda", "mps")

# the flags that decide, or that explain a speed in an evidence file; Linux's names
X86_FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16")
X86_TILES = ("amx_tile", "amx_int8", "amx_bf16")
ARM_FLAGS = ("asimd", "asimdhp", "bf16", "i8mm", "sve", "sve2", "svebf16")
NATIVE_BF16 = frozenset({"amx_bf16", "avx512_bf16", "bf16", "svebf16"})
_REPORTED = (*X86_FLAGS, *X86_TILES, *ARM_FLAGS)


def cpu_flags(cpuinfo: str | None = None) -> tuple[str, ...]:
    """The matrix and vector extensions that EVERY core has, in a fixed order; for choosing a dtype and for evidence.

    Args:
        cpuinfo: text of /proc/cpuinfo, or of `sysctl hw.optional` on a Mac; None reads this machine's.

    """
    text = _read_cpuinfo() if cpuinfo is None else cpuinfo
    cores = [set(line.split()) for line in re.findall(r"^(?:flags|Features)[ \t]*:(.*)$", text, flags=re.MULTILINE)]
    # big and little cores differ: a thread may run on any of them
    common = set.intersection(*cores) if cores else set()
    common |= {name.lower() for name in re.findall(r"^hw\.optional\.arm\.FEAT_(\w+): 1$", text, flags=re.MULTILINE)}
    return tuple(flag for flag in _REPORTED if flag in common)


def _read_cpuinfo() -> str:
    if platform.system() == "Darwin":
        try:
            result = subprocess.run(["sysctl", "hw.optional"], capture_output=True, text=True, check=True, timeout=10)
        except (OSError, subprocess.SubprocessError):
            return ""
        return result.stdout
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def pick_device(wish: str = "auto") -> torch.device:
    """The device to compute on; auto is the first CUDA device where there is one, else the CPU.

    Args:
        wish: auto, cpu, cuda, cuda:N or mps.

    Raises:
        ModelError: an unknown name, or a device that this machine lacks.

    """
    kind, _, index = wish.partition(":")
    if kind not in DEVICES or (index and not index.isdigit()):
        raise ModelError(f"no device {wish!r}; {_suggest(kind, DEVICES)}")
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    count = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}[kind]
    if int(index or 0) >= count:
        raise ModelError(f"device {wish!r} is not here ({count} of kind {kind}); use auto or cpu")
    return torch.device(kind, int(index or 0)) if kind == "cuda" else torch.device(kind)


def pick_dtype(wish: str = "auto", device: torch.device | str = "cpu", *, cpuinfo: str | None = None) -> torch.dtype:
    """The dtype to compute in; auto is bf16 where the device multiplies it natively, else fp32.

    Args:
        wish: auto, bf16, fp32 or fp64 (or torch's longer names).
        device: where it will compute.
        cpuinfo: as in `cpu_flags`.

    Raises:
        ModelError: an unknown name; fp16, whose gradients underflow without loss scaling.

    """
    if wish in ("fp16", "float16", "half"):
        raise ModelError(f"dtype {wish!r} needs loss scaling, which oneloop does not do; use bf16 or fp32")
    if wish != "auto":
        if wish not in DTYPES:
            raise ModelError(f"no dtype {wish!r}; {_suggest(wish, ('auto', *DTYPES))}")
        return DTYPES[wish]
    return torch.bfloat16 if _multiplies_bf16(torch.device(device), cpuinfo) else torch.float32


def _multiplies_bf16(device: torch.device, cpuinfo: str | None) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu":
        return False
    # torch reaches these units through oneDNN only: built without it, bf16 is emulated whatever the chip has
    return torch.backends.mkldnn.is_available() and not NATIVE_BF16.isdisjoint(cpu_flags(cpuinfo))


def _suggest(name: str, valid: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name.lower(), valid, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"the names are: {', '.join(valid)}"
