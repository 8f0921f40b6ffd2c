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
import uuid
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from oneloop.engine import sandbox as sandbox_module
from oneloop.engine.sandbox import Limits, Outcome, Sandbox, SandboxUnavailable, available
from oneloop.engine.sandbox_worker import AUDIT_ARCH, system_call_filter
from tests.engine.sandbox_help import ORDINARY, ORPHANS, bare, descendants, frame, is_gone, wait_until

LIMITS = Limits(cpu_s=20, wall_s=20, memory_bytes=256 << 20, tmp_bytes=32 << 20, file_bytes=8 << 20, processes=8)
SOURCE = str(Path(sandbox_module.__file__).resolve().parents[2])


@pytest.fixture(scope="module")
def attacks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("attacks")
    shutil.copy(Path(__file__).with_name("sandbox_attacks.py"), folder / "attacks.py")
    folder.chmod(0o777)  # so that only the read-only mount keeps the sandbox from writing here
    return folder


@pytest.fixture(scope="module", params=["namespaces", "bubblewrap"])
def how(request):
    if available(request.param).how is None:
        pytest.skip(available(request.param).reason)
    return request.param


@pytest.fixture(scope="module")
def box(how, attacks):
    with Sandbox(how=how, limits=LIMITS, import_paths=[attacks]) as sandbox:
        yield sandbox


@pytest.fixture(scope="module")
def hasty(how, attacks):
    """For attacks that never end by themselves."""
    with Sandbox(how=how, limits=replace(LIMITS, wall_s=1), import_paths=[attacks]) as sandbox:
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


def worker_pid(sandbox):
    (worker,) = sandbox._alive
    return worker.pid


def test_a_value_comes_back_as_it_is(box):
    value = {"a": [1, 2.5, None, True, "ü"], "b": {}}
    assert run(box, "echo", value) == Outcome("value", value=value)


def test_imports_from_the_package_itself(box):
    assert box.submit("oneloop.engine.sandbox:_one_line", "a\nb").result() == Outcome("value", value="a b")


def test_write_outside(box, attacks, tmp_path):
    places = [
        "/",
        *["/usr", "/usr/lib", "/etc", "/root", "/home", "/var/tmp"],
        f"{SOURCE}/oneloop",
        str(attacks),
        str(tmp_path),
    ]
    assert run(box, "write_outside", places) == Outcome("value", value=[])
    assert not [place for place in places if os.path.exists(os.path.join(place, "planted"))]
    copy = tmp_path / "copy"
    shutil.copytree(attacks, copy)
    assert bare(copy, "write_outside", [str(tmp_path)]) == [str(tmp_path), "chmod", "unlink"]


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
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as hidden,
        socket.socket(socket.AF_UNIX) as named,
    ):
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
    assert outcome["caps"] == ""
    assert outcome["no_new_privs"] == 1
    assert outcome["escapes"] == []
    assert outcome["host"] == "sandbox"
    assert outcome["env"] == {}
    assert not {"proc", "sys", "home", "var", "mnt"} & set(outcome["root"])
    assert outcome["uid"] != 0
    if os.geteuid() == 0:
        assert bare(attacks, "privileges")["caps"] != ""


def test_fork_bomb(hasty, attacks):
    run(hasty, "echo", 1)
    before = worker_pid(hasty)
    assert run(hasty, "count_forks", 200).value == LIMITS.processes - 1
    assert run(hasty, "count_threads", 200).value == LIMITS.processes - 1
    assert run(hasty, "fork_bomb").kind == "timeout"
    assert descendants(worker_pid(hasty)) == []
    assert run(hasty, "echo", 1) == Outcome("value", value=1)
    assert worker_pid(hasty) == before
    assert bare(attacks, "count_threads", 50) == 50


