"""Every attack is really tried, through the real sandbox; the bare controls show that each would work outside."""

import asyncio
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path

import pytest

from oneloop.engine import sandbox as sandbox_module
from oneloop.engine.sandbox import Limits, Outcome, Sandbox, SandboxUnavailable, available
from oneloop.engine.sandbox_worker import AUDIT_ARCH, system_call_filter

LIMITS = Limits(wall_s=1.0, memory_bytes=256 << 20, tmp_bytes=32 << 20, file_bytes=8 << 20, processes=8)
SOURCE = str(Path(sandbox_module.__file__).resolve().parents[2])
REPLY_FD = 3

# The module that plays scorer and hostile text in one. Functions return what they managed to do.
ATTACKS = r'''
import builtins, ctypes, json, mmap, os, signal, socket, struct, subprocess, sys, time
libc = ctypes.CDLL(None, use_errno=True)
STATE = {"score": "honest"}

def echo(x): return x
def score(answer): return {"score": STATE["score"], "length": len(answer), "env": dict(os.environ), "tmp": os.listdir("/tmp")}
def evaluates(answer): return eval(answer)
def fails_on(x, bad):
    if x == bad: raise ValueError("bad\nsample")
    return x

def tried(actions):
    """Run each; return the names of those that worked."""
    worked = []
    for name, action in actions.items():
        try:
            if action() is not False: worked.append(name)
        except (OSError, AttributeError): pass
    return worked

def write_outside(places):
    def write(place):
        with open(os.path.join(place, "planted"), "w") as f: f.write("x")
    return tried({p: lambda p=p: write(p) for p in places} | {"unlink": lambda: os.unlink(__file__), "chmod": lambda: os.chmod(__file__, 0o777)})

def read_secrets(secret, pid, path):
    found = []
    places = ["/proc/self/environ", "/proc/1/environ", f"/proc/{pid}/environ", f"/proc/{os.getppid()}/environ", path]
    for place in places:
        try:
            if secret.encode() in open(place, "rb").read(): found.append(place)
        except OSError: pass
    if secret in os.environ.values(): found.append("environ")
    if os.path.exists(f"/proc/{pid}/mem") or os.path.exists("/proc/1/mem"): found.append("mem")
    buffer = ctypes.create_string_buffer(8)
    vec = struct.pack("QQ", ctypes.addressof(buffer), 8)
    for target in (pid, 1):
        remote = struct.pack("QQ", id(None), 8)
        if libc.process_vm_readv(target, vec, 1, remote, 1, 0) > 0: found.append(f"process_vm_readv {target}")
    return found

def connect(port, abstract, path):
    def to(family, address):
        s = socket.socket(family); s.settimeout(1); s.connect(address); s.sendall(b"out")
    def datagram():
        a, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM); a.sendto(b"out", abstract)
    return tried({"tcp": lambda: to(socket.AF_INET, ("127.0.0.1", port)), "abstract": lambda: to(socket.AF_UNIX, abstract),
                  "path": lambda: to(socket.AF_UNIX, path), "vsock": lambda: socket.socket(40, socket.SOCK_STREAM),
                  "udp": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM), "datagram": datagram})

def count_forks(limit):
    n = 0
    try:
        for _ in range(limit):
            if os.fork() == 0: time.sleep(60); os._exit(0)
            n += 1
    except OSError: pass
    return n
def count_threads(limit):
    import threading
    n = 0
    try:
        for _ in range(limit):
            threading.Thread(target=time.sleep, args=(60,), daemon=True).start(); n += 1
    except RuntimeError: pass
    return n
def fork_bomb():
    while True:
        try: os.fork()
        except OSError: pass

def allocate(count): return len(bytearray(count))
def touch_together(processes, count):
    for _ in range(processes - 1):
        if os.fork() == 0: break
    data = bytearray(count); time.sleep(60); return len(data)
def memory_elsewhere():
    def fill_tmp():
        for i in range(1000):
            with open(f"/tmp/{i}", "wb") as f: f.write(bytes(1 << 20))
    def one_big_file():
        with open("/tmp/big", "wb") as f: f.truncate(64 << 20)
    return tried({"shm": lambda: libc.shmget(0, 1 << 20, 0o1600) >= 0, "memfd": lambda: os.memfd_create("x"),
                  "fill": fill_tmp, "big": one_big_file, "devshm": lambda: open("/dev/shm/x", "w"),
                  "devwrite": lambda: open("/dev/x", "w")})
def many_files():
    n = 0
    try:
        while True: open(f"/tmp/{n}", "w").close(); n += 1
    except OSError: return n
def stubborn_tmp():
    os.chdir("/tmp")
    for _ in range(3000): os.mkdir("d"); os.chdir("d")

def chatter(megabytes):
    for _ in range(megabytes): os.write(1, bytes(1 << 20)); os.write(2, bytes(1 << 20))
    print("x" * 1000); return "done"
def endless_output():
    while True: os.write(1, bytes(1 << 20))
def spin():
    while True: pass
def spin_stubbornly():
    signal.signal(signal.SIGXCPU, signal.SIG_IGN); spin()
def sleep(seconds, result): time.sleep(seconds); return result

def signals(pid):
    names = {f"{n} to 1": lambda n=n: os.kill(1, n) for n in (signal.SIGINT, signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM)}
    tried(names)
    try: os.kill(-1, signal.SIGKILL)
    except OSError: pass
    return tried({"parent": lambda: os.kill(pid, signal.SIGKILL), "ptrace": lambda: libc.ptrace(16, 1, 0, 0) == 0,
                  "mem": lambda: open("/proc/1/mem", "r+b"), "setpriority": lambda: os.setpriority(os.PRIO_PROCESS, 1, 19),
                  "affinity": lambda: os.sched_setaffinity(1, {0}), "prlimit": lambda: __import__("resource").prlimit(1, 7, (0, 0))})
def privileges():
    data = ctypes.create_string_buffer(24)
    libc.capget(struct.pack("Ii", 0x20080522, 0), data)
    escapes = tried({"userns": lambda: libc.unshare(0x10000000) == 0, "mountns": lambda: libc.unshare(0x20000) == 0,
                     "mount": lambda: libc.mount(b"none", b"/tmp", b"tmpfs", 0, None) == 0, "setuid": lambda: os.setuid(0),
                     "shell": lambda: os.system("unshare -U true 2>/dev/null") == 0, "dmesg": lambda: libc.klogctl(3, data, 8) >= 0})
    return {"caps": data.raw.strip(b"\0").hex(), "no_new_privs": libc.prctl(39, 0, 0, 0, 0), "uid": os.getuid(),
            "escapes": escapes, "host": os.uname().nodename, "root": sorted(os.listdir("/")), "env": dict(os.environ)}

def raw_reply(hexadecimal, and_return=False):
    os.write(3, bytes.fromhex(hexadecimal))
    if and_return: return "honest"
    os._exit(0)
def endless_reply():
    while True: os.write(3, b"x" * 65536)
def says(text): raise ValueError(text)
def returns_nan(): return float("nan")
def segfault(): ctypes.string_at(0)
def daemon():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True: time.sleep(1)
        os._exit(0)
    return os.getpid()
def others():
    alive = []
    for pid in range(2, 1500):
        try: os.kill(pid, 0)
        except OSError: continue
        if pid != os.getpid(): alive.append(pid)
    return alive
def poison():
    STATE["score"] = "hacked"
    builtins.len = lambda _: 10**9
    json.dumps = lambda *a, **k: "\"hacked\""
    sys.modules[__name__].score = lambda answer: "hacked"
    os.environ["X"] = "1"; open("/tmp/left", "w").close(); os.makedirs("/tmp/a/b"); os.symlink("/usr", "/tmp/a/l")
    os.chmod("/tmp", 0)
'''


