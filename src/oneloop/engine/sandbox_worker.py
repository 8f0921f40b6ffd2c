"""The process inside the sandbox: it shuts itself in, then forks one fresh child for every call.

Started by ``sandbox.py`` as a script, with the control socket as standard input and, as standard output, a pidfd that
tells when the parent is dead. Standard library only, so it starts in tens of milliseconds. It consumes one set-up
frame, then requests; it produces one reply frame for each. A frame is four bytes of length (big-endian) and that many
bytes. The process becomes pid 1 of its own pid namespace: when it goes, so does everything that model text started.

What holds model text, from outside to inside: a read-only root that has only what Python needs (no /proc, no /sys, no
home), no network, a user of its own without capabilities, a filter on system calls, limits on each process, a limit on
wall time, and the end of everything else in the namespace after every call.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import importlib
import json
import os
import platform
import resource
import select
import signal
import struct
import sys
import time
from contextlib import suppress
from typing import Any, NoReturn

VALUE, RAISED, TIMEOUT, MEMORY, CRASHED, BAD_REPLY, REFUSED = b"v", b"e", b"t", b"m", b"c", b"b", b"!"
REPLY_FD = 3  # in the child, the only descriptor beside the three standard ones
TMP_FILES = 8192  # inodes of /tmp: empty files cost kernel memory that no size limit counts

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
NAMESPACES = CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 2, 4, 0x1000, 0x4000, 0x40000, 2
AT_FDCWD, AT_RECURSIVE, OPEN_TREE_CLONE, MOVE_FROM_FD = -100, 0x8000, 1, 4
SYS_OPEN_TREE, SYS_MOVE_MOUNT, SYS_MOUNT_SETATTR = 428, 429, 442  # the same numbers on every architecture
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV = 1, 2, 4
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38

# System calls refused to model text, as (x86_64, aarch64). The kernel checks namespaces and users elsewhere; these are
# the ways round a limit: memory that belongs to no process, new namespaces, devices that network namespaces do not hold
# (vsock), and calls by which a process of the same user could cripple this one and so the next sample.
REFUSED_CALLS = {
    "socket": (41, 198), "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180),
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "add_key": (248, 217), "request_key": (249, 218),
    "keyctl": (250, 219), "io_uring_setup": (425, 425), "userfaultfd": (323, 282), "perf_event_open": (298, 241),
    "bpf": (321, 280), "syslog": (103, 116), "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40),
    "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fspick": (433, 433), "mount_setattr": (442, 442), "open_by_handle_at": (304, 265), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272), "pidfd_getfd": (438, 438),
    "setpriority": (141, 140), "sched_setparam": (142, 118), "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122), "sched_setattr": (314, 274), "ioprio_set": (251, 30),
}  # fmt: skip
CLONE, CLONE3, PRLIMIT, SOCKETPAIR = (56, 220), (435, 435), (302, 261), (53, 199)
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOW, ERRNO, KILL = 0x7FFF0000, 0x00050000, 0x80000000
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # classic BPF operations
NUMBER_AT, ARCH_AT, FIRST_ARGUMENT_AT = 0, 4, 16  # byte offsets in struct seccomp_data, little-endian

libc = ctypes.CDLL(None, use_errno=True)


def send(fd: int, payload: bytes) -> None:
    """Write one frame."""
    data = memoryview(struct.pack(">I", len(payload)) + payload)
    while data:
        data = data[os.write(fd, data) :]


def receive(fd: int) -> bytes:
    """Read one frame; EOFError when the other side has gone."""
    (count,) = struct.unpack(">I", _exactly(fd, 4))
    return _exactly(fd, count)


def _exactly(fd: int, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        chunk = os.read(fd, min(count - len(data), 1 << 16))
        if not chunk:
            raise EOFError
        data += chunk
    return bytes(data)


def _system(name: str, *arguments: Any) -> None:
    """Call a C function; OSError naming it where it fails."""
    if getattr(libc, name)(*(a.encode() if isinstance(a, str) else a for a in arguments)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def _prctl(option: int, value: int, pointer: Any = 0) -> None:
    word = ctypes.c_ulong
    _system("prctl", option, word(value), pointer or word(0), word(0), word(0))


# ---------------------------------------------------------------- shutting in


def enter_namespaces(setup: dict[str, Any]) -> int:
    """Return in pid 1 of fresh namespaces with the small read-only root; the calling process stays as its parent.

    Returns: how many processes of the same user stay outside (their count is part of the limit on processes).
    """
    outside = 0
    try:
        if os.geteuid() != 0:
            raise PermissionError
        _system("unshare", NAMESPACES)
    except PermissionError:  # an ordinary user, or root in a container without CAP_SYS_ADMIN
        if os.geteuid() == 0:
            _change_user(setup["uid"])
            _prctl(PR_SET_DUMPABLE, 1)  # otherwise /proc/self belongs to root and the maps cannot be written
        uid, gid, outside = os.geteuid(), os.getegid(), 1
        _system("unshare", CLONE_NEWUSER | NAMESPACES)
        for name, text in ("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1"):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    _build_root(setup["binds"], setup["links"])
    inner = os.fork()
    if inner:  # outside the pid namespace: hold nothing, reap, go
        os.closerange(0, 64)
        os.waitpid(inner, 0)
        os._exit(0)
    return outside


def _build_root(binds: list[list[str]], links: list[list[str]]) -> None:
    """Swap the root for a tmpfs that shows only ``binds`` (source, target), read-only, and symbolic ``links``."""
    flags = MS_NOSUID | MS_NODEV
    _system("mount", "none", "/", None, MS_REC | MS_PRIVATE, None)
    _system("mount", "tmpfs", "/tmp", "tmpfs", flags, "mode=755,size=1m,nr_inodes=4096")
    os.mkdir("/tmp/old")
    _system("pivot_root", "/tmp", "/tmp/old")
    os.chdir("/")
    for source, target in binds:
        _mount_point(target, is_folder=os.path.isdir("/old" + source))
        try:
            _system("mount", "/old" + source, target, None, MS_BIND | MS_REC, None)
        except OSError as error:
            raise OSError(error.errno, f"cannot show {source}: {error.strerror}") from None
        nodev = 0 if target.startswith("/dev/") else ATTR_NODEV
        _restrict(target, ATTR_RDONLY | ATTR_NOSUID | nodev, AT_RECURSIVE)
    for link, points_to in links:
        os.symlink(points_to, link)
    os.makedirs("/tmp", exist_ok=True)
    _system("umount2", "/old", MNT_DETACH)
    os.rmdir("/old")
    _restrict("/", ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV, 0)


def _mount_point(path: str, *, is_folder: bool) -> None:
    os.makedirs(path if is_folder else os.path.dirname(path), mode=0o755, exist_ok=True)
    if not is_folder:
        os.close(os.open(path, os.O_CREAT | os.O_RDONLY, 0o644))


def _restrict(path: str, attributes: int, flags: int) -> None:
    size = ctypes.c_size_t(32)
    attr = struct.pack("QQQQ", attributes, 0, 0, 0)
    _system("syscall", ctypes.c_long(SYS_MOUNT_SETATTR), AT_FDCWD, path, ctypes.c_uint(flags), attr, size)


def _change_user(uid: int) -> None:
    os.umask(0o022)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def mount_tmp(uid: int, gid: int, size: int) -> list[str]:
    """Mount a private /tmp; return its first names that must stay, each a read-only mount that holds a bound path."""
    kept = {}
    for name in os.listdir("/tmp"):  # Python itself may live in /tmp: take such folders along
        flags = ctypes.c_uint(OPEN_TREE_CLONE | AT_RECURSIVE)
        kept[name] = libc.syscall(ctypes.c_long(SYS_OPEN_TREE), AT_FDCWD, f"/tmp/{name}".encode(), flags)
    options = f"size={size},nr_inodes={TMP_FILES},mode=700,uid={uid},gid={gid}"
    _system("mount", "tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, options)
    for name, tree in kept.items():
        os.mkdir(f"/tmp/{name}", 0o755)
        move = (ctypes.c_long(SYS_MOVE_MOUNT), tree, "", AT_FDCWD, f"/tmp/{name}", ctypes.c_uint(MOVE_FROM_FD))
        _system("syscall", *move)
        os.close(tree)
    return list(kept)


def give_up_privileges(setup: dict[str, Any]) -> None:
    """Drop the user, every capability and every refused system call, for good."""
    if os.geteuid() == 0:
        _change_user(setup["uid"])
    _system("capset", struct.pack("Ii", 0x20080522, 0), bytes(24))
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    _prctl(PR_SET_DUMPABLE, 0)  # no core, and no other process of this user may look in
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    program = system_call_filter(platform.machine())
    buffer = ctypes.create_string_buffer(program)
    pointer = ctypes.create_string_buffer(struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer)))
    _prctl(PR_SET_SECCOMP, 2, pointer)


def system_call_filter(machine: str) -> bytes:
    """Return the seccomp program for a machine; OSError where its numbers are not known here."""
    if machine not in AUDIT_ARCH:
        raise OSError(errno.ENOSYS, f"no system call filter for {machine} (known: {', '.join(AUDIT_ARCH)})")
    column = list(AUDIT_ARCH).index(machine)
    refuse = (RETURN, 0, 0, ERRNO | errno.EPERM)
    allow = (RETURN, 0, 0, ALLOW)
    first = (LOAD, 0, 0, FIRST_ARGUMENT_AT)
    code = [(LOAD, 0, 0, ARCH_AT), (EQUAL, 1, 0, AUDIT_ARCH[machine]), (RETURN, 0, 0, KILL), (LOAD, 0, 0, NUMBER_AT)]
    code += [(AT_LEAST, 0, 1, 0x40000000), refuse]  # the x32 numbers would pass by the table
    for numbers in REFUSED_CALLS.values():
        code += [(EQUAL, 0, 1, numbers[column]), refuse]
    code += [(EQUAL, 0, 1, CLONE3[column]), (RETURN, 0, 0, ERRNO | errno.ENOSYS)]  # libc falls back to clone
    code += [(EQUAL, 0, 4, CLONE[column]), first, (ANY_BIT, 0, 1, NAMESPACES | CLONE_NEWUSER), refuse, allow]
    code += [(EQUAL, 0, 4, PRLIMIT[column]), first, (EQUAL, 1, 0, 0), refuse, allow]  # only on itself
    code += [(EQUAL, 0, 4, SOCKETPAIR[column]), first, (EQUAL, 1, 0, 1), refuse, allow]  # only AF_UNIX
    return b"".join(struct.pack("HBBI", *step) for step in [*code, allow])


# ---------------------------------------------------------------- one call


def one_call(ends: tuple[int, int], request: dict[str, Any], limits: dict[str, Any]) -> bytes:
    """Run one request in a fresh child; return kind and payload. Afterwards nothing that it started is left."""
    before = os.stat("/tmp").st_ctime_ns
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        _child(write_end, request, limits)
    os.close(write_end)
    try:
        data, is_late = _watch(ends, child, read_end, limits)
        status = _sweep(child)
        os.set_blocking(read_end, False)
        with suppress(BlockingIOError):
            data += os.read(read_end, max(0, limits["output_bytes"] + 6 - len(data)))
    finally:
        os.close(read_end)
    reply = _verdict(data, status, is_late, limits)
    if os.stat("/tmp").st_ctime_ns != before and not _clean_tmp(limits["kept"]):
        return reply[:1].upper() + reply[1:]  # upper case: replace me
    return reply


def _watch(ends: tuple[int, int], child: int, read_end: int, limits: dict[str, Any]) -> tuple[bytes, bool]:
    """Collect what the child says until it exits, says too much, or its time is up."""
    deadline = time.monotonic() + limits["wall_s"]
    watched = os.pidfd_open(child)
    poll = select.poll()
    poll.register(read_end, select.POLLIN)
    poll.register(watched, select.POLLIN)
    for end in ends:
        poll.register(end, select.POLLIN)
    data = bytearray()
    try:
        while len(data) <= limits["output_bytes"] + 5:
            ready = dict(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))
            if not ready.keys().isdisjoint(ends):
                os._exit(0)  # closed, or the parent is dead: the whole namespace goes
            if not ready:
                return bytes(data), True
            if read_end in ready:
                chunk = os.read(read_end, 1 << 16)
                data += chunk
                if not chunk:
                    poll.unregister(read_end)
            elif watched in ready:
                break
        return bytes(data), False
    finally:
        os.close(watched)


def _sweep(child: int) -> int:
    """Kill and reap every other process of the namespace; return the child's wait status."""
    status = 0
    while True:
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        try:
            pid, code = os.waitpid(-1, 0)
        except ChildProcessError:
            return status
        if pid == child:
            status = code


