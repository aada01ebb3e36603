# /// script
# requires-python = ">=3.10"
# dependencies = []
# ///
"""Let a pool of worker processes share runs by leases, and stop and kill them at random.

    python3 examples/worker_pool.py                        four workers, 24 runs
    python3 examples/worker_pool.py --chaos --seconds 60   stop, continue and kill the workers
    python3 examples/worker_pool.py --chaos --unfenced     the same without a fence: overwrites
    python3 examples/worker_pool.py --store MODULE         on another store (by name or by path)

A worker takes over a run that nobody holds, writes its document several times while a thread
renews the lease, and completes the run with the last value it wrote. `--chaos` stops workers for
longer than a lease lasts, so that others take over and the old ones wake in the middle of their
work, and kills some for good; a new one takes the place of each. `--unfenced` is the same pool
with a plain claim and a sink that stores whatever arrives last: heartbeats are no fence.

    jobs done              runs that have a result in the lease table
    takeovers              claims of a run that someone had claimed before
    stale writes refused   writes that the sink answered with "stale"
    silent overwrites      finished runs whose document is not what their worker wrote last

What a worker wrote last is known from its own record, a file that it appends to and syncs before
and after each write; the sink is not asked. Documents and lease table are read by the parent when
everyone who was stopped has gone on and has ended, so that each had its chance to overwrite.

Exit status: 0 every run is done and nothing was overwritten, 1 otherwise, 2 could not run.
Needs POSIX signals. A store is a module with LeaseTable, FencedSink and fresh(), a context manager
that yields two locations; without fresh() they are two files in a temporary folder.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from io import FileIO
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnProcess
from pathlib import Path
from threading import Event, Thread
from types import ModuleType
from typing import NamedTuple, NoReturn, TypeVar

if find_spec("leases") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from leases import FencedSink, Lease, LeaseTable, Outcome, take_over

TTL, EVERY = 1000, 200  # milliseconds: how long a lease lasts, and how often it is renewed
TIMEOUT = 0.4  # seconds that a busy store is waited for: with two heartbeats less than a ttl
STEP = 0.04  # seconds of work before each write, on average
LIMIT = 30.0  # seconds that anything is waited for
# What a store raises for a wrong call, not for its database: trying again would not help.
DEFECTS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
ACCEPTED = ("written", "replay")
Answer = TypeVar("Answer")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the pool, hold what it left against the record; answer with the exit status."""
    options = parse(arguments)
    try:
        with places(options):
            failures = Pool(options).run() + judge(options)
    except KeyboardInterrupt:
        print("worker_pool.py: interrupted", file=sys.stderr)
        return 130
    except Exception as error:  # a store's errors are its own
        told = f"{type(error).__name__}: {error}".split()
        print("worker_pool.py:", *told, file=sys.stderr)
        return 2
    for failure in failures:
        print(failure)
    return 1 if failures else 0


class Parser(argparse.ArgumentParser):
    """Says what is wrong with the options in one line."""

    def error(self, message: str) -> NoReturn:
        """Exit with 2 and the message alone."""
        self.exit(2, f"worker_pool.py: {message} (see --help)\n")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    form = argparse.RawDescriptionHelpFormatter
    parser = Parser("worker_pool.py", description=__doc__, formatter_class=form)
    add, until = parser.add_argument, parser.add_mutually_exclusive_group().add_argument
    add("--workers", type=int, default=4, metavar="N", help="processes at work (4)")
    until("--jobs", type=int, default=24, metavar="N", help="runs to finish (24)")
    until("--seconds", type=int, metavar="S", help="begin runs for so long, finish them all")
    add("--store", default="leases", metavar="MODULE", help="by import name or by path (leases)")
    add("--chaos", action="store_true", help="stop, continue and kill workers at random")
    add("--seed", type=int, default=0, help="of the chaos, and of how long each work is (0)")
    add("--unfenced", action="store_true", help="plain claims, and a sink that compares nothing")
    options = parser.parse_args(arguments)
    if min(options.workers, options.jobs, options.seconds or 1) < 1:
        parser.error("--workers, --jobs and --seconds are at least 1")
    return options