@pytest.fixture(scope="module")
def attacks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("attacks")
    (folder / "attacks.py").write_text(ATTACKS)
    folder.chmod(0o755)  # the sandbox's own user reads it
    return folder


@pytest.fixture(scope="module", params=["namespaces", "bubblewrap"])
def box(request, attacks):
    found = available(request.param)
    if found.how is None:
        pytest.skip(found.reason)
    with Sandbox(how=request.param, limits=LIMITS, import_paths=[attacks]) as sandbox:
        yield sandbox


@pytest.fixture
def open_box(attacks):
    """A sandbox of another shape, for tests of the pool itself."""
    if available().how is None:
        pytest.skip(available().reason)
    opened = []

    def make(**options):
        opened.append(Sandbox(**{"limits": LIMITS, "import_paths": [attacks]} | options))
        return opened[-1]

    yield make
    for sandbox in opened:
        sandbox.close()


def run(sandbox, function, *args) -> Outcome:
    return sandbox.submit(f"attacks:{function}", *args).result(timeout=60)


def bare(attacks, function, *args, **options):
    """Control: the same function in a plain process."""
    code = f"import sys, json; sys.path.insert(0, {str(attacks)!r}); import attacks; " + (
        f"print(json.dumps(attacks.{function}(*json.loads(sys.argv[1]))))"
    )
    command = [sys.executable, "-c", code, json.dumps(args)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    return json.loads(done.stdout) if done.returncode == 0 else done


def descendants(root):
    found, todo = [], [root]
    while todo:
        with suppress(OSError):
            pid = todo.pop()
            for task in os.listdir(f"/proc/{pid}/task"):
                children = Path(f"/proc/{pid}/task/{task}/children").read_text().split()
                found += map(int, children)
                todo += map(int, children)
    return found


def worker_pid(sandbox):
    (worker,) = sandbox._alive
    return worker.pid


def test_a_value_comes_back_as_it_is(box):
    value = {"a": [1, 2.5, None, True, "ü"], "b": {}}
    assert run(box, "echo", value) == Outcome("value", value=value)


def test_imports_from_the_package_itself(box):
    outcome = box.submit("oneloop.engine.sandbox:_one_line", "a\nb").result()
    assert outcome == Outcome("value", value="a b")


def test_write_outside(box, attacks, tmp_path):
    places = ["/", "/usr", "/usr/lib", "/etc", "/root", "/home", "/var/tmp", SOURCE + "/oneloop", str(attacks), str(tmp_path)]
    assert run(box, "write_outside", places) == Outcome("value", value=[])
    assert not [place for place in places if os.path.exists(os.path.join(place, "planted"))]
    copy = tmp_path / "copy"
    shutil.copytree(attacks, copy)
    assert bare(copy, "write_outside", [str(tmp_path)]) == [str(tmp_path), "unlink", "chmod"]


def test_read_secrets_of_the_parent(box, attacks, tmp_path, monkeypatch):
    secret = uuid.uuid4().hex
    monkeypatch.setenv("ONELOOP_TEST_SECRET", secret)
    file = tmp_path / "secret"
    file.write_text(secret)
    file.chmod(0o600)
    assert run(box, "read_secrets", secret, os.getpid(), str(file)) == Outcome("value", value=[])
    with subprocess.Popen(["sleep", "60"]) as child:  # started with the secret in its environment
        found = bare(attacks, "read_secrets", secret, child.pid, str(file))
        child.kill()
    assert {str(file), "environ", f"/proc/{child.pid}/environ", "mem"} <= set(found)


def test_connect_to_this_machine(box, attacks, tmp_path):
    abstract, path = f"\0oneloop-{uuid.uuid4().hex}", str(tmp_path / "socket")
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as hidden, socket.socket(socket.AF_UNIX) as named:
        for server, address in (hidden, abstract), (named, path):
            server.bind(address)
            server.listen()
        port = tcp.getsockname()[1]
        assert run(box, "connect", port, abstract, path) == Outcome("value", value=[])
        for server in (tcp, hidden, named):
            server.settimeout(0)
            with pytest.raises(BlockingIOError):
                server.accept()
        assert {"tcp", "abstract", "path", "udp"} <= set(bare(attacks, "connect", port, abstract, path))


def test_namespaces_are_not_ours(box):
    """The socket call is refused before the network namespace is asked, so look at the namespace itself."""
    run(box, "echo", 1)
    for name in ("net", "pid", "mnt", "ipc", "uts"):
        try:
            theirs = os.readlink(f"/proc/{worker_pid(box)}/ns/{name}")
        except PermissionError:
            pytest.skip("only root may look")
        assert theirs != os.readlink(f"/proc/self/ns/{name}")


def test_privileges(box, attacks):
    outcome = run(box, "privileges").value
    assert outcome["caps"] == "" and outcome["no_new_privs"] == 1 and outcome["escapes"] == []
    assert outcome["host"] == "sandbox" and outcome["env"] == {}
    assert not {"proc", "sys", "home", "var", "mnt"} & set(outcome["root"])
    assert outcome["uid"] != 0
    if os.geteuid() == 0:
        assert bare(attacks, "privileges")["caps"] != ""


def test_fork_bomb(box, attacks):
    assert run(box, "count_forks", 200).value <= LIMITS.processes
    assert run(box, "count_threads", 200).value <= LIMITS.processes
    assert run(box, "fork_bomb").kind == "timeout"
    assert descendants(worker_pid(box)) == []
    assert run(box, "echo", 1) == Outcome("value", value=1)
    assert bare(attacks, "count_threads", 50) == 50


def test_ten_gigabytes(box):
    assert run(box, "allocate", 10 << 30) == Outcome("memory", error="killed: memory")
    assert run(box, "allocate", 100 << 20) == Outcome("value", value=100 << 20)
    assert run(box, "touch_together", 5, 80 << 20).kind == "memory", "each below the limit, together above it"
    assert run(box, "memory_elsewhere") == Outcome("value", value=[])
    assert run(box, "many_files").value < 10_000


def test_endless_output(box):
    assert run(box, "chatter", 64) == Outcome("value", value="done")
    assert run(box, "endless_output") == Outcome("timeout", error="timed out after 1 s")
    assert run(box, "endless_reply").kind == "bad_reply"


def test_endless_loop(box):
    assert run(box, "spin") == Outcome("timeout", error="timed out after 1 s")
    assert run(box, "sleep", 60, 1) == Outcome("timeout", error="timed out after 1 s")
    assert run(box, "sleep", 0.1, 1) == Outcome("value", value=1)


def test_cpu_limit(open_box):
    sandbox = open_box(limits=Limits(cpu_s=1, wall_s=10))
    assert run(sandbox, "spin") == Outcome("timeout", error="timed out after 1 s of CPU time")
    assert run(sandbox, "spin_stubbornly") == Outcome("crashed", error="crashed: signal 9")


def test_signal_the_parent(box):
    run(box, "echo", 1)
    before = worker_pid(box)
    outcome = run(box, "signals", os.getpid())
    assert outcome == Outcome("value", value=[])
    assert run(box, "echo", 1) == Outcome("value", value=1)
    assert worker_pid(box) == before, "the worker did not even notice"


def test_bare_signals_do_reach(attacks):
    with subprocess.Popen(["sleep", "60"]) as victim:
        code = f"import os; os.kill({victim.pid}, 9)"
        subprocess.run([sys.executable, "-c", code], check=True)
        assert victim.wait() == -signal.SIGKILL


def frame(payload: bytes) -> bytes:
    return struct.pack(">I", len(payload)) + payload


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        pytest.param(frame(b"v[1]"), "value", id="control"),
        pytest.param(frame(b"v{oops"), "bad_reply", id="not JSON"),
        pytest.param(frame(b"v"), "bad_reply", id="empty"),
        pytest.param(frame(b"vNaN"), "bad_reply", id="NaN"),
        pytest.param(frame(b"v[-Infinity]"), "bad_reply", id="Infinity"),
        pytest.param(frame(b"v1e999"), "bad_reply", id="overflow"),
        pytest.param(frame(b"v" + b"9" * 5000), "bad_reply", id="long integer"),
        pytest.param(frame(b"v" + b"[" * 30_000 + b"]" * 30_000), "bad_reply", id="deep"),
        pytest.param(frame(b"v" + b'{"a":' * 40 + b"1" + b"}" * 40), "bad_reply", id="deeper than 32"),
        pytest.param(frame(b'v"\\ud800"'), "bad_reply", id="half a surrogate pair"),
        pytest.param(frame(b'v"\xff"'), "bad_reply", id="not UTF-8"),
        pytest.param(struct.pack(">I", 100) + b"v1", "bad_reply", id="truncated"),
        pytest.param(struct.pack(">I", 2) + b"v1234", "bad_reply", id="longer than announced"),
        pytest.param(b"\xff\xff\xff\xffv1", "bad_reply", id="four gigabytes announced"),
        pytest.param(b"\0\0", "bad_reply", id="half a length"),
        pytest.param(frame(b"v1") * 2, "bad_reply", id="two replies"),
        pytest.param(frame(b"x1"), "bad_reply", id="unknown kind"),
        pytest.param(frame(b"V1"), "bad_reply", id="asks for a new worker"),
        pytest.param(b"", "crashed", id="none"),
    ],
)
def test_hostile_reply(box, reply, kind):
    run(box, "echo", 1)
    before = worker_pid(box)
    outcome = run(box, "raw_reply", reply.hex())
    assert outcome.kind == kind
    assert (outcome.error is None) == (kind == "value")
    assert outcome.error is None or outcome.error.isprintable()
    assert run(box, "echo", 2) == Outcome("value", value=2), "the next sample is not concerned"
    assert worker_pid(box) == before