def test_ten_gigabytes(box):
    assert run(box, "allocate", 10 << 30) == Outcome("memory", error="killed: memory")
    assert run(box, "reserve", 10 << 30).kind == "raised", "address space counts, touched or not"
    assert run(box, "allocate", 100 << 20) == Outcome("value", value=100 << 20)
    assert run(box, "touch_together", 5, 80 << 20).kind == "memory", "each below the limit, together above it"
    assert run(box, "memory_elsewhere") == Outcome("value", value=[])
    assert run(box, "many_files").value < 10_000


def test_endless_output(box, hasty):
    assert run(box, "chatter", 64) == Outcome("value", value="done")
    assert run(hasty, "endless_output") == Outcome("timeout", error="timed out after 1 s")
    assert run(box, "endless_reply").error == "reply was longer than 65536 bytes"


def test_endless_loop(box, hasty):
    assert run(hasty, "spin") == Outcome("timeout", error="timed out after 1 s")
    assert run(hasty, "sleep", 60, 1) == Outcome("timeout", error="timed out after 1 s")
    assert run(box, "sleep", 0.1, 1) == Outcome("value", value=1)


@pytest.mark.slow
def test_cpu_limit(open_box):
    sandbox = open_box(limits=Limits(cpu_s=1, wall_s=60))
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
        subprocess.run([sys.executable, "-c", f"import os; os.kill({victim.pid}, 9)"], check=True)
        assert victim.wait() == -signal.SIGKILL


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
    assert outcome.kind == "raised"
    assert outcome.error is not None
    assert outcome.error.startswith("ValueError: a b [31m c")
    assert outcome.error.isprintable()
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
    assert clean.value["score"] == "honest"
    assert clean.value["length"] == 4
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
    assert [o.value for o in values] == list(range(30))
    assert not was_done
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
    future = sandbox.submit("attacks:sleep", 15, 1)
    wait_until(lambda: descendants(worker_pid(sandbox)))
    os.kill(worker_pid(sandbox), signal.SIGKILL)
    assert future.result() == Outcome("lost", error="the worker died")
    assert run(sandbox, "echo", 1) == Outcome("value", value=1)


def test_close_leaves_nothing(open_box):
    before = set(descendants(os.getpid()))
    sandbox = open_box(workers=2)
    futures = [sandbox.submit("attacks:touch_together", 3, 1) for _ in range(2)]
    wait_until(lambda: len(set(descendants(os.getpid())) - before) >= 10)
    started = set(descendants(os.getpid())) - before
    sandbox.close()
    assert [future.result().kind for future in futures] == ["lost", "lost"]
    assert all(is_gone(pid) for pid in started)
    with pytest.raises(RuntimeError, match="closed"):
        sandbox.submit("attacks:echo", 1)


@pytest.mark.parametrize("state", ["idle", "busy"])
def test_the_parent_is_killed_while_others_hold_its_socket(how, attacks, state):
    command = [sys.executable, "-W", "ignore", "-c", ORPHANS, how, str(attacks), state]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={"PYTHONPATH": SOURCE}) as holder:
        assert holder.stdout is not None
        worker, outer, *others = map(int, holder.stdout.readline().split())
        holder.kill()
        wait_until(lambda: is_gone(worker) and is_gone(outer))
        assert not any(is_gone(pid) for pid in others)
        for pid in others:
            os.kill(pid, signal.SIGKILL)


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
    assert done.stdout.startswith("None no sandbox on this machine")
    assert done.stdout.count("\n") == 1
    assert "namespaces: " in done.stdout
    assert "bubblewrap: " in done.stdout


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
    assert written == []
    assert signalled == []
    assert forks == 7
    assert privileges["caps"] == ""
    assert privileges["escapes"] == []
    assert privileges["env"] == {}
    assert score["score"] == "honest"
    assert score["length"] == 4
    assert "left" not in score["tmp"]


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
    assert len({len(program) for program in programs}) == 1
    assert programs[0] != programs[1]
    with pytest.raises(OSError, match="no system call filter for riscv64"):
        system_call_filter("riscv64")