# ---- The store


@contextmanager
def places(options: argparse.Namespace) -> Iterator[None]:
    """Add fresh places to the options, see that a table and a sink open there; remove them."""
    with tempfile.TemporaryDirectory(prefix="worker_pool-") as options.folder:
        files = f"{options.folder}/leases.db", f"{options.folder}/sink.db"
        fresh = getattr(load(options.store), "fresh", lambda: nullcontext(files))
        with fresh() as (options.lease_at, options.sink_at):
            if options.unfenced:
                options.sink_at = files[1]
            with open_leases(options), open_sink(options):
                pass
            options.until = now() + options.seconds * 1000 if options.seconds else sys.maxsize
            options.jobs = sys.maxsize if options.seconds else options.jobs
            yield


def load(module: str) -> ModuleType:
    """Import a store by its name, or by its path, which ends in .py."""
    path = Path(module).resolve()
    if path.suffix != ".py":
        return importlib.import_module(module)
    sys.path.insert(0, str(path.parent))
    store = importlib.import_module(path.stem)
    if not path.samefile(store.__file__ or ""):
        raise ImportError(f"{module} has the name of another, {store.__file__}")
    return store


def name(number: int) -> str:
    """Name a run so that names are in the order of their numbers."""
    return f"run-{number:06}"


def now() -> int:
    """Read the clock that all workers share, in milliseconds."""
    return time.time_ns() // 1_000_000


def open_leases(options: argparse.Namespace) -> LeaseTable:
    """Open the lease table."""
    table: LeaseTable = load(options.store).LeaseTable(options.lease_at, timeout=TIMEOUT)
    return table


def open_sink(options: argparse.Namespace) -> FencedSink:
    """Open the sink."""
    make = UnfencedSink if options.unfenced else load(options.store).FencedSink
    sink: FencedSink = make(options.sink_at, timeout=TIMEOUT)
    return sink


class UnfencedSink(FencedSink):
    """The mistake: whatever arrives last is stored, of whatever epoch it is."""

    def write(self, resource: str, epoch: int, value: str, *, seq: int = 0) -> Outcome:
        """Store the value as the latest of one endless term."""
        super().write(resource, 1, value, seq=time.time_ns())
        return "written"


# ---- A worker


def work(options: argparse.Namespace, owner: str) -> None:
    """Do one run after the other until all are done, or the parent has died."""
    os.setpgrp()  # the kernel ends a stopped process of such a group when its parent has died
    parent = multiprocessing.parent_process()
    with (
        open(f"{options.folder}/{owner}.log", "xb", buffering=0) as record,
        insist(partial(open_leases, options)) as leases,
        insist(partial(open_sink, options)) as sink,
    ):
        worker = Worker(options, owner, record, leases, sink)
        while parent and parent.is_alive() and worker.find_run():
            pass