def test_a_forged_reply_before_the_real_one(box):
    assert run(box, "raw_reply", frame(b"v1").hex(), True).kind == "bad_reply"


def test_a_reply_longer_than_allowed(box):
    assert run(box, "echo", "x" * 60_000).kind == "value"
    assert run(box, "echo", "x" * 70_000).error == "reply was longer than 65536 bytes"


def test_errors_are_one_bounded_line(box):
    outcome = run(box, "says", "a\nb\x1b[31m\u2028" + "c" * 10_000)
    assert outcome.kind == "raised" and outcome.error is not None
    assert outcome.error.startswith("ValueError: a b [31m c") and outcome.error.isprintable()
    assert len(outcome.error) <= 500
    assert run(box, "returns_nan").error == (
        "returned a value that is not JSON: ValueError: Out of range float values are not JSON compliant"
    )


def test_crashes(box):
    assert run(box, "segfault") == Outcome("crashed", error="crashed: signal 11")
    assert run(box, "evaluates", "__import__('os')._exit(3)").kind == "crashed"
    assert run(box, "evaluates", "__import__('os').abort()") == Outcome("crashed", error="crashed: signal 6")
    assert run(box, "evaluates", "exit()").kind == "raised"
    assert run(box, "missing").error == "AttributeError: module 'attacks' has no attribute 'missing'"
    assert box.submit("no_such_module:f").result().error == (
        "cannot import no_such_module: ModuleNotFoundError: No module named 'no_such_module'"
    )


