#!/usr/bin/env python3
# /// script
# requires-python = ">=3.10"
# dependencies = ["diskcache", "filelock>=3.29", "huey", "psycopg[binary]>=3.1", "redis"]
# ///
"""Measure leases.py beside its floor, beside its peers, under contention and as it grows.

    python3 benchmarks/bench_leases.py [--quick] [--json FILE]
    python3 benchmarks/bench_leases.py --table FILE

It needs nothing but Python; a peer that is not installed is named and left out. What is compared
runs in alternation in one run, and what counts is the ratio of two neighbours in time: medians
with quartiles. Everything runs on a RAM disk, if there is one, and on the disk of the temporary
folder. `--quick` takes less than a minute, and shows that the script runs rather than a figure;
`--table` prints the README's table from the JSON of an earlier run. No exit code depends on a
time: it is 0 unless a call gave another answer than it must.
"""

from __future__ import annotations

import argparse
import array
import importlib
import importlib.metadata
import itertools
import json
import multiprocessing
import os
import platform
import random
import shutil
import socket
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import serve

import leases as library
from leases import FencedSink, Lease, LeaseTable, take_over

Call = Callable[[int], object]

HERE: Final = Path(__file__).resolve().parent
HOUR: Final = 3_600_000  # in milliseconds, the ticks used here
PROCESSES: Final = 8
PERIOD, TTL = 0.1, 0.3  # seconds: between two renewals of the eighth process, and its lease's
WARM: Final = 1_000  # commits after which SQLite begins its log anew; a growing one costs twice
RAM_ROOM: Final = 10**9  # bytes, mostly for what the servers reserve
LIMIT: Final = 60.0  # seconds, for each wait beside a run's own length
START: Final = 1_764_000_000_000  # a tick of a system clock, since small integers take less room
FILL: Final = "INSERT INTO lease VALUES (?, 'A', 2, ?, NULL)"
FILL_SINK: Final = "INSERT INTO sink VALUES (?, 2, 2, 0, ?)"


class Effort(NamedTuple):
    """How much is measured: `rounds` of `batch` calls, runs of `seconds`, growth to `sizes`."""

    rounds: int
    batch: int
    peer_rounds: int
    peer_batch: int
    seconds: float
    sizes: tuple[int, ...]
    starts: int


FULL: Final = Effort(161, 50, 25, 50, 10.0, (1_000, 100_000, 1_000_000), 15)
QUICK: Final = Effort(3, 50, 2, 10, 0.5, (1_000, 10_000), 2)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Measure leases.py; see the module's docstring.")
    parser.add_argument("--quick", action="store_true", help="less than a minute, no figures")
    parser.add_argument("--json", metavar="FILE", help="write what was measured")
    parser.add_argument("--table", metavar="FILE", help="print the README's table from a JSON")
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(Path(options.table).read_text(encoding="utf-8"))))
        return 0
    effort = QUICK if options.quick else FULL
    found: dict[str, Any] = {"quick": options.quick, "sizes": effort.sizes, "disks": {}}
    found["machine"] = show("machine", machine())
    for name, root in disks().items():
        with tempfile.TemporaryDirectory(prefix="leases-bench-", dir=root) as folder:
            disk = found["disks"][name] = {}
            show(f"{name}: the folder", about := folder_facts(Path(folder)))
            disk["about"] = about
            disk["calls"] = show(
                f"{name}: each call, relative to its floor", calls(Path(folder), effort)
            )
            disk["peers"] = show(
                f"{name}: a peer's acquire and release, relative to claim and release of leases.py",
                peers(Path(folder), root, effort),
            )
            disk["contention"] = show(
                f"{name}: {PROCESSES} processes for {effort.seconds:g} s",
                contention(Path(folder), effort),
            )
            disk["growth"] = show(
                f"{name}: growth, relative to the smallest size", growth(Path(folder), effort)
            )
    found["startup"] = show("start-up", startup(effort))
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


def show(title: str, found: dict[str, Any]) -> dict[str, Any]:
    """Print a part's findings, a line each, and hand them on."""
    print(f"\n{title}")
    for name, value in found.items():
        told = value
        if isinstance(value, dict):
            told = ", ".join(f"{key} {told_value(each)}" for key, each in value.items())
        print(f"  {name}: {told}", flush=True)
    return found


def told_value(value: object) -> str:
    """Show a number with three digits, and quartiles as a range."""
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
    if isinstance(value, list):
        return "[" + " to ".join(told_value(each) for each in value) + "]"
    return str(value)


def check(what: str, answer: object, right: object) -> None:
    """Stop unless a measured call gave the answer that it must."""
    if answer != right:
        raise SystemExit(f"bench_leases.py: {what} answered {answer!r}, not {right!r}")


def spread(values: list[float]) -> dict[str, Any]:
    """Give the median of some ratios, and their quartiles."""
    quartiles = statistics.quantiles(values, n=4, method="inclusive")
    return {"ratio": statistics.median(values), "quartiles": [quartiles[0], quartiles[2]]}


