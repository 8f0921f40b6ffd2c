"""What a sandboxed process sees of the file system, and the command line that starts one.

The new root shows, read-only, the few folders that Python, oneloop and the import paths need; all else is absent: home
folders, the working directory, /proc, /sys, /var, the caller's files.
"""

from __future__ import annotations

import os
import shutil
import site
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from oneloop.engine import sandbox_worker

How = Literal["bubblewrap", "namespaces"]
REMEDY = (
    "no sandbox on this machine, so scorers that see model text are refused; install bubblewrap (apt-get install "
    "bubblewrap) or allow user namespaces (sysctl user.max_user_namespaces=10000, "
    "kernel.apparmor_restrict_unprivileged_userns=0; Linux 5.14 or later)"
)


class SandboxUnavailable(RuntimeError):
    """The machine offers no isolation; the message says what to install or allow."""


class View(NamedTuple):
    """What is visible inside."""

    binds: list[tuple[str, str]]
    """(source, target), shown read-only."""
    links: list[tuple[str, str]]
    """(symbolic link, what it points to)."""
    paths: list[str]
    """Appended to sys.path inside."""


def visible(import_paths: Sequence[Path]) -> View:
    """Choose the little of the file system that Python, oneloop and the import paths need; all else is absent."""
    package = Path(__file__).resolve().parents[1]
    extra = [Path(path).absolute() for path in import_paths]
    for path in extra:
        if not path.is_dir():
            raise ValueError(f"import path {path}: no such folder")
    sites = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    sites = [path for path in sites if os.path.isdir(path)]
    top = [Path("/usr"), *(Path("/") / name for name in ("bin", "sbin", "lib", "lib32", "lib64"))]
    links = [(str(path), os.readlink(path)) for path in top if path.is_symlink()]
    binds: dict[str, str] = {}
    for path in [*top, *_python_paths(), *map(Path, sites), package, *extra]:
        for target in (str(path), str(path.resolve())):
            covered = [*binds, *(link for link, _ in links)]
            if path.exists() and not any(target == known or target.startswith(known + "/") for known in covered):
                binds[target] = str(path.resolve())
    return View([(s, t) for t, s in binds.items()], links, [str(package.parent), *map(str, extra), *sites])


def _python_paths() -> Iterator[Path]:
    yield from map(Path, ("/etc/ld.so.cache", "/etc/alternatives", "/nix/store", "/gnu/store"))
    for device in ("null", "zero", "full", "random", "urandom"):
        yield Path("/dev", device)
    for prefix in (sys.base_prefix, sys.base_exec_prefix, sys.prefix, sys.exec_prefix):
        for name in ("bin", "lib", "lib64", "pyvenv.cfg"):
            yield Path(prefix, name)


def command(how: How, view: View) -> list[str]:
    """Return the command that starts a worker; SandboxUnavailable where bubblewrap is asked for and absent."""
    python = [sys.executable, "-s", "-S", "-P", str(Path(sandbox_worker.__file__).resolve())]
    if how == "namespaces":
        return python
    program = shutil.which("bwrap")
    if program is None:
        raise SandboxUnavailable("bwrap is not on PATH")
    options = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    if os.geteuid() != 0:
        options += ["--unshare-user"]
    for name in ("SYS_ADMIN", "SETUID", "SETGID"):  # until /tmp is mounted and the user changed
        options += ["--cap-add", f"CAP_{name}"]
    made = {"/"}
    for source, target in view.binds:
        for folder in reversed(Path(target).parents):  # else bwrap makes them with mode 700
            options += [] if str(folder) in made else ["--dir", str(folder)]
            made.add(str(folder))
        options += ["--dev-bind" if target.startswith("/dev/") else "--ro-bind", source, target]
    for link, points_to in view.links:
        options += ["--symlink", points_to, link]
    options += ["--dir", "/tmp", "--remount-ro", "/", "--as-pid-1", "--new-session"]
    return [program, *options, "--", *python]


def spare_uid(pid: int) -> int:
    """Return a user id that nobody else has, in the upper half of the largest range mapped here."""
    ranges = [list(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    start, _, count = max(ranges, key=lambda entry: entry[2])
    return start + count - 2 - pid % max(1, count // 2)
