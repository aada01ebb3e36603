#!/usr/bin/env python3
# /// script
# requires-python = ">=3.10"
# ///
"""Start a real server on loopback, for a test or for a command: serve.py etcd3 -- COMMAND...

    python3 examples/serve.py postgres -- python3 test_leases.py --store examples/postgres_leases.py

starts PostgreSQL with an empty database, runs the command with the variables that libpq reads,
stops the server, removes its data and exits with the command's status. `etcd` is one member,
`etcd3` a cluster of three, `mixed` PostgreSQL and one etcd member. A test has the same from
`postgres()` and `etcd(members=3)`, and can kill what it started, start it again on the same data,
and put a backup back.

The programs are looked for on PATH, PostgreSQL's also where Debian keeps them; its packages are
postgresql, etcd-server and etcd-client. A server listens on 127.0.0.1 only, on a port that was
free a moment ago, and lets in everybody who reaches it there. It syncs to disk as in production:
what a kill may lose is the point of the tests. If this process is killed itself, the server and
its temporary folder stay behind.
"""

from __future__ import annotations

import argparse
import glob
import http.client
import json
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

__all__ = ["Etcd", "Postgres", "ServerError", "etcd", "postgres", "program", "wait_for"]

LOOPBACK: Final = "127.0.0.1"
LIMIT: Final = 30.0  # seconds, for each wait
PAUSE: Final = 0.05  # seconds between two looks
POSTGRES: Final = ("initdb", "postgres", "pg_dump", "psql")
PACKAGES: Final = {  # Debian's, of each program that is needed here
    **dict.fromkeys(POSTGRES, "postgresql"),
    "etcd": "etcd-server",
    "etcdctl": "etcd-client",
}

_Kind = TypeVar("_Kind", bound="_Server")


class ServerError(Exception):
    """A server could not be had; the message is one line that says which and why."""


class _Server:
    """Processes of one kind: started, killed, started again on the same data, and stopped.

    `environment` is what a client needs to find them. `members` are numbered from 0.
    """

    name: str
    busy = ""  # what the log says of an obstacle that goes away by itself

    def __init__(self, folder: Path, members: int = 1) -> None:
        self.environment: dict[str, str] = {}
        self.members = range(members)
        self._folder = folder
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._user: int | None = None  # of the server's processes; None is our own
        self._group: int | None = None

    def start(self, *members: int) -> None:
        """Start the members named (without a name, 0) and wait until each of them answers.

        An etcd member answers once a majority is up. Raises ServerError if that takes too long.
        """
        members = members or (0,)
        for member in members:
            self._launch(member)
        for member in members:
            wait_for(f"{self.name} (member {member}) to answer", partial(self._up, member))

    def kill(self, *members: int) -> None:
        """End the members named (without a name, 0) by SIGKILL, and wait until they are gone."""
        for member in members or (0,):
            process = self._processes.pop(member)
            if process.poll() is None:
                process.send_signal(signal.SIGSTOP)  # from here on it starts and reaps no child
                for pid in (*_children(process.pid), process.pid):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                process.wait()

    def stop(self) -> None:
        """End what still runs."""
        if self._processes:
            self.kill(*self._processes)

    def _launch(self, member: int) -> None:
        if member in self._processes:
            raise ServerError(f"{self.name} (member {member}) is running already")
        with (self._folder / f"log{member}").open("wb") as log:
            self._processes[member] = subprocess.Popen(
                self._command(member),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
                user=self._user,
                group=self._group,
                extra_groups=None if self._user is None else [],
                start_new_session=True,  # Ctrl-C is for us, who then stop it
            )

    def _up(self, member: int) -> bool:
        process = self._processes[member]
        if process.poll() is not None:
            log = (self._folder / f"log{member}").read_text(errors="replace").strip()
            if not self.busy or self.busy not in log:
                last = log.splitlines()[-1] if log else "no output"
                raise ServerError(f"{self.name} ended with {process.returncode}: {last}")
            del self._processes[member]
            self._launch(member)
        return self._ready(member)

    def _command(self, member: int) -> list[str]:
        raise NotImplementedError

    def _ready(self, member: int) -> bool:
        raise NotImplementedError