def timed(call: Call, numbers: range) -> float:
    """Time a call for each number; the loop and the function call count on every side alike."""
    began = time.perf_counter()
    for number in numbers:
        call(number)
    return time.perf_counter() - began


# The machine


def machine() -> dict[str, Any]:
    """Name what the figures were seen on."""
    return {
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
    }


def disks() -> dict[str, Path]:
    """Find a RAM disk, where there is one that can be written, and the temporary folder's disk."""
    found = {"disk": Path(tempfile.gettempdir())}
    ram = Path("/dev/shm")
    if file_system(ram) != "tmpfs" or not os.access(ram, os.W_OK):
        print("left out: the RAM disk; there is no tmpfs at /dev/shm")
    elif shutil.disk_usage(ram).free < RAM_ROOM:
        print("left out: the RAM disk; /dev/shm has less than 1 GB free")
    else:
        found = {"RAM disk": ram, **found}
    if file_system(found["disk"]) == "tmpfs":
        print("the temporary folder lies on a RAM disk too: set TMPDIR to measure a real one")
    return found


def file_system(folder: Path) -> str:
    """Name a folder's file system, as far as /proc tells."""
    mounts = Path("/proc/mounts")
    if not mounts.exists():
        return "not known"
    lines = [line.split()[1:3] for line in mounts.read_text().splitlines()]
    above = [(len(at), kind) for at, kind in lines if folder.resolve().is_relative_to(at)]
    return max(above)[1] if above else "not known"


def folder_facts(folder: Path) -> dict[str, Any]:
    """Say what file system a folder is on and what one fsync of a page costs there."""
    costs = []
    with (folder / "page").open("wb", buffering=0) as file:
        for _ in range(100):
            file.write(bytes(4096))
            began = time.perf_counter()
            os.fsync(file.fileno())
            costs.append((time.perf_counter() - began) * 1e6)
    return {"file system": file_system(folder), "fsync, microseconds": statistics.median(costs)}


# 1. Each call against its floor


class Pair(NamedTuple):
    """A call, the statements it comes down to, and what it must answer; `ready` is not timed."""

    ours: Call
    floor: Call
    right: Callable[[int], object]
    ready: Callable[[range], None] = lambda numbers: None


def calls(folder: Path, effort: Effort) -> dict[str, Any]:
    """Time each call beside a hand-written twin on a plain connection of its own file."""
    with ExitStack() as stack:
        leases = stack.enter_context(LeaseTable(folder / "ours.db"))
        sink = stack.enter_context(FencedSink(folder / "ours-sink.db"))
        lease_floor = plain(folder / "floor.db", library.CREATE_LEASE)
        sink_floor = plain(folder / "floor-sink.db", library.CREATE_SINK)
        stack.callback(lease_floor.close)
        stack.callback(sink_floor.close)
        for number in range(WARM):
            leases.claim("warm", "A", now=number, ttl=1)
            sink.write("warm", number + 1, "value")
            granted(lease_floor, "warm", number)
            stored(sink_floor, "warm", number + 1)
        pairs = list_pairs(leases, sink, lease_floor, sink_floor)
        found = {}
        for name, pair in pairs.items():
            ratios = []
            for turn in range(effort.rounds + 1):
                numbers = range(turn * effort.batch, (turn + 1) * effort.batch)
                pair.ready(numbers)
                sides = [pair.ours, pair.floor][:: 1 if turn % 2 else -1]
                taken = {side: timed(side, numbers) for side in sides}
                if turn:  # the first warms caches
                    ratios.append(taken[pair.ours] / taken[pair.floor])
            last = (effort.rounds + 1) * effort.batch
            pair.ready(range(last, last + 1))
            pair.floor(last)
            check(name, pair.ours(last), pair.right(last))
            found[name] = spread(ratios)
        for ours, floor, kind in (
            ("ours.db", "floor.db", "lease"),
            ("ours-sink.db", "floor-sink.db", "sink"),
        ):  # a floor that changed less would be no floor
            left = [stored_rows(folder / name, kind) for name in (floor, ours)]
            check(f"the floor's {kind} table at the end", *left)
        return found


def plain(path: Path, create: str) -> sqlite3.Connection:
    """Open a file as the library does, with the same durability, and nothing around it."""
    connection = sqlite3.connect(path, timeout=0, isolation_level=None)
    connection.execute(library.DURABLE)
    connection.execute(library.WRITE_AHEAD)
    connection.execute(create)
    return connection


def stored_rows(path: Path, kind: str) -> list[Any]:
    """Read a table through a connection of its own."""
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(f"SELECT * FROM {kind} ORDER BY resource").fetchall()