def test_a_daemon_is_gone_before_the_next_call(box):
    assert run(box, "daemon").kind == "value"
    assert descendants(worker_pid(box)) == []
    assert run(box, "others") == Outcome("value", value=[])


def test_poison_does_not_reach_the_next_call(box):
    clean = run(box, "score", "four")
    assert clean.value["score"] == "honest" and clean.value["length"] == 4
    run(box, "poison")
    assert run(box, "score", "four") == clean


def test_a_tmp_that_cannot_be_emptied_replaces_the_worker(box):
    clean = run(box, "score", "")
    before = worker_pid(box)
    assert run(box, "stubborn_tmp").kind == "value"
    assert run(box, "score", "") == clean
    assert worker_pid(box) != before


def test_the_eval_payload(box, attacks):
    name = f"/tmp/oneloop-{uuid.uuid4().hex}"
    payload = f"__import__('os').system('touch {name}') or __import__('os').path.exists('{name}')"
    assert run(box, "evaluates", payload) == Outcome("value", value=True), "it ran, inside"
    assert not os.path.exists(name)
    assert run(box, "evaluates", f"__import__('os').path.exists('{name}')") == Outcome("value", value=False)
    try:
        assert bare(attacks, "evaluates", payload) is True
        assert os.path.exists(name), "bare, the same payload reaches out"
    finally:
        os.unlink(name)


