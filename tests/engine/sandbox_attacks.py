"""Scorer and hostile text in one, run inside and, as a control, bare. Each returns what it managed to do."""

import builtins
import ctypes
import json
import mmap
import os
import signal
import socket
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path

libc = ctypes.CDLL(None, use_errno=True)
STATE = {"score": "honest"}


def echo(x):
    return x


def score(answer):
    return {"score": STATE["score"], "length": len(answer), "env": dict(os.environ), "tmp": os.listdir("/tmp")}


def evaluates(answer):
    return eval(answer)


def fails_on(x, bad):
    if x == bad:
        raise ValueError("bad\nsample")
    return x


def tried(actions):
    """Run each; return the names of those that worked."""
    worked = []
    for name, action in actions.items():
        try:
            if action() is not False:
                worked.append(name)
        except (OSError, AttributeError):
            pass
    return worked


def write_outside(places):
    def write(place):
        with open(os.path.join(place, "planted"), "w") as f:
            f.write("x")

    return tried(
        {p: lambda p=p: write(p) for p in places}
        | {"chmod": lambda: os.chmod(__file__, 0o777), "unlink": lambda: os.unlink(__file__)}
    )


def read_secrets(secret, pid, path):
    found = []
    places = ["/proc/self/environ", "/proc/1/environ", f"/proc/{pid}/environ", f"/proc/{os.getppid()}/environ", path]
    for place in places:
        try:
            if secret.encode() in Path(place).read_bytes():
                found.append(place)
        except OSError:
            pass
    if secret in os.environ.values():
        found.append("environ")
    if os.path.exists(f"/proc/{pid}/mem") or os.path.exists("/proc/1/mem"):
        found.append("mem")
    buffer = ctypes.create_string_buffer(8)
    vec = struct.pack("QQ", ctypes.addressof(buffer), 8)
    for target in (pid, 1):
        remote = struct.pack("QQ", id(None), 8)
        if libc.process_vm_readv(target, vec, 1, remote, 1, 0) > 0:
            found.append(f"process_vm_readv {target}")
    return found


def connect(port, abstract, path):
    def to(family, address):
        s = socket.socket(family)
        s.settimeout(1)
        s.connect(address)
        s.sendall(b"out")

    def datagram():
        a, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        a.sendto(b"out", abstract)

    return tried(
        {
            "tcp": lambda: to(socket.AF_INET, ("127.0.0.1", port)),
            "abstract": lambda: to(socket.AF_UNIX, abstract),
            "path": lambda: to(socket.AF_UNIX, path),
            "vsock": lambda: socket.socket(40, socket.SOCK_STREAM),
            "udp": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
            "datagram": datagram,
        }
    )


def count_forks(limit):
    n = 0
    try:
        for _ in range(limit):
            if os.fork() == 0:
                time.sleep(60)
                os._exit(0)
            n += 1
    except OSError:
        pass
    return n


def count_threads(limit):
    import threading

    n = 0
    try:
        for _ in range(limit):
            threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
            n += 1
    except RuntimeError:
        pass
    return n


def fork_bomb():
    while True:
        with suppress(OSError):
            os.fork()


def allocate(count):
    return len(bytearray(count))


def reserve(count):
    return len(mmap.mmap(-1, count))


def touch_together(processes, count):
    for _ in range(processes - 1):
        if os.fork() == 0:
            break
    data = bytearray(count)
    time.sleep(60)
    return len(data)


def memory_elsewhere():
    def fill_tmp():
        for i in range(1000):
            with open(f"/tmp/{i}", "wb") as f:
                f.write(bytes(1 << 20))

    def one_big_file():
        with open("/tmp/big", "wb") as f:
            f.truncate(64 << 20)

    return tried(
        {
            "shm": lambda: libc.shmget(0, 1 << 20, 0o1600) >= 0,
            "memfd": lambda: os.memfd_create("x"),
            "fill": fill_tmp,
            "big": one_big_file,
            "devshm": lambda: open("/dev/shm/x", "w"),
            "devwrite": lambda: open("/dev/x", "w"),
        }
    )


def many_files():
    n = 0
    try:
        while True:
            open(f"/tmp/{n}", "w").close()
            n += 1
    except OSError:
        return n


def stubborn_tmp():
    os.chdir("/tmp")
    for _ in range(3000):
        os.mkdir("d")
        os.chdir("d")


def chatter(megabytes):
    for _ in range(megabytes):
        os.write(1, bytes(1 << 20))
        os.write(2, bytes(1 << 20))
    print("x" * 1000)
    return "done"


def endless_output():
    while True:
        os.write(1, bytes(1 << 20))


def spin():
    while True:
        pass


def spin_stubbornly():
    signal.signal(signal.SIGXCPU, signal.SIG_IGN)
    spin()


def sleep(seconds, result):
    time.sleep(seconds)
    return result


def signals(pid):
    names = {f"{n} to 1": lambda n=n: os.kill(1, n) for n in (signal.SIGINT, signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM)}
    tried(names)
    with suppress(OSError):
        os.kill(-1, signal.SIGKILL)
    return tried(
        {
            "parent": lambda: os.kill(pid, signal.SIGKILL),
            "ptrace": lambda: libc.ptrace(16, 1, 0, 0) == 0,
            "mem": lambda: open("/proc/1/mem", "r+b"),
            "setpriority": lambda: os.setpriority(os.PRIO_PROCESS, 1, 19),
            "affinity": lambda: os.sched_setaffinity(1, {0}),
            "prlimit": lambda: __import__("resource").prlimit(1, 7, (0, 0)),
        }
    )


def privileges():
    data = ctypes.create_string_buffer(24)
    libc.capget(struct.pack("Ii", 0x20080522, 0), data)
    escapes = tried(
        {
            "userns": lambda: libc.unshare(0x10000000) == 0,
            "mountns": lambda: libc.unshare(0x20000) == 0,
            "mount": lambda: libc.mount(b"none", b"/tmp", b"tmpfs", 0, None) == 0,
            "setuid": lambda: os.setuid(0),
            "shell": lambda: os.system("unshare -U true 2>/dev/null") == 0,
            "dmesg": lambda: libc.klogctl(3, data, 8) >= 0,
        }
    )
    return {
        "caps": data.raw.strip(b"\0").hex(),
        "no_new_privs": libc.prctl(39, 0, 0, 0, 0),
        "uid": os.getuid(),
        "escapes": escapes,
        "host": os.uname().nodename,
        "root": sorted(os.listdir("/")),
        "env": dict(os.environ),
    }


def raw_reply(hexadecimal, and_return=False):
    os.write(3, bytes.fromhex(hexadecimal))
    if and_return:
        return "honest"
    os._exit(0)


def endless_reply():
    while True:
        os.write(3, b"x" * 65536)


def says(text):
    raise ValueError(text)


def returns_nan():
    return float("nan")


def segfault():
    ctypes.string_at(0)


def daemon():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True:
                time.sleep(1)
        os._exit(0)
    return os.getpid()


def others():
    alive = []
    for pid in range(2, 1500):
        try:
            os.kill(pid, 0)
        except OSError:
            continue
        if pid != os.getpid():
            alive.append(pid)
    return alive


def poison():
    STATE["score"] = "hacked"
    builtins.len = lambda _: 10**9
    json.dumps = lambda *a, **k: '"hacked"'
    sys.modules[__name__].score = lambda answer: "hacked"
    os.environ["X"] = "1"
    open("/tmp/left", "w").close()
    os.makedirs("/tmp/a/b")
    os.symlink("/usr", "/tmp/a/l")
    os.chmod("/tmp", 0)