def granted(connection: sqlite3.Connection, resource: str, number: int) -> None:
    """Claim by hand."""
    execute = connection.execute
    execute(library.BEGIN)
    row = execute(library.LEASE_ROW, (resource,)).fetchone()
    execute(library.GRANT, (resource, "A", (row[2] if row else 0) + 1, number + 1))
    execute(library.COMMIT)


def stored(connection: sqlite3.Connection, resource: str, epoch: int) -> None:
    """Write by hand."""
    execute = connection.execute
    execute(library.BEGIN)
    execute(library.SINK_ROW, (resource,)).fetchone()
    execute(library.STORE, (resource, epoch, epoch, 0, "value"))
    execute(library.COMMIT)


def renewed(connection: sqlite3.Connection, lease: Lease, deadline: int) -> None:
    """Renew by hand."""
    resource, owner, epoch, _ = lease
    execute = connection.execute
    execute(library.BEGIN)
    execute(library.RENEW, (deadline, resource, owner, epoch, 0))
    execute(library.LEASE_ROW, (resource,)).fetchone()
    execute(library.COMMIT)


def completed(connection: sqlite3.Connection, lease: Lease, result: str) -> None:
    """Complete by hand."""
    resource, owner, epoch, _ = lease
    execute = connection.execute
    execute(library.BEGIN)
    execute(library.COMPLETE, (result, resource, owner, epoch, 0))
    execute(library.COMMIT)


def taken_over(leases: sqlite3.Connection, sink: sqlite3.Connection, epoch: int) -> None:
    """Take over by hand, with the claim's deadline one after its epoch."""
    execute = sink.execute
    execute(library.SINK_ROW, ("taken",)).fetchone()
    granted(leases, "taken", epoch - 1)
    execute(library.BEGIN)
    execute(library.SINK_ROW, ("taken",)).fetchone()
    execute(library.RAISE_FENCE, ("taken", epoch))
    execute(library.COMMIT)


def looked_up(connection: sqlite3.Connection, sql: str, resource: str) -> None:
    """Refuse by hand."""
    execute = connection.execute
    execute(library.BEGIN)
    execute(sql, (resource,)).fetchone()
    execute(library.COMMIT)


def list_pairs(
    leases: LeaseTable,
    sink: FencedSink,
    lease_floor: sqlite3.Connection,
    sink_floor: sqlite3.Connection,
) -> dict[str, Pair]:
    """Write the table of calls and floors; a floor changes what the call changes."""
    on_lease = lease_floor.execute
    beating = leases.claim("beating", "A", now=0, ttl=1)
    held = leases.claim("held", "A", now=0, ttl=HOUR)
    if beating is None or held is None:
        raise SystemExit("bench_leases.py: a fresh resource was not granted")
    on_lease(library.GRANT, ("beating", "A", 1, 1))
    on_lease(library.GRANT, ("held", "A", 1, HOUR))
    sink.write("high", 2, "value")
    stored(sink_floor, "high", 2)
    work: dict[int, Lease] = {}

    def hand_out(numbers: range) -> None:
        on_lease(library.BEGIN)
        for number in numbers:
            work[number] = Lease(f"work {number}", "A", 1, HOUR)
            on_lease(library.GRANT, work[number])
        on_lease(library.COMMIT)
        with leases.guard(held, now=0) as connection:
            for number in numbers:
                connection.execute(library.GRANT, work[number])

    return {
        "claim": Pair(
            lambda n: leases.claim("claimed", "A", now=n, ttl=1),
            lambda n: granted(lease_floor, "claimed", n),
            lambda n: Lease("claimed", "A", n + 1, n + 1),
        ),
        "renew": Pair(
            lambda n: leases.renew(beating, now=0, ttl=n + 2),
            lambda n: renewed(lease_floor, beating, n + 2),
            lambda n: beating._replace(deadline=n + 2),
        ),
        "complete": Pair(
            lambda n: leases.complete(work[n], "done", now=0),
            lambda n: completed(lease_floor, work[n], "done"),
            lambda n: True,
            hand_out,
        ),
        "write": Pair(
            lambda n: sink.write("written", n + 1, "value"),
            lambda n: stored(sink_floor, "written", n + 1),
            lambda n: "written",
        ),
        "take_over": Pair(
            lambda n: take_over(leases, sink, "taken", "A", now=n, ttl=1),
            lambda n: taken_over(lease_floor, sink_floor, n + 1),
            lambda n: Lease("taken", "A", n + 1, n + 1),
        ),
        "claim, refused": Pair(
            lambda n: leases.claim("held", "B", now=0, ttl=1),
            lambda n: looked_up(lease_floor, library.LEASE_ROW, "held"),
            lambda n: None,
        ),
        "write, refused": Pair(
            lambda n: sink.write("high", 1, "value"),
            lambda n: looked_up(sink_floor, library.SINK_ROW, "high"),
            lambda n: "stale",
        ),
        "get": Pair(
            lambda n: leases.get("held"),
            lambda n: on_lease(library.LEASE_ROW, ("held",)).fetchone(),
            lambda n: library.LeaseRow("held", "A", 1, HOUR, None),
        ),
    }