def _verdict(data: bytes, status: int, is_late: bool, limits: dict[str, Any]) -> bytes:
    count = int.from_bytes(data[:4], "big")
    if is_late:
        reply = TIMEOUT + f"timed out after {limits['wall_s']:g} s".encode()
    elif len(data) > limits["output_bytes"] + 5:
        reply = BAD_REPLY + f"reply was longer than {limits['output_bytes']} bytes".encode()
    elif os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU:
        reply = TIMEOUT + f"timed out after {limits['cpu_s']:g} s of CPU time".encode()
    elif os.WIFSIGNALED(status):
        reply = CRASHED + f"crashed: signal {os.WTERMSIG(status)}".encode()
    elif not data or status:
        reply = CRASHED + f"crashed: exit status {os.WEXITSTATUS(status)}, {len(data)} bytes of reply".encode()
    elif len(data) != count + 4 or data[4:5] not in (VALUE, RAISED, MEMORY):
        reply = BAD_REPLY + f"reply of {len(data) - 4} bytes was announced as {count}".encode()
    else:
        reply = data[4:]
    return reply


def _clean_tmp(kept: list[str]) -> bool:
    """Empty /tmp; False where what was left there resists."""
    try:
        os.chmod("/tmp", 0o700)
        for name in set(os.listdir("/tmp")) - set(kept):
            _remove(f"/tmp/{name}")
    except (OSError, RecursionError):
        return False
    return True