class Postgres(_Server):
    """A PostgreSQL server with an empty database."""

    name = "postgres"
    # Backends that outlive a killed parent for a moment keep the old server's memory attached.
    busy = "is still in use"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._programs = {name: program(name) for name in POSTGRES}
        if os.geteuid() == 0:  # where the server refuses to run
            self._user, self._group = _unprivileged()
            os.chown(folder, self._user, self._group)
        self._port = _free_ports(1)[0]
        self.environment = {
            "PGHOST": LOOPBACK,
            "PGPORT": str(self._port),
            "PGUSER": "leases",
            "PGDATABASE": "postgres",
        }
        self._run(
            "initdb", f"--pgdata={folder / 'data'}", "--username=leases", "--auth=trust",
            "--encoding=UTF8", "--no-locale",
        )  # fmt: skip

    def save(self, backup: Path, *schemas: str) -> None:
        """Dump the schemas into the file `backup`, as SQL that replaces them."""
        chosen = [f'--schema="{schema}"' for schema in schemas]
        self._run("pg_dump", "--clean", "--if-exists", f"--file={backup}", *chosen)

    def restore(self, backup: Path) -> None:
        """Put the schemas in the file `backup` back, all or none of them, beside open clients."""
        self._run(
            "psql", "--no-psqlrc", "--quiet", "--set=ON_ERROR_STOP=1", "--single-transaction",
            f"--file={backup}",
        )  # fmt: skip

    def stop(self) -> None:
        """End the server at once, but let it give its shared memory back."""
        for process in self._processes.values():
            process.send_signal(signal.SIGQUIT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(LIMIT)
        super().stop()

    def _run(self, program: str, *arguments: str) -> None:
        ours = self._user if program == "initdb" else None
        _run(
            [self._programs[program], *arguments],
            self._folder,
            self.environment,
            ours,
            None if ours is None else self._group,
        )

    def _command(self, member: int) -> list[str]:
        return [
            self._programs["postgres"], "-D", str(self._folder / "data"), "-p", str(self._port),
            f"--listen_addresses={LOOPBACK}", "--unix_socket_directories=",
            "--shared_buffers=16MB",
        ]  # fmt: skip

    def _ready(self, member: int) -> bool:
        try:
            self._run("psql", "--no-psqlrc", "--quiet", "--output=/dev/null", "--command=SELECT 1")
        except ServerError:
            return False
        return True


class Etcd(_Server):
    """An etcd cluster of one or more members."""

    name = "etcd"

    def __init__(self, folder: Path, members: int) -> None:
        super().__init__(folder, members)
        self._etcd = program("etcd")
        ports = _free_ports(2 * members)
        self._ports, peers = ports[:members], ports[members:]
        self._peers = [f"http://{LOOPBACK}:{port}" for port in peers]
        self._cluster = ",".join(f"member{m}={self._peers[m]}" for m in self.members)
        endpoints = ",".join(f"http://{LOOPBACK}:{port}" for port in self._ports)
        self.environment = {"ETCDCTL_ENDPOINTS": endpoints, "ETCDCTL_API": "3"}

    def leader(self) -> int:
        """Ask the members who leads, and wait until one of them says that it does."""
        found: list[int] = []

        def look() -> bool:
            terms = {}
            for member in self._processes:
                with suppress(OSError, http.client.HTTPException, ValueError, KeyError):
                    status = _ask(self._ports[member], "POST", "/v3/maintenance/status")
                    header = status["header"]
                    if isinstance(header, dict) and header["member_id"] == status["leader"]:
                        terms[int(header["raft_term"])] = member
            found.extend(terms[term] for term in sorted(terms)[-1:])
            return bool(found)

        wait_for("etcd's members to name a leader", look)
        return found[0]

    def save(self, backup: Path) -> None:
        """Save a snapshot of member 0 in the file `backup`."""
        endpoint = {**self.environment, "ETCDCTL_ENDPOINTS": f"{LOOPBACK}:{self._ports[0]}"}
        etcdctl = program("etcdctl")
        _run([etcdctl, "snapshot", "save", str(backup)], self._folder, endpoint)

    def restore(self, backup: Path) -> None:
        """Kill all members, replace their data by the snapshot in `backup`, start them again."""
        tool = shutil.which("etcdutl") or program("etcdctl")  # etcdctl before 3.6
        self.stop()
        for member in self.members:
            shutil.rmtree(self._folder / f"data{member}")
            _run(
                [
                    tool, "snapshot", "restore", str(backup),
                    f"--data-dir={self._folder / f'data{member}'}", f"--name=member{member}",
                    f"--initial-cluster={self._cluster}",
                    f"--initial-advertise-peer-urls={self._peers[member]}",
                ],
                self._folder,
                {"ETCDCTL_API": "3"},
            )  # fmt: skip
        self.start(*self.members)

    def _command(self, member: int) -> list[str]:
        client, peer = f"http://{LOOPBACK}:{self._ports[member]}", self._peers[member]
        return [
            self._etcd, f"--name=member{member}", f"--data-dir={self._folder / f'data{member}'}",
            f"--listen-client-urls={client}", f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster={self._cluster}", "--initial-cluster-state=new",
        ]  # fmt: skip

    def _ready(self, member: int) -> bool:
        try:  # it is healthy if it can read through a majority
            return _ask(self._ports[member], "GET", "/health")["health"] == "true"
        except (OSError, http.client.HTTPException, ValueError, KeyError):
            return False


@contextmanager
def postgres() -> Iterator[Postgres]:
    """Run a PostgreSQL server for the block's time; raises ServerError if it can't be had."""
    with tempfile.TemporaryDirectory(prefix="leases-postgres-") as folder:
        yield from _serving(Postgres(Path(folder)))


@contextmanager
def etcd(members: int = 1) -> Iterator[Etcd]:
    """Run an etcd cluster for the block's time; raises ServerError if it can't be had."""
    with tempfile.TemporaryDirectory(prefix="leases-etcd-") as folder:
        yield from _serving(Etcd(Path(folder), members))


def wait_for(what: str, happened: Callable[[], bool], limit: float = LIMIT) -> None:
    """Look until `happened` says so; ServerError names `what` was awaited for `limit` seconds."""
    end = time.monotonic() + limit
    while not happened():
        if time.monotonic() >= end:
            raise ServerError(f"waited {limit:g} s for {what}")
        time.sleep(PAUSE)


def program(name: str) -> str:
    """Find one of `PACKAGES`'s programs; raises ServerError if it is not installed."""
    folders = glob.glob("/usr/lib/postgresql/*/bin")
    folders.sort(key=lambda folder: [int(number) for number in re.findall(r"\d+", folder)])
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *reversed(folders)])
    found = shutil.which(name, path=path)
    if found is None:
        raise ServerError(f"{name} is not installed (Debian package: {PACKAGES[name]})")
    return found