def test_one_failure_among_64(open_box):
    sandbox = open_box(workers=2)

    async def score():
        return await asyncio.gather(*(sandbox.call("attacks:fails_on", i, 13) for i in range(64)))

    outcomes = asyncio.run(score())
    assert [o.value for o in outcomes if o.kind == "value"] == [i for i in range(64) if i != 13]
    assert outcomes[13] == Outcome("raised", error="ValueError: bad sample")
    assert outcomes[13].value is None, "an error is never the score 0"


def test_one_hangs_others_finish(open_box):
    sandbox = open_box(workers=2, limits=Limits(wall_s=2))

    async def score():
        hanging = asyncio.create_task(sandbox.call("attacks:spin"))
        values = await asyncio.gather(*(sandbox.call("attacks:echo", i) for i in range(30)))
        return values, hanging.done(), await hanging

    values, was_done, hung = asyncio.run(score())
    assert [o.value for o in values] == list(range(30)) and not was_done
    assert hung.kind == "timeout"


def test_a_stuck_worker_is_ended_by_the_parent_and_replaced(open_box, monkeypatch):
    monkeypatch.setattr(sandbox_module, "GRACE_S", 0.2)
    sandbox = open_box(limits=Limits(wall_s=0.3))
    run(sandbox, "echo", 1)
    stuck = worker_pid(sandbox)
    os.kill(stuck, signal.SIGSTOP)
    assert run(sandbox, "echo", 1).kind == "timeout"
    assert run(sandbox, "echo", 1) == Outcome("value", value=1)
    assert worker_pid(sandbox) != stuck


