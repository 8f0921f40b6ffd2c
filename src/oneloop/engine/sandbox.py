"""Calls on model text, run where they can do no harm: every scorer that sees a response goes through here.

A ``Sandbox`` is a pool of worker processes, each alone in its own user, mount, process, network and IPC namespaces
(``sandbox_worker.py`` says what holds it). A worker forks one fresh child for a call and ends everything in its
namespace afterwards, so one call cannot reach the next. Both directions speak length-prefixed JSON; nothing is
unpickled. A crash, a hang or a hostile reply is the ``Outcome`` of that call only; a dead worker is replaced. Where the
machine offers no isolation the call is refused: it is never run bare.

What this cannot do: a scorer that evaluates model text in its own process can be made to return any value. The sandbox
bounds what such text can reach, not what it can claim about itself.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import select
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from oneloop.engine import sandbox_worker
from oneloop.engine.sandbox_root import REMEDY, How, SandboxUnavailable, View, command, spare_uid, visible

Kind = Literal["value", "raised", "timeout", "memory", "crashed", "bad_reply", "lost"]

START_S = 10.0  # a worker that is not ready by then is given up; ready within 0.15 s on an idle machine
IMPORT_S = 120.0  # first import of a scorer's module, paid once per worker and outside the limits of a call
GRACE_S = 3.0  # the worker enforces wall_s; the parent ends the worker itself this much later
WATCH_S = 0.05  # how often a running call's memory is added up
MAX_DEPTH = 32  # nesting of a reply
MAX_ERROR = 500  # characters of an error line
TARGET = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one call may use. All defaults are ours."""

    cpu_s: float = 5.0
    """CPU time of each process, seconds, rounded up to whole ones by the kernel."""
    wall_s: float = 10.0
    """Time from start to reply, seconds; then everything the call started is killed."""
    memory_bytes: int = 1 << 30
    """Bytes for /tmp and memory. Without ``tmp_bytes`` the rest bounds the address space of each process (exact) and
    the resident memory of all together (sampled; pages that processes share count in each)."""
    tmp_bytes: int = 64 << 20
    """Bytes of /tmp, taken out of ``memory_bytes``; emptied after each call."""
    file_bytes: int = 16 << 20
    """Bytes of one file."""
    processes: int = 16
    """Processes and threads at once, the call's own included."""
    open_files: int = 64
    """Descriptors of one process, at most 256."""
    output_bytes: int = 64 << 10
    """Bytes of the reply as JSON. Standard output and error are discarded."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"Limits.{name} = {value}: must be a positive number")
        if self.tmp_bytes >= self.memory_bytes:
            raise ValueError(f"Limits.tmp_bytes = {self.tmp_bytes}: must be below memory_bytes = {self.memory_bytes}")
        if not 8 <= self.open_files <= 256:
            raise ValueError(f"Limits.open_files = {self.open_files}: must lie between 8 and 256")


@dataclass(frozen=True)
class Outcome:
    """A value, or the reason why there is none; never a silent 0."""

    kind: Kind
    value: Any = None
    """The JSON value that the function returned (kind ``value`` only)."""
    error: str | None = None
    """One printable line, at most 500 characters; model text may have chosen its words."""


class Availability(NamedTuple):
    """Whether calls can be isolated here."""

    how: How | None
    reason: str
    """Empty where there is a sandbox, else one line that says what to install or allow."""


class Sandbox:
    """A pool of ``workers`` isolated processes, started when first needed.

    Consumes calls from any thread and any event loop; one waits while all workers are busy; it is unblocked by a reply,
    a limit or the worker's death; produces one Outcome for each call.

    Args:
        workers: calls at the same time.
        limits: for every call.
        how: ``auto`` takes bubblewrap where it works, else plain namespaces.
        import_paths: folders, beside oneloop and site-packages, from which targets are imported; readable inside.

    """

    def __init__(
        self,
        *,
        workers: int = 1,
        limits: Limits | None = None,
        how: Literal["auto", "bubblewrap", "namespaces"] = "auto",
        import_paths: Sequence[Path] = (),
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers = {workers}: must be at least 1")
        ways: dict[str, tuple[How, ...]] = {
            "auto": ("bubblewrap", "namespaces"),
            "bubblewrap": ("bubblewrap",),
            "namespaces": ("namespaces",),
        }
        if how not in ways:
            raise ValueError(f"how = {how!r}: must be one of {', '.join(ways)}")
        self.limits = limits or Limits()
        self._ways = ways[how]
        self._view = visible(import_paths)
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._alive: set[_Worker] = set()
        self._proved: How | None = None
        self._is_closed = False
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="sandbox")
        self._owner = os.getpid()

    async def call(self, target: str, *args: Any) -> Outcome:
        """Await ``module.path:function(*args)`` inside; see ``submit``."""
        return await asyncio.wrap_future(self.submit(target, *args))

    def submit(self, target: str, *args: Any) -> Future[Outcome]:
        """Start ``module.path:function(*args)`` inside, for callers without an event loop.

        Raises:
            ValueError, TypeError: the target is not ``module.path:function``, or an argument is not JSON.
            RuntimeError: the sandbox is closed.
            SandboxUnavailable: through the future, where this machine has no isolation.

        """
        if not TARGET.fullmatch(target):
            raise ValueError(f"target {target!r}: must be 'module.path:function'")
        request = json.dumps({"target": target, "args": args}, allow_nan=False).encode()
        if self._is_closed or os.getpid() != self._owner:
            raise RuntimeError("the sandbox is closed, or belongs to the process that this one was forked from: open one")
        return self._threads.submit(self._run, target.partition(":")[0], request)

    def close(self) -> None:
        """End every process of the pool and wait until they are gone; calls in flight become ``lost``."""
        if os.getpid() != self._owner:
            return  # a forked copy must not end the original's workers
        with self._lock:
            self._is_closed = True
            alive = list(self._alive)
        for worker in alive:
            worker.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in list(self._alive):
            self._discard(worker)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    def _run(self, module: str, request: bytes) -> Outcome:
        """Run one call on an idle or a new worker (in a thread of the pool)."""
        try:
            worker = self._take()
        except SandboxUnavailable as error:
            if self._proved is None:
                raise
            return Outcome("lost", error=_one_line(f"no worker could be started: {error}"))
        try:
            outcome, is_fit = worker.call(module, request, self.limits)
        except BaseException:
            self._discard(worker)
            raise
        if is_fit and not self._is_closed:
            with self._lock:
                self._idle.append(worker)
        else:
            self._discard(worker)
        return outcome

    def _take(self) -> _Worker:
        while True:
            with self._lock:
                worker = self._idle.pop() if self._idle else None
            if worker is None:
                return self._start()
            if worker.is_alive():
                return worker
            self._discard(worker)  # died between two calls: no sample pays for it

    def _start(self) -> _Worker:
        reasons = []
        ways: tuple[How, ...] = (self._proved,) if self._proved else self._ways
        for how in ways:
            try:
                worker = _Worker(how, self._view, self.limits)
            except SandboxUnavailable as error:
                reasons.append(f"{how}: {error}")
                continue
            with self._lock:
                self._proved = how
                self._alive.add(worker)
                if self._is_closed:
                    worker.kill()
            return worker
        raise SandboxUnavailable(_one_line(f"{REMEDY} [{'; '.join(reasons)}]", limit=2 * MAX_ERROR))

    def _discard(self, worker: _Worker) -> None:
        worker.stop()
        with self._lock:
            self._alive.discard(worker)


def available(how: Literal["auto", "bubblewrap", "namespaces"] = "auto") -> Availability:
    """Start one sandboxed process and end it: the way that works here, or why none does."""
    with Sandbox(how=how) as sandbox:
        try:
            sandbox.submit("math:floor", 1.5).result()
        except SandboxUnavailable as error:
            return Availability(None, str(error))
        return Availability(sandbox._proved, "")


class _Worker:
    """One sandboxed process as its parent sees it. ``call`` from one thread at a time; ``kill`` from any."""

    def __init__(self, how: How, view: View, limits: Limits) -> None:
        self._modules: set[str] = set()
        self._pidfd: int | None = None
        self._lock = threading.Lock()
        self.socket, theirs = socket.socketpair()
        me = os.pidfd_open(os.getpid())  # forked copies of this process may hold the socket; this tells our own death
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        try:
            self._process = subprocess.Popen(
                command(how, view),
                stdin=theirs.fileno(),
                stdout=me,
                stderr=subprocess.PIPE,
                env={"PYTHONHASHSEED": "0"},  # scorers give the same value in every worker; cleared inside
                cwd="/",
                start_new_session=True,
            )
        except (OSError, SandboxUnavailable) as error:
            self.socket.close()
            raise SandboxUnavailable(str(error)) from None
        finally:
            theirs.close()
            os.close(me)
        uid = spare_uid(self._process.pid) if os.geteuid() == 0 else os.geteuid()
        binds = view.binds if how == "namespaces" else []
        setup = {"binds": binds, "links": view.links, "paths": view.paths, "uid": uid, "limits": asdict(limits)}
        try:
            self._greet(setup)
        except BaseException:
            self.stop()
            raise

    def _greet(self, setup: dict[str, Any]) -> None:
        """Hand over the set-up; learn the inner process's pid from the kernel, which translates it for us."""
        self.socket.settimeout(START_S)
        reply, ancillary = b"", []
        try:
            self._send(json.dumps(setup).encode())
            head, ancillary, _, _ = self.socket.recvmsg(4, socket.CMSG_SPACE(struct.calcsize("3i")))
            if len(head) == 4:
                reply = self._receive(int.from_bytes(head, "big"), time.monotonic() + START_S)
        except (OSError, _Stopped):
            reply = b""  # its last words say more
        if reply[:1] != sandbox_worker.VALUE:
            raise SandboxUnavailable(reply[1:].decode(errors="replace") or self._last_words())
        self.pid: int = struct.unpack("3i", ancillary[0][2])[0]
        self._pidfd = os.pidfd_open(self.pid)
        if self._process.stderr:
            self._process.stderr.close()

    def _last_words(self) -> str:
        self._process.kill()
        lines = self._process.communicate()[1].decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit status {self._process.returncode}"

    def is_alive(self) -> bool:
        """Whether the worker waits for a request: nothing to read, not even an end."""
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        return not poll.poll(0)

    def call(self, module: str, request: bytes, limits: Limits) -> tuple[Outcome, bool]:
        """Return the outcome, and whether the worker can go on."""
        try:
            if module not in self._modules:
                reply = self._ask(json.dumps({"import": module}).encode(), IMPORT_S, None)
                if reply[:1] != sandbox_worker.VALUE:
                    return Outcome("raised", error=_one_line(reply[1:].decode(errors="replace"))), True
                self._modules.add(module)
            reply = self._ask(request, limits.wall_s + GRACE_S, limits)
        except _Stopped as stopped:
            return stopped.outcome, False
        except OSError as error:
            return Outcome("lost", error=_one_line(f"the worker died: {error}")), False
        return _parse(reply[:1].lower(), reply[1:]), reply[:1].islower()

    def _ask(self, request: bytes, seconds: float, limits: Limits | None) -> bytes:
        deadline = time.monotonic() + seconds
        self.socket.settimeout(seconds)
        self._send(request)
        self.socket.settimeout(WATCH_S)
        count = int.from_bytes(self._receive(4, deadline, limits), "big")
        return self._receive(count, deadline, limits)

    def _send(self, payload: bytes) -> None:
        self.socket.sendall(struct.pack(">I", len(payload)) + payload)

    def _receive(self, count: int, deadline: float, limits: Limits | None = None) -> bytes:
        data = bytearray()
        while len(data) < count:
            try:
                chunk = self.socket.recv(count - len(data))
            except TimeoutError:
                if time.monotonic() > deadline:
                    raise _Stopped("timeout", "timed out: the worker did not answer and was ended") from None
                if limits and _tree_bytes(self.pid) > limits.memory_bytes - limits.tmp_bytes:
                    raise _Stopped("memory", "killed: memory") from None
                continue
            if not chunk:
                raise _Stopped("lost", "the worker died")
            data += chunk
        return bytes(data)

    def kill(self) -> None:
        """End pid 1 of the namespace, and with it everything inside."""
        with self._lock, suppress(ProcessLookupError):
            if self._pidfd is not None:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            else:
                self._process.kill()

    def stop(self) -> None:
        """Kill, then wait until the last process is gone: the outer one ends only after the namespace is empty."""
        self.kill()
        try:
            self._process.wait(START_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with self._lock:
            if self._pidfd is not None:
                os.close(self._pidfd)
                self._pidfd = None
        self.socket.close()
        if self._process.stderr:
            self._process.stderr.close()


class _Stopped(Exception):
    def __init__(self, kind: Kind, error: str) -> None:
        super().__init__(error)
        self.outcome = Outcome(kind, error=error)


# ---------------------------------------------------------------- what comes back


def _parse(kind: bytes, payload: bytes) -> Outcome:
    names: dict[bytes, Kind] = {
        sandbox_worker.RAISED: "raised",
        sandbox_worker.TIMEOUT: "timeout",
        sandbox_worker.MEMORY: "memory",
        sandbox_worker.CRASHED: "crashed",
        sandbox_worker.BAD_REPLY: "bad_reply",
    }
    if kind in names:
        return Outcome(names[kind], error=_one_line(payload.decode(errors="replace")))
    try:
        value = json.loads(payload.decode(), parse_constant=_finite, parse_float=_finite)
        _check_depth(value)
    except (ValueError, RecursionError) as error:
        return Outcome("bad_reply", error=_one_line(f"reply was not JSON: {error}"))
    return Outcome("value", value=value)


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is not a finite number")
    return number


def _check_depth(value: Any) -> None:
    level, depth = [value], 0
    while level:
        if depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH}")
        below: list[Any] = []
        for item in level:
            if isinstance(item, str):
                item.encode()  # half of a surrogate pair is not text
            elif isinstance(item, dict):
                below += [*item, *item.values()]
            elif isinstance(item, list):
                below += item
        level, depth = below, depth + 1


def _one_line(text: str, limit: int = MAX_ERROR) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * limit]).split())[:limit]


def _tree_bytes(root: int) -> int:
    """Add up the resident bytes of all descendants of a process; those that vanish meanwhile count nothing."""
    page, total, todo = os.sysconf("SC_PAGE_SIZE"), 0, [root]
    while todo:
        pid = todo.pop()
        with suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                todo += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
            if pid != root:
                total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * page
    return total