class Worker(NamedTuple):
    """Takes over runs, works, writes and completes, and keeps its own record of it."""

    options: argparse.Namespace
    owner: str
    record: FileIO
    leases: LeaseTable
    sink: FencedSink

    def find_run(self) -> bool:
        """Do a run that is free, or wait a little; False when all runs are done."""
        rows = insist(lambda: list(self.leases.rows()))
        waiting = [row for row in rows if row.result is None]
        more = len(rows) < self.options.jobs and now() < self.options.until
        free = [row.resource for row in waiting if row.deadline <= now()]
        for run in free + [name(len(rows))] * more:
            if lease := insist(partial(self.take, run)):
                self.note("claimed", lease)
                self.do(lease)
                return True
        time.sleep(STEP)
        return bool(waiting or more)

    def take(self, run: str) -> Lease | None:
        """Claim a run, and seal the sink where there is a fence."""
        if self.options.unfenced:
            return self.leases.claim(run, self.owner, now=now(), ttl=TTL)
        return take_over(self.leases, self.sink, run, self.owner, now=now(), ttl=TTL)

    def do(self, lease: Lease) -> None:
        """Work and write several times, then complete the run, unless the lease is lost."""
        run, owner, epoch, _ = lease
        pace, value = random.Random(f"{self.options.seed} {run} {epoch}"), ""
        with heartbeat(self.options, lease) as lost:
            for seq in range(pace.choice((2, 5, 10, 40))):  # the longest outlast a ttl
                if lost.is_set():
                    return
                time.sleep(pace.uniform(0, 2 * STEP))  # the work; a pause in it makes it stale
                value = json.dumps({"run": run, "owner": owner, "epoch": epoch, "seq": seq})
                self.note("ask", lease, value)
                outcome = insist(partial(self.sink.write, run, epoch, value, seq=seq))
                self.note(outcome, lease, value)
                if outcome == "stale":
                    return
                if outcome not in ACCEPTED:
                    raise RuntimeError(f"{value}: {outcome}, as if someone else had this epoch")
        if insist(lambda: self.leases.complete(lease, value, now=now())):
            self.note("completed", lease, value)

    def note(self, what: str, lease: Lease, value: str = "") -> None:
        """Append a line to the record, and go on when it is on disk."""
        line = json.dumps([what, lease.resource, lease.owner, lease.epoch, value])
        self.record.write(f"{line}\n".encode())
        os.fsync(self.record.fileno())


def insist(call: Callable[[], Answer]) -> Answer:
    """Repeat a call that fails with an error of the store, OutcomeUnknown included.

    Every call may be repeated: a write that had taken effect is answered with "replay" and a
    completion with True; a claim with None, and the lease that nobody knows of runs out.
    """
    until = time.monotonic() + LIMIT
    while True:
        try:
            return call()
        except Exception as error:
            if isinstance(error, DEFECTS) or time.monotonic() > until:
                raise
        time.sleep(STEP)


@contextmanager
def heartbeat(options: argparse.Namespace, lease: Lease) -> Iterator[Event]:
    """Renew the lease in a thread of its own, and set what is yielded once the lease is lost."""
    stop, lost, defects = Event(), Event(), list[Exception]()

    def beat(deadline: int) -> None:
        while now() < deadline and not stop.wait(EVERY / 1000):
            try:
                with open_leases(options) as leases:
                    renewed = leases.renew(lease, now=now(), ttl=TTL)
                deadline = 0 if renewed is None else renewed.deadline
            except DEFECTS as error:
                defects.append(error)
                break
            except Exception:  # no loss yet: try again until the deadline
                continue
        if not stop.is_set():
            lost.set()

    thread = Thread(target=beat, args=(lease.deadline,), daemon=True)
    thread.start()
    try:
        yield lost
    finally:
        stop.set()
        thread.join(LIMIT)
        if thread.is_alive():
            defects.append(RuntimeError(f"waited {LIMIT:g} s for the heartbeat of {lease}"))
        if defects:
            raise defects[0]


# ---- The record: who wrote what, whatever the sink says


def records(options: argparse.Namespace) -> bytes:
    """Read the complete lines of all records: a kill may have cut the last one short."""
    files = [path.read_bytes() for path in Path(options.folder).glob("*.log")]
    return b"".join(file[: file.rfind(b"\n") + 1] for file in files)


def judge(options: argparse.Namespace) -> list[str]:
    """Hold documents and lease table against the record: show the counts, answer what is wrong."""
    with open_leases(options) as leases, open_sink(options) as sink:
        rows = {row.resource: row for row in leases.rows()}
        documents = {row.resource: row.value for row in sink.rows()}
    counts, last, failures = Counter[str](), dict[tuple[str, str, int], str](), []
    wanted = {*rows, *([] if options.seconds else map(name, range(options.jobs)))}
    for what, run, owner, epoch, value in map(json.loads, records(options).splitlines()):
        wanted.add(run)
        counts["stale writes refused"] += what == "stale"
        counts["takeovers"] += what == "claimed" and epoch > 1
        if what in ACCEPTED:
            last[run, owner, epoch] = value
    for run in sorted(wanted):
        row, document = rows.get(run), documents.get(run)
        if row is None or row.result is None:
            failures.append(f"{run}: not done")
            continue
        counts["jobs done"] += 1
        wrote = last.get((run, row.owner, row.epoch))
        if row.result != wrote:
            failures.append(f"{run}: its worker wrote {wrote}, its result is {row.result}")
        if document != wrote:
            counts["silent overwrites"] += 1
            failures.append(f"{run}: its worker wrote {wrote}, OVERWRITTEN by {document}")
    print(f"jobs done: {counts['jobs done']} of {len(wanted)}")
    for what in ("takeovers", "stale writes refused", "silent overwrites"):
        print(f"{what}: {counts[what]}")
    return failures