def _serving(server: _Kind) -> Iterator[_Kind]:
    try:
        server.start(*server.members)
        yield server
    finally:
        server.stop()


def _unprivileged() -> tuple[int, int]:
    for name in ("postgres", "nobody"):
        with suppress(KeyError):
            user = pwd.getpwnam(name)
            return user.pw_uid, user.pw_gid
    raise ServerError("PostgreSQL does not run as root, and there is no user postgres or nobody")


def _free_ports(count: int) -> list[int]:
    """Bind all of them before the first is given free, so that they differ."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((LOOPBACK, 0))
        return [int(each.getsockname()[1]) for each in sockets]


def _children(parent: int) -> list[int]:
    """List the processes that a process has started; none where there is no /proc."""
    children = []
    for stat in glob.glob("/proc/[0-9]*/stat"):
        with suppress(OSError):
            text = Path(stat).read_text(errors="replace")
            if int(text.rpartition(")")[2].split()[1]) == parent:
                children.append(int(text.split()[0]))
    return children


def _run(
    command: list[str],
    folder: Path,
    environment: dict[str, str],
    user: int | None = None,
    group: int | None = None,
) -> None:
    """Run a program to its end; ServerError holds the last line of what it said if it failed."""
    name = Path(command[0]).name
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={**os.environ, **environment},
            user=user,
            group=group,
            extra_groups=None if user is None else [],
            timeout=LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ServerError(f"waited {LIMIT:g} s for {name} to end") from None
    if done.returncode != 0:
        said = done.stdout.decode(errors="replace").strip().splitlines() or ["no output"]
        raise ServerError(f"{name} ended with {done.returncode}: {said[-1]}")


def _ask(port: int, method: str, path: str) -> dict[str, object]:
    """Ask an etcd member over HTTP; answers the JSON object that came."""
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=2)
    try:
        connection.request(method, path, body="{}" if method == "POST" else None)
        answer = json.loads(connection.getresponse().read())
    finally:
        connection.close()
    if not isinstance(answer, dict):
        raise ValueError(f"etcd answered {answer!r}")
    return answer


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description="Run a command beside a real server on loopback.",
        usage="%(prog)s postgres|etcd|etcd3|mixed -- COMMAND...",
    )
    parser.add_argument("server", choices=["postgres", "etcd", "etcd3", "mixed"])
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("a command is missing")
    for number in (signal.SIGTERM, signal.SIGHUP):  # so that the server is stopped then, too
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        with ExitStack() as stack:
            servers: list[_Server] = []
            if options.server in ("postgres", "mixed"):
                servers.append(stack.enter_context(postgres()))
            if options.server != "postgres":
                members = 3 if options.server == "etcd3" else 1
                servers.append(stack.enter_context(etcd(members)))
            environment = dict(os.environ)
            for server in servers:
                environment.update(server.environment)
            return _status(command, environment)
    except (ServerError, OSError) as error:
        print(f"serve.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _status(command: list[str], environment: dict[str, str]) -> int:
    """Run the command and answer its status as a shell would; end it if we are to end."""
    with subprocess.Popen(command, env=environment) as process:
        try:
            status = process.wait()
        except BaseException:
            process.terminate()
            raise
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