def test_a_dead_worker_costs_only_the_call_it_was_in(open_box):
    sandbox = open_box()
    run(sandbox, "echo", 1)
    os.kill(worker_pid(sandbox), signal.SIGKILL)
    wait_until(lambda: not sandbox._idle[0].is_alive())
    assert run(sandbox, "echo", 1) == Outcome("value", value=1), "it died idle: nobody pays"
    future = sandbox.submit("attacks:sleep", 0.9, 1)
    wait_until(lambda: descendants(worker_pid(sandbox)))
    os.kill(worker_pid(sandbox), signal.SIGKILL)
    assert future.result() == Outcome("lost", error="the worker died")
    assert run(sandbox, "echo", 1) == Outcome("value", value=1)


def wait_until(condition):
    for _ in range(500):
        if condition():
            return
        time.sleep(0.01)
    pytest.fail("waited 5 s in vain")


def test_close_leaves_nothing(open_box):
    before = set(descendants(os.getpid()))
    sandbox = open_box(workers=2)
    futures = [sandbox.submit("attacks:touch_together", 3, 1) for _ in range(2)]
    wait_until(lambda: len(set(descendants(os.getpid())) - before) >= 10)
    started = set(descendants(os.getpid())) - before
    sandbox.close()
    assert [future.result().kind for future in futures] == ["lost", "lost"]
    assert not [pid for pid in started if os.path.exists(f"/proc/{pid}")]
    with pytest.raises(RuntimeError, match="closed"):
        sandbox.submit("attacks:echo", 1)


ORPHANS = """
import os, sys, time
from pathlib import Path
from oneloop.engine.sandbox import Sandbox
sandbox = Sandbox(import_paths=[Path(sys.argv[1])])
assert sandbox.submit("attacks:echo", 1).result().value == 1
copy = os.fork()  # a copy of the holder that lives on
if copy == 0:
    time.sleep(20)
    os._exit(0)
(worker,) = sandbox._alive
sandbox.submit("attacks:sleep", 30, 1)
print(worker.pid, worker._process.pid, copy, flush=True)
time.sleep(20)
"""


def test_the_parent_is_killed_while_a_forked_copy_lives(open_box, attacks):
    command = [sys.executable, "-W", "ignore", "-c", ORPHANS, str(attacks)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={"PYTHONPATH": SOURCE}) as holder:
        assert holder.stdout is not None
        worker, outer, copy = map(int, holder.stdout.readline().split())
        holder.kill()
        wait_until(lambda: not os.path.exists(f"/proc/{worker}") and not os.path.exists(f"/proc/{outer}"))
        os.kill(copy, signal.SIGKILL)