# ---- The pool, in the parent


class Pool:
    """The workers' processes, and what chaos does to them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.random = options, random.Random(options.seed)
        self.workers: list[SpawnProcess] = []
        self.stopped: dict[SpawnProcess, float] = {}  # until when
        self.spawned = self.stops = self.kills = 0

    def run(self) -> list[str]:
        """Wait until every worker has ended, and answer with what went wrong.

        Ctrl-C is blocked meanwhile, here and in the workers, who inherit that: it ends the loop,
        and is raised when no worker is left.
        """
        resource_tracker.ensure_running()  # Python's own child, whose start unblocks SIGINT
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        began = moved = time.monotonic()
        done, failures, told = 0, list[str](), ""
        try:
            for _ in range(self.options.workers):
                self.workers.append(self.spawn())
            while self.workers and not failures and signal.SIGINT not in signal.sigpending():
                time.sleep(0.1)
                clock, before = time.monotonic(), done
                done = records(self.options).count(b'["completed"')
                moved = clock if done > before else moved
                if clock > moved + LIMIT:
                    failures.append(f"waited {LIMIT:g} s for another run to be done")
                failures += self.reap()
                if self.options.chaos:
                    self.disturb(clock, done >= self.options.jobs or now() >= self.options.until)
                told = f"{clock - began:.1f} s: {done} runs done; workers stopped {self.stops} "
                told += f"times, killed {self.kills} times"
                if sys.stdout.isatty():
                    print(f"\r\x1b[K{told}", end="", flush=True)
            print("" if sys.stdout.isatty() else told)
        finally:
            for worker in self.workers:
                worker.kill()
            for worker in self.workers:
                worker.join(LIMIT)
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        return failures

    def spawn(self) -> SpawnProcess:
        """Start a worker under a name of its own."""
        self.spawned += 1
        owner = f"worker-{self.spawned}"
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=work, args=(self.options, owner), name=owner, daemon=True)
        process.start()
        return process

    def reap(self) -> list[str]:
        """Take out who has ended, and name who failed."""
        ended = [worker for worker in self.workers if worker.exitcode is not None]
        self.workers = [worker for worker in self.workers if worker not in ended]
        return [f"{one.name} ended with exit code {one.exitcode}" for one in ended if one.exitcode]

    def disturb(self, clock: float, over: bool) -> None:
        """Continue who was stopped for long enough; unless it is over, stop or kill another."""
        for worker in [one for one, until in self.stopped.items() if over or clock > until]:
            del self.stopped[worker]
            if worker.exitcode is None:
                os.kill(worker.pid or 0, signal.SIGCONT)
        begun = {path.stem for path in Path(self.options.folder).glob("*.log")}
        awake = [one for one in self.workers if one.name in begun and one not in self.stopped]
        if over or not awake or self.random.random() > 0.03 * len(self.workers):
            return
        worker = self.random.choice(awake)
        if self.random.random() < 0.8:
            self.stops += 1
            self.stopped[worker] = clock + self.random.uniform(1.5, 4) * TTL / 1000
            os.kill(worker.pid or 0, signal.SIGSTOP)
            return
        worker.kill()
        worker.join(LIMIT)
        if worker.exitcode == -signal.SIGKILL:  # and had not ended just before
            self.kills += 1
            self.workers[self.workers.index(worker)] = self.spawn()


if __name__ == "__main__":
    sys.exit(main())