def _remove(path: str) -> None:
    if os.path.islink(path) or not os.path.isdir(path):
        return os.unlink(path)
    for name in os.listdir(path):
        _remove(f"{path}/{name}")
    return os.rmdir(path)


def _child(write_end: int, request: dict[str, Any], limits: dict[str, Any]) -> NoReturn:
    try:
        os.dup2(write_end, REPLY_FD)
        os.closerange(REPLY_FD + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        _set_limits(limits)
        send(REPLY_FD, _compute(request))
    finally:
        os._exit(0)


def _set_limits(limits: dict[str, Any]) -> None:
    cpu = -int(-limits["cpu_s"] // 1)
    room = limits["memory_bytes"] - limits["tmp_bytes"]
    for name, soft, hard in (
        ("CPU", cpu, cpu + 1),  # a process that ignores the first signal is killed a second later
        ("AS", room, room),
        ("NPROC", limits["processes"], limits["processes"]),
        ("FSIZE", limits["file_bytes"], limits["file_bytes"]),
        ("NOFILE", limits["open_files"], limits["open_files"]),
        ("CORE", 1, 1),  # 0 would still start a core handler that is a pipe; 1 refuses both
    ):
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (soft, hard))


def _compute(request: dict[str, Any]) -> bytes:
    module, _, function = request["target"].partition(":")
    try:
        value = getattr(sys.modules[module], function)(*request["args"])
    except MemoryError:
        return MEMORY + b"killed: memory"
    except BaseException as error:  # eval("exit()") is an error of this sample too
        return RAISED + _describe(error)
    try:
        return VALUE + json.dumps(value, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        return RAISED + b"returned a value that is not JSON: " + _describe(error)


def _describe(error: BaseException) -> bytes:
    return f"{type(error).__name__}: {error}"[:500].encode(errors="replace")


# ---------------------------------------------------------------- the process


def load(module: str) -> bytes:
    """Import a scorer's module once, before any child is made."""
    one_thread = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    os.environ.update(dict.fromkeys(one_thread, "1"))  # pools of threads would not survive the fork
    try:
        importlib.import_module(module)
    except BaseException as error:  # whatever a module raises, the parent gets one line
        return REFUSED + f"cannot import {module}: ".encode() + _describe(error)
    finally:
        os.environ.clear()
    gc.collect()
    gc.freeze()  # the children's collections then copy fewer pages
    return VALUE


def serve(control: int, lifeline: int, limits: dict[str, Any]) -> NoReturn:
    """Answer requests until the control socket closes or the parent is dead, whoever else holds that socket."""
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(lifeline, select.POLLIN)
    while lifeline not in dict(poll.poll()):
        try:
            request = json.loads(receive(control))
        except (EOFError, ConnectionError):
            break
        if "import" in request:
            send(control, load(request["import"]))
        else:
            send(control, one_call((control, lifeline), request, limits))
    os._exit(0)


def main() -> None:
    """Shut in, say ready, serve."""
    control, lifeline = os.dup(0), os.dup(1)
    setup = json.loads(receive(control))
    os.environ.clear()
    try:
        outside = enter_namespaces(setup) if setup["binds"] else 0
        uid, gid = (setup["uid"],) * 2 if os.geteuid() == 0 else (os.geteuid(), os.getegid())
        limits = setup["limits"]
        limits["kept"] = mount_tmp(uid, gid, limits["tmp_bytes"])
        limits["processes"] += outside + 1  # this one
        _system("sethostname", "sandbox", ctypes.c_size_t(7))
        os.chdir("/tmp")
        give_up_privileges(setup)
        for path in setup["paths"]:
            os.listdir(path)  # the sandbox's own user must be able to read it
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        send(control, REFUSED + f"{where}{error.strerror}".encode())
        os._exit(1)
    null = os.open("/dev/null", os.O_RDWR)
    for standard in (0, 1, 2):  # output of scorers and model text goes nowhere: it can fill and block nothing
        os.dup2(null, standard)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # without a handler pid 1 cannot be signalled from inside
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    sys.dont_write_bytecode = True
    sys.path += setup["paths"]
    gc.freeze()
    send(control, VALUE)
    serve(control, lifeline, limits)


if __name__ == "__main__":
    main()
