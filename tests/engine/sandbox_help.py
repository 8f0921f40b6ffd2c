"""What the tests of the sandbox share: controls, and a look at processes from outside."""

import json
import os
import struct
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

# A holder of a pool that is killed while a forked copy of it lives on.
ORPHANS = """
import os, subprocess, sys, time
from pathlib import Path
from oneloop.engine.sandbox import Sandbox
sandbox = Sandbox(how=sys.argv[1], import_paths=[Path(sys.argv[2])])
assert sandbox.submit("attacks:echo", 1).result().value == 1
(worker,) = sandbox._alive
leak = subprocess.Popen(["sleep", "20"], pass_fds=[worker.socket.fileno()], stdout=subprocess.DEVNULL)
copy = os.fork()
if copy == 0:
    try:
        sandbox.submit("attacks:echo", 1)
    except RuntimeError:
        sandbox.close()
        time.sleep(20)
    os._exit(0)
assert sandbox.submit("attacks:echo", 1).result().value == 1
if sys.argv[3] == "busy":
    sandbox.submit("attacks:sleep", 30, 1)
    while not Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text():
        time.sleep(0.01)
print(worker.pid, worker._process.pid, copy, leak.pid, flush=True)
time.sleep(20)
"""

# A pool held by an ordinary user.
ORDINARY = """
import sys, json, os
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from oneloop.engine.sandbox import Limits, Sandbox
with Sandbox(how="namespaces", limits=Limits(processes=8), import_paths=[Path(sys.argv[2])]) as sandbox:
    ask = lambda *call: sandbox.submit(*call).result().value
    print(json.dumps([ask("attacks:write_outside", ["/", "/usr"]), ask("attacks:privileges"),
                      ask("attacks:signals", os.getpid()), ask("attacks:count_forks", 100), ask("attacks:poison"),
                      ask("attacks:score", "four")]))
"""


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


def frame(payload: bytes) -> bytes:
    return struct.pack(">I", len(payload)) + payload


def is_gone(pid):
    try:  # what nobody reaps after its parent's death is not running either
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_until(condition):
    for _ in range(500):
        if condition():
            return
        time.sleep(0.01)
    pytest.fail("waited 5 s in vain")