# 2. Against what a user would pick instead

KEPT, LOST, NEVER = "kept", "may be lost", "not stored"


class Peer(NamedTuple):
    """One acquire and release, and what becomes of it in a power cut once it was answered."""

    cycle: Call
    after_power_cut: str


def peers(folder: Path, root: Path, effort: Effort) -> dict[str, Any]:
    """Time a cycle of each peer that is installed, in alternation with claim and release."""
    with ExitStack() as stack:
        running: dict[str, Peer] = {}
        missing: dict[str, str] = {}
        stack.enter_context(temporary_files_in(root))
        for name, start in PEERS.items():
            try:
                running[name] = stack.enter_context(start(folder))
            except (ImportError, serve.ServerError) as error:
                missing[name] = f"left out: {error}"
        for peer in running.values():
            end = time.perf_counter() + 1
            for number in range(WARM):
                if time.perf_counter() < end:
                    peer.cycle(number)
        taken: dict[str, list[float]] = {name: [] for name in running}
        for turn in range(effort.peer_rounds):
            first = WARM + turn * effort.peer_batch
            for name in list(running)[:: 1 if turn % 2 else -1]:
                numbers = range(first, first + effort.peer_batch)
                taken[name].append(timed(running[name].cycle, numbers))
        ours = taken["leases.py"]
        found: dict[str, Any] = {}
        for name, peer in running.items():
            ratios = [theirs / mine for theirs, mine in zip(taken[name], ours, strict=True)]
            found[name] = {**spread(ratios), "after a power cut": peer.after_power_cut}
        return {**found, **missing}


@contextmanager
def temporary_files_in(root: Path) -> Iterator[None]:
    """Let the servers keep their data on this disk."""
    before, tempfile.tempdir = tempfile.tempdir, str(root)
    try:
        yield
    finally:
        tempfile.tempdir = before


@contextmanager
def our_peer(folder: Path) -> Iterator[Peer]:
    """Run a cycle of leases.py itself, to which the others are compared."""
    with LeaseTable(folder / "peer.db") as leases:
        yield Peer(store_cycle(leases), KEPT)


def store_cycle(leases: Any) -> Call:
    """Claim and release one resource of any store."""

    def cycle(number: int) -> None:
        lease = leases.claim("peer", "A", now=0, ttl=HOUR)
        check("release", lease is not None and leases.release(lease, now=0), True)

    return cycle


def lock_cycle(lock: Any) -> Call:
    """Acquire and release a lock that is a context manager."""

    def cycle(number: int) -> None:
        with lock:
            pass

    return cycle


@contextmanager
def diskcache_peer(folder: Path, name: str, promise: str, **settings: int) -> Iterator[Peer]:
    """Run diskcache.Lock."""
    diskcache = importlib.import_module("diskcache")
    with diskcache.Cache(str(folder / name), **settings) as cache:
        yield Peer(lock_cycle(diskcache.Lock(cache, "peer")), promise)


@contextmanager
def filelock_peer(folder: Path, kind: str, promise: str) -> Iterator[Peer]:
    """Run one of filelock's locks."""
    filelock = importlib.import_module("filelock")
    if not hasattr(filelock, kind):
        raise ImportError(f"this filelock has no {kind}")
    yield Peer(lock_cycle(getattr(filelock, kind)(str(folder / f"{kind}.lock"))), promise)


@contextmanager
def huey_peer(folder: Path, name: str, **settings: bool) -> Iterator[Peer]:
    """Run huey's lock_task on SQLite, whose own default decides unless `fsync` is set."""
    huey = importlib.import_module("huey").SqliteHuey(filename=str(folder / name), **settings)
    try:
        (level,) = huey.storage.conn.execute("PRAGMA synchronous").fetchone()
        yield Peer(lock_cycle(huey.lock_task("peer")), KEPT if level >= 2 else LOST)
    finally:
        huey.storage.close()


@contextmanager
def server_peer(folder: Path, module: str, start: Callable[[], Any]) -> Iterator[Peer]:
    """Run a cycle of a store in examples/, on a server of its own."""
    with start() as server, environment(server.environment):
        store = importlib.import_module(module)
        with store.fresh() as (location, _), store.LeaseTable(location) as leases:
            yield Peer(store_cycle(leases), KEPT)


@contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """Set variables for the block's time."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def redis_peer(folder: Path, promise: str, *arguments: str) -> Iterator[Peer]:
    """Run redis-py's Lock on a server of its own."""
    redis: Any = importlib.import_module("redis")
    program = shutil.which("redis-server")
    if program is None:
        raise serve.ServerError("redis-server is not installed (Debian package: redis-server)")
    with socket.socket() as free:
        free.bind((serve.LOOPBACK, 0))
        port = free.getsockname()[1]
    data = tempfile.mkdtemp(prefix="redis-", dir=folder)
    command = [program, "--port", str(port), "--bind", serve.LOOPBACK, "--dir", data, "--save", ""]
    with subprocess.Popen([*command, *arguments], stdout=subprocess.DEVNULL) as server:
        try:
            client = redis.Redis(host=serve.LOOPBACK, port=port)

            def answers() -> bool:
                try:
                    return bool(client.ping())
                except redis.exceptions.RedisError:
                    return False

            serve.wait_for("redis-server to answer", answers)
            yield Peer(lock_cycle(client.lock("peer", timeout=HOUR // 1000)), promise)
            client.close()
        finally:
            server.kill()


PEERS: Final[dict[str, Callable[[Path], Any]]] = {
    "leases.py": our_peer,
    "diskcache.Lock": lambda folder: diskcache_peer(folder, "as it comes", LOST),
    "diskcache.Lock, sqlite_synchronous=2": lambda folder: diskcache_peer(
        folder, "synchronous", KEPT, sqlite_synchronous=2
    ),
    "filelock.FileLock": lambda folder: filelock_peer(folder, "FileLock", NEVER),
    "filelock.SoftFileLease": lambda folder: filelock_peer(folder, "SoftFileLease", LOST),
    "huey.lock_task": lambda folder: huey_peer(folder, "huey.db"),
    "huey.lock_task, fsync=False": lambda folder: huey_peer(folder, "huey-fast.db", fsync=False),
    "PostgreSQL": lambda folder: server_peer(folder, "postgres_leases", serve.postgres),
    "etcd": lambda folder: server_peer(folder, "etcd_leases", serve.etcd),
    "redis-py Lock, memory": lambda folder: redis_peer(folder, NEVER),
    "redis-py Lock, appendfsync always": lambda folder: redis_peer(
        folder, KEPT, "--appendonly", "yes", "--appendfsync", "always"
    ),
}


# 3. Contention


CASES: Final = ("own resources", "one resource", "heartbeat")
WAITING: Final = ("leases.py", "busy handler")


class Share(NamedTuple):
    """What one process saw: how long each call took, how many leases it had, what went wrong."""

    waits: list[float]
    cycles: int
    granted: int
    busy: int
    late: int | None  # None for a process without a heartbeat


def contention(folder: Path, effort: Effort) -> dict[str, Any]:
    """Let processes compete, on the library's waiting and on SQLite's own busy handler."""
    found: dict[str, Any] = {}
    for case in CASES:
        for waiting in WAITING:
            shares = compete(folder / f"{case} {waiting}.db", case, waiting, effort.seconds)
            found[f"{case}, {waiting}"] = summary(shares, effort.seconds)
        ours, theirs = (found[f"{case}, {waiting}"] for waiting in WAITING)
        found[f"{case}, compared"] = {
            "cycles": ours["cycles a second"] / theirs["cycles a second"],
            "granted": ours["granted a second"] / theirs["granted a second"],
            "worst wait, theirs over ours": theirs["worst ms"] / ours["worst ms"],
        }
    return found


def summary(shares: list[Share], seconds: float) -> dict[str, Any]:
    """Give the worst process beside the sum: pooled percentiles hide a starved one."""
    saturating = [share for share in shares if share.late is None]
    found = {
        "cycles a second": sum(share.cycles for share in saturating) / seconds,
        "granted a second": sum(share.granted for share in saturating) / seconds,
        "median ms": statistics.median(itertools.chain(*(s.waits for s in saturating))) * 1e3,
        "worst ms": max(max(share.waits) for share in shares) * 1e3,
        "most over fewest cycles": most_over_fewest([share.cycles for share in saturating]),
        "most over fewest granted": most_over_fewest([share.granted for share in saturating]),
        "busy": sum(share.busy for share in shares),
    }
    for share in shares:
        if share.late is not None:
            found["renewals"], found["late"] = len(share.waits), share.late
            found["worst renewal ms"] = max(share.waits) * 1e3
    return found


def most_over_fewest(counts: list[int]) -> float:
    """Say how unequal the processes' shares are; a process that had nothing counts as one."""
    return max(counts) / max(min(counts), 1)


def compete(path: Path, case: str, waiting: str, seconds: float) -> list[Share]:
    """Run the processes of one case to their end."""
    with LeaseTable(path) as leases:
        for number in range(WARM):
            leases.claim("warm", "A", now=number, ttl=1)
    context = multiprocessing.get_context("spawn")
    gate = context.Barrier(PROCESSES)
    answers = context.Queue()
    processes = [
        context.Process(
            target=worker, args=(number, path, case, waiting, seconds, gate, answers), daemon=True
        )
        for number in range(PROCESSES)
    ]
    for process in processes:
        process.start()
    try:
        shares = [answers.get(timeout=seconds + LIMIT) for _ in processes]
        for process in processes:
            process.join(LIMIT)
            check("a process of the contention", process.exitcode, 0)
    finally:
        for process in processes:
            process.kill()
    return shares


def worker(
    number: int, path: Path, case: str, waiting: str, seconds: float, gate: Any, answers: Any
) -> None:
    """Be one of the processes that compete."""
    with LeaseTable(path, timeout=LIMIT) as leases:
        resource = "one" if case == "one resource" else f"own {number}"
        beats = case == "heartbeat" and number == 0
        lease = leases.claim(resource, "A", now=0, ttl=HOUR) if beats else None
        if waiting == "busy handler":  # the same calls, but SQLite waits and the library does not
            leases._connection.execute("PRAGMA busy_timeout = 5000")
            leases._timeout = 0
        gate.wait(LIMIT)
        share = (
            saturate(leases, resource, seconds) if lease is None else beat(leases, lease, seconds)
        )
        answers.put(share)


def saturate(leases: LeaseTable, resource: str, seconds: float) -> Share:
    """Claim, and release what was granted, as fast as it goes; that is a cycle."""
    cycles = granted = busy = 0
    lease: Lease | None = None
    waits = array.array("d")
    end = time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        try:
            if lease is None:
                lease = leases.claim(resource, "A", now=0, ttl=HOUR)
                granted += lease is not None
                cycles += lease is None
            else:
                check("release", leases.release(lease, now=0), True)
                lease, cycles = None, cycles + 1
        except sqlite3.OperationalError:
            busy += 1
        waits.append(time.perf_counter() - began)
    return Share(waits.tolist(), cycles, granted, busy, None)


def beat(leases: LeaseTable, lease: Lease, seconds: float) -> Share:
    """Renew a lease every PERIOD; late is a renewal that is answered when TTL has passed.

    The table holds a deadline far ahead, so that a late renewal does not end the run.
    """
    late = busy = 0
    waits: list[float] = []
    began = held_since = time.perf_counter()
    for due in itertools.count(began + PERIOD, PERIOD):
        if due >= began + seconds:
            break
        time.sleep(max(0.0, due - time.perf_counter()))
        asked = time.perf_counter()
        try:
            ttl = HOUR + len(waits) + 1  # a renewal that changes nothing would write nothing
            check("renew", leases.renew(lease, now=0, ttl=ttl), lease._replace(deadline=ttl))
            late += time.perf_counter() >= held_since + TTL
            held_since = asked
        except sqlite3.OperationalError:
            busy += 1
        waits.append(time.perf_counter() - asked)
    return Share(waits, len(waits), 0, busy, late)


# 4. Growth

ROOM: Final = 8_000  # bytes on the disk a resource, with some to spare
VALUES: Final = {"a few bytes": "value", "3 KB": "v" * 3000}


def growth(folder: Path, effort: Effort) -> dict[str, Any]:
    """Time calls on files of each size in alternation; names are eight digits."""
    found: dict[str, Any] = {}
    for kind, value in VALUES.items():
        with ExitStack() as stack:
            place = Path(tempfile.mkdtemp(dir=folder))
            stack.callback(shutil.rmtree, place)
            stores = {}
            sizes = [size for size in effort.sizes if size * ROOM < shutil.disk_usage(place).free]
            for size in effort.sizes:
                if size not in sizes:
                    found[f"{kind}, {size} resources"] = "left out: there is no room for them"
            for size in sizes:
                path = place / str(size)
                fill(path, size, value)
                stores[size] = (
                    stack.enter_context(LeaseTable(f"{path}.lease")),
                    stack.enter_context(FencedSink(f"{path}.sink")),
                )
            found.update({f"{kind}, {k}": v for k, v in grown(stores, value, effort).items()})
            for size in sizes:
                path = place / str(size)
                facts = {
                    f"{table} table, bytes a row beside its text": row_bytes(path, table, text)
                    for table, text in (("lease", 8 + 1), ("sink", 8 + len(value)))
                }
                facts["opening, ms"] = statistics.median(
                    opening(Path(f"{path}.lease")) for _ in range(9)
                )
                facts["rows(), peak KB"] = peak(stores[size][0])
                found[f"{kind}, {size} resources"] = facts
    return found


def fill(path: Path, size: int, value: str) -> None:
    """Make both files in bulk, with SQL of our own; the library then opens what it finds."""
    names = [f"{number:08d}" for number in range(size)]
    random.Random(size).shuffle(names)  # pages that are filled in order come out fuller
    for kind, create, insert, rows in (
        ("lease", library.CREATE_LEASE, FILL, ((name, START) for name in names)),
        ("sink", library.CREATE_SINK, FILL_SINK, ((name, value) for name in names)),
    ):
        with closing(sqlite3.connect(f"{path}.{kind}", isolation_level=None)) as connection:
            connection.execute("PRAGMA journal_mode = OFF")
            connection.execute("PRAGMA synchronous = OFF")
            connection.execute("PRAGMA cache_size = -1000000")
            connection.execute(create)
            connection.execute("BEGIN")
            connection.executemany(insert, rows)
            connection.execute("COMMIT")


def grown(
    stores: dict[int, tuple[LeaseTable, FencedSink]], value: str, effort: Effort
) -> dict[str, Any]:
    """Time claim, renew and write on resources that lie all over each file."""
    smallest = min(stores)
    taken: dict[tuple[str, int], list[float]] = {}
    warming = 3 + WARM // effort.batch
    for turn in range(effort.rounds + warming):
        for size, (leases, sink) in stores.items():
            step = 7919 * (turn * effort.batch + 1)
            names = [f"{(step + 7919 * n) % size:08d}" for n in range(effort.batch)]
            held: dict[int, Lease] = {}

            def claim(n: int, turn: int = turn, leases: LeaseTable = leases,
                      names: list[str] = names, held: dict[int, Lease] = held) -> None:  # fmt: skip
                lease = leases.claim(names[n], "A", now=START + 10 * turn, ttl=1)
                if lease is not None:
                    held[n] = lease

            def renew(n: int, turn: int = turn, leases: LeaseTable = leases,
                      held: dict[int, Lease] = held) -> None:  # fmt: skip
                leases.renew(held[n], now=START + 10 * turn, ttl=5)

            def write(n: int, turn: int = turn, sink: FencedSink = sink,
                      names: list[str] = names) -> None:  # fmt: skip
                sink.write(names[n], turn + 3, value)

            for name, call in (("claim", claim), ("renew", renew), ("write", write)):
                cost = timed(call, range(effort.batch))
                if turn >= warming:
                    taken.setdefault((name, size), []).append(cost)
            check("claims", len(held), len(set(names)))
    found: dict[str, Any] = {}
    for (name, size), costs in taken.items():
        if size != smallest:
            pairs = zip(costs, taken[name, smallest], strict=True)
            found[f"{name} at {size}"] = spread([cost / least for cost, least in pairs])
    return found


def row_bytes(path: Path, kind: str, names: int) -> float:
    """Divide a file's pages by its rows, without the bytes that are the caller's own."""
    with closing(sqlite3.connect(f"{path}.{kind}")) as connection:
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        (page,) = connection.execute("PRAGMA page_size").fetchone()
        (rows,) = connection.execute(f"SELECT count(*) FROM {kind}").fetchone()
    return float(pages * page / rows - names)


def opening(path: Path) -> float:
    """Open and close a file, in milliseconds."""
    began = time.perf_counter()
    LeaseTable(path).close()
    return (time.perf_counter() - began) * 1e3


def peak(leases: LeaseTable) -> float:
    """Read all rows and say how much of Python's memory that took at most, in KB."""
    tracemalloc.start()
    try:
        for _ in leases.rows():
            pass
        return tracemalloc.get_traced_memory()[1] / 1e3
    finally:
        tracemalloc.stop()


# 5. Start-up


def startup(effort: Effort) -> dict[str, Any]:
    """Time imports, opening, and the whole experiment beside bare processes."""
    programs = {
        "nothing": "pass",
        "import sqlite3": "import sqlite3",
        "import leases": "import leases",
        "import sqlite3, typing": "import sqlite3, typing",
        "import sqlite3, dataclasses, random": "import sqlite3, dataclasses, random",
    }
    taken: dict[str, list[float]] = {name: [] for name in programs}
    with tempfile.TemporaryDirectory(prefix="leases-bench-") as cache:
        compiled = {**os.environ, "PYTHONPYCACHEPREFIX": cache, "PYTHONDONTWRITEBYTECODE": ""}
        for turn in range(effort.starts + 1):
            for name, program in programs.items():
                began = time.perf_counter()
                command = [sys.executable, "-c", program]
                subprocess.run(command, cwd=HERE.parent, env=compiled, check=True)
                if turn:  # the first compiles
                    taken[name].append(time.perf_counter() - began)
    found: dict[str, Any] = {}
    base = taken["import sqlite3"]
    for name, costs in taken.items():
        found[f"{name}, relative to import sqlite3"] = spread(
            [cost / least for cost, least in zip(costs, base, strict=True)]
        )
    heavy = "import sys, leases; print(*({'dataclasses', 'random'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", heavy], cwd=HERE.parent, check=True, capture_output=True, text=True
    )
    check("dataclasses and random among what leases imports", done.stdout.strip(), "")
    found["a new table, relative to a plain file with the same pragmas"] = opening_ratio(effort)
    found["run_experiment.py --check, relative to as many bare processes"] = experiment(effort)
    return found


def opening_ratio(effort: Effort) -> dict[str, Any]:
    """Make new lease tables beside plain files."""
    ratios = []
    with tempfile.TemporaryDirectory(prefix="leases-bench-") as folder:
        for number in range(effort.starts):
            ours = opening(Path(folder) / f"ours {number}")
            began = time.perf_counter()
            plain(Path(folder) / f"plain {number}", library.CREATE_LEASE).close()
            ratios.append(ours / ((time.perf_counter() - began) * 1e3))
    return spread(ratios)


COUNT_STARTS: Final = """
import io, multiprocessing.process as process, sys, contextlib
import run_experiment
started, start = [], process.BaseProcess.start
process.BaseProcess.start = lambda self: (started.append(1), start(self))[1]
if __name__ == "__main__":
    with contextlib.redirect_stdout(io.StringIO()):
        status = run_experiment.main(["--check", "results.json", "--quiet"])
    print(len(started) if status == 0 else "failed")
"""


def experiment(effort: Effort) -> dict[str, Any]:
    """Run the experiment as the README says, and as many processes that do nothing."""
    with tempfile.TemporaryDirectory(prefix="leases-bench-") as folder:
        script = Path(folder) / "count_starts.py"
        script.write_text(COUNT_STARTS, encoding="utf-8")
        done = subprocess.run(
            [sys.executable, str(script)],
            cwd=HERE.parent,
            env={**os.environ, "PYTHONPATH": str(HERE.parent)},
            check=True,
            capture_output=True,
            text=True,
        )
    check("the experiment", done.stdout.strip().isdecimal(), True)
    count = int(done.stdout)
    context = multiprocessing.get_context("spawn")
    ratios = []
    for _ in range(max(2, effort.starts // 5)):
        began = time.perf_counter()
        command = [sys.executable, "run_experiment.py", "--check", "results.json", "--quiet"]
        subprocess.run(command, cwd=HERE.parent, check=True, stdout=subprocess.DEVNULL)
        whole = time.perf_counter() - began
        began = time.perf_counter()
        for _ in range(count):
            process = context.Process(target=os.getpid)
            process.start()
            process.join(LIMIT)
        ratios.append(whole / (time.perf_counter() - began))
    return {**spread(ratios), "processes": count}


# The README's table


def table(found: dict[str, Any]) -> str:
    """Write the README's table from a run's JSON: a column for each disk."""
    disks = list(found["disks"].values())
    smallest, *_, largest = found["sizes"]
    rows: list[list[str]] = []

    def add(title: str, *values: object) -> None:
        rows.append([title, *(map(told_value, values) if values else [""] * len(disks))])

    def compared(case: str, key: str) -> Iterator[list[float]]:
        for disk in disks:
            yield [disk["contention"][f"{case}, {waiting}"][key] for waiting in WAITING]

    about = found["machine"]
    add(
        f"Python {about['python']}, SQLite {about['sqlite']}, {about['cores']} cores",
        *(f"{name}, {disk['about']['file system']}" for name, disk in found["disks"].items()),
    )
    rows.append(["---"] * (len(disks) + 1))
    add("one fsync, µs", *(disk["about"]["fsync, microseconds"] for disk in disks))
    add("**a call ÷ the same SQL by hand**")
    for name in disks[0]["calls"]:
        add(name, *(disk["calls"][name]["ratio"] for disk in disks))
    add("**a peer's acquire and release ÷ claim and release; what a power cut leaves**")
    for name, peer in disks[0]["peers"].items():
        if name != "leases.py" and not isinstance(peer, str):
            title = f"{name}: {peer['after a power cut']}"
            add(title, *(disk["peers"][name]["ratio"] for disk in disks))
    add(f"**{PROCESSES} processes ÷ the same with SQLite's busy handler**")
    for case in CASES[:2]:
        for title, key in (
            ("cycles", "cycles a second"),
            ("leases granted", "granted a second"),
            ("longest wait", "worst ms"),
        ):
            add(f"{case}: {title}", *(ours / theirs for ours, theirs in compared(case, key)))
        most = compared(case, "most over fewest cycles")
        add(f"{case}: most ÷ fewest, both", *(", ".join(map(told_value, pair)) for pair in most))
    late = compared("heartbeat", "late")
    add("heartbeat: renewals too late, both", *(f"{ours}, {theirs}" for ours, theirs in late))
    add(f"**{largest:,} resources ÷ {smallest:,}**")
    for kind in VALUES:
        for name in ("claim", "renew", "write"):
            key = f"{kind}, {name} at {largest}"
            add(f"{name}, {kind}", *(disk["growth"][key]["ratio"] for disk in disks))
    startup = found["startup"]["import leases, relative to import sqlite3"]["ratio"]
    add("`import leases` ÷ `import sqlite3`", *(startup for _ in disks))
    for key in ("lease", "sink"):
        size = f"{next(iter(VALUES))}, {largest} resources"
        title = f"{key} table, bytes a row beside its text"
        add(title, *(disk["growth"][size][title] for disk in disks))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


if __name__ == "__main__":
    sys.exit(main())