def test_from_threads_and_several_event_loops(open_box):
    sandbox = open_box(workers=2)
    results = []

    def loop(start):
        async def several():
            return await asyncio.gather(*(sandbox.call("attacks:echo", start + i) for i in range(10)))

        results.extend(outcome.value for outcome in asyncio.run(several()))

    threads = [threading.Thread(target=loop, args=(10 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == list(range(40))


def test_refused_without_isolation(attacks, tmp_path, monkeypatch):
    target = tmp_path / "ran"
    monkeypatch.setenv("PATH", str(tmp_path))
    with Sandbox(how="bubblewrap", import_paths=[attacks]) as sandbox:
        future = sandbox.submit("attacks:evaluates", f"open({str(target)!r}, 'w').close()")
        with pytest.raises(SandboxUnavailable, match=r"install bubblewrap.*\[bubblewrap: bwrap is not on PATH\]"):
            future.result()
    assert not target.exists(), "never run bare"
    assert available("bubblewrap").how is None


def test_refused_where_the_kernel_refuses():
    if os.geteuid() != 0 or not shutil.which("setpriv"):
        pytest.skip("needs root and setpriv to take all capabilities away")
    code = "from oneloop.engine.sandbox import available; print(*available())"
    command = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": SOURCE})
    assert done.stdout.startswith("None no sandbox on this machine") and done.stdout.count("\n") == 1
    assert "namespaces: " in done.stdout and "bubblewrap: " in done.stdout


ORDINARY = """
import sys, json, os
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from oneloop.engine.sandbox import Limits, Sandbox
with Sandbox(how="namespaces", limits=Limits(wall_s=1, processes=8), import_paths=[Path(sys.argv[2])]) as sandbox:
    ask = lambda *call: sandbox.submit(*call).result().value
    print(json.dumps([ask("attacks:write_outside", ["/", "/usr"]), ask("attacks:privileges"),
                      ask("attacks:signals", os.getpid()), ask("attacks:count_forks", 100), ask("attacks:poison"),
                      ask("attacks:score", "four")]))
"""


def test_as_an_ordinary_user(attacks):
    if os.geteuid() != 0:
        pytest.skip("this whole run is by an ordinary user")
    for folder in attacks.parents:
        if not folder.stat().st_mode & 0o001:
            folder.chmod(folder.stat().st_mode | 0o011)  # folders made by pytest for this run
    nobody = {"user": 65534, "group": 65534, "extra_groups": [], "capture_output": True, "text": True}
    is_fit = "import sys; sys.exit(sys.version_info < (3, 11))"
    for python in (sys.executable, "/usr/bin/python3"):
        with suppress(OSError):
            if subprocess.run([python, "-c", is_fit], check=False, **nobody).returncode == 0:
                break
    else:
        pytest.skip("no Python 3.11 that an ordinary user may run")
    done = subprocess.run([python, "-I", "-c", ORDINARY, SOURCE, str(attacks)], check=False, **nobody)
    if "[namespaces: unshare" in done.stderr:
        pytest.skip("no user namespaces for ordinary users")
    assert done.returncode == 0, done.stderr
    written, privileges, signalled, forks, _, score = json.loads(done.stdout)
    assert written == [] and signalled == [] and forks <= 8
    assert privileges["caps"] == "" and privileges["escapes"] == [] and privileges["env"] == {}
    assert score["score"] == "honest" and score["length"] == 4 and "left" not in score["tmp"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cpu_s": 0}, "cpu_s = 0: must be a positive number"),
        ({"wall_s": float("nan")}, "wall_s = nan: must be a positive number"),
        ({"tmp_bytes": 2 << 30}, "must be below memory_bytes"),
        ({"open_files": 1000}, "between 8 and 256"),
    ],
)
def test_limits_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        Limits(**options)


def test_calls_are_checked(tmp_path):
    with Sandbox() as sandbox:
        for target in ("os.system", "os:system('x')", "", "os:path:join"):
            with pytest.raises(ValueError, match=r"must be 'module.path:function'"):
                sandbox.submit(target)
        with pytest.raises(TypeError):
            sandbox.submit("math:floor", object())
        with pytest.raises(ValueError, match="JSON"):
            sandbox.submit("math:floor", float("nan"))
    with pytest.raises(ValueError, match="no such folder"):
        Sandbox(import_paths=[tmp_path / "missing"])
    with pytest.raises(ValueError, match="at least 1"):
        Sandbox(workers=0)


def test_the_system_call_filter_knows_both_machines():
    programs = [system_call_filter(machine) for machine in AUDIT_ARCH]
    assert len({len(program) for program in programs}) == 1 and programs[0] != programs[1]
    with pytest.raises(OSError, match="no system call filter for riscv64"):
        system_call_filter("riscv64")
