"""A fork server gives way to another one while processes of the first live on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TWO_SERVERS = """
import multiprocessing
import os

import psutil

from tests.support.fork_server import ensure_fork_server, stop_fork_server

server = multiprocessing.forkserver._forkserver
context = multiprocessing.get_context("forkserver")


def answer(connection):
    while (name := connection.recv()) is not None:
        connection.send(os.environ.get(name))


def start():
    ours, theirs = context.Pipe()
    process = context.Process(target=answer, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def ask(connection):
    connection.send("SERVER")
    assert connection.poll(30)
    return connection.recv()


if __name__ == "__main__":
    started = []
    pids = []
    for number in ("1", "2"):
        ensure_fork_server(["json"], {"SERVER": number})
        started.append(start())
        pids.append(server._forkserver_pid)
    stop_fork_server()
    assert [ask(connection) for _, connection in started] == ["1", "2"]
    for process, connection in started:
        connection.send(None)
        process.join(30)
        assert not process.is_alive()
    gone, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids], 30)
    assert not alive
    ensure_fork_server(["json"], {"SERVER": "3"})
    pid = server._forkserver_pid
    stop_fork_server()
    assert not psutil.pid_exists(pid), "one without processes is still there"
    print("both answered")
"""


def test_processes_live_on_when_their_fork_server_is_let_go(tmp_path: Path) -> None:
    program = tmp_path / "two_servers.py"
    program.write_text(TWO_SERVERS)
    ran = subprocess.run([sys.executable, "-P", program], capture_output=True, text=True, timeout=90, check=False)
    assert ran.stdout == "both answered\n", ran.stderr
