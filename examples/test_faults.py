#!/usr/bin/env python3
# /// script
# requires-python = ">=3.10"
# dependencies = ["psycopg[binary]>=3.1"]
# ///
"""Kill real servers under contending workers, and put old states back: examples/test_faults.py

It starts its own PostgreSQL and etcd through serve.py. Four processes claim, renew, write,
complete and release on a few resources, and send each answer through a pipe as soon as it is
there. Three times the server, or the cluster's leader, is killed once enough writes were
acknowledged, and comes back once enough calls have failed. Then each guarantee is judged over all
answers and the final rows, by the predicates in `CHECKS`.

With --majority, or LEASES_MAJORITY=1, a majority of the etcd cluster is lost, too.
"""
# a test's name is its sentence; the first line ends in its command

from __future__ import annotations

import bisect
import importlib
import importlib.util
import multiprocessing
import os
import random
import sys
import tempfile
import time
import unittest
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import ClassVar, Final, NamedTuple, Union
from unittest import mock

HERE: Final = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import serve  # noqa: E402  # the two folders must be on the path first

from leases import (  # noqa: E402
    FencedSink,
    Finding,
    Lease,
    LeaseRow,
    LeaseTable,
    OutcomeUnknown,
    SinkRow,
    reconcile,
    take_over,
)

SPAWN: Final = multiprocessing.get_context("spawn")
WORKERS: Final = 4
LANES: Final = 4  # resources that are worked on at once
TTL: Final = 300  # milliseconds
LATE: Final = 3  # the seq of a write under a lease of long ago; the first ones are 0, 1 and 2
LIMIT: Final = 60.0  # seconds, for each thing that a run waits for
ALLOWANCE: Final = 1.0  # seconds that a call may take beyond its timeout on a busy machine
WRITES: Final = 60  # acknowledged before the fault, and again after it

Answer = Union[Lease, LeaseRow, SinkRow, str, bool, None]  # noqa: UP007  # evaluated on 3.10, too

INTERESTING: Final = {
    ("write", "stale"),
    ("seal", "sealed"),
    ("complete", True),
    ("release", True),
    ("release", False),
}
# A store whose sink stores whatever it is offered.
UNFENCED: Final = """
import postgres_leases
from postgres_leases import FencedSink, LeaseTable

postgres_leases._outcome = lambda *_: "written"
"""


class Report(NamedTuple):
    """One call of one worker: what it asked, what came back, and when, on one clock for all.

    `error` is "" for an answer, "unknown" for OutcomeUnknown, "failed" for an error of the
    database itself, after which nothing has changed. `epoch` is the one offered (0 for none),
    `text` the owner, the value or the result, different in each call but for a retry.
    """

    worker: int
    call: str
    resource: str
    epoch: int
    seq: int
    text: str
    now: int
    answer: Answer
    error: str
    began: float
    ended: float


class History(NamedTuple):
    """A finished run: all reports, and the final rows."""

    reports: list[Report]
    leases: list[LeaseRow]
    sink: list[SinkRow]
    timeout: float


# What the workers do.


class Worker:
    """A process that works on whatever it gets a lease for, and is careless about old leases."""

    def __init__(
        self, number: int, module: str, locations: tuple[str, str], timeout: float, pipe: Connection
    ) -> None:
        store = importlib.import_module(module)
        self.leases: LeaseTable = store.LeaseTable(locations[0], timeout=timeout)
        self.sink: FencedSink = store.FencedSink(locations[1], timeout=timeout)
        self.errors: tuple[type[Exception], ...] = (OSError,)
        if "psycopg" in sys.modules:
            self.errors = (OSError, importlib.import_module("psycopg").Error)
        self.number, self.pipe, self.dice = number, pipe, random.Random(number)
        self.calls = 0
        self.done = [0] * LANES
        self.old: list[Lease] = []

    def ask(
        self,
        call: str,
        resource: str,
        function: Callable[[], Answer],
        *,
        epoch: int = 0,
        seq: int = 0,
        text: str = "",
        now: int = 0,
    ) -> Report:
        """Make one call and report it. An error that no store may raise ends the process."""
        answer, error = None, ""
        began = time.monotonic()
        try:
            answer = function()
        except OutcomeUnknown:
            error = "unknown"
        except self.errors:
            error = "failed"
        ended = time.monotonic()
        report = Report(
            self.number, call, resource, epoch, seq, text, now, answer, error, began, ended
        )
        self.pipe.send(report)
        if error:
            time.sleep(0.01)  # leaves the processor to the server that is to come back
        return report

    def turn(self) -> None:
        """Work once on some resource, or wake up with some lease of long ago."""
        if self.old and self.dice.random() < 0.3:
            lease = self.old.pop(self.dice.randrange(len(self.old)))
            self.write(lease, seq=LATE)
            self.end(lease)
            return
        lane = self.dice.randrange(LANES)
        resource = f"lane {lane}, job {self.done[lane]}"
        owner, now = self.unique(), ticks()
        claimed = self.ask(
            "claim",
            resource,
            lambda: self.leases.claim(resource, owner, now=now, ttl=TTL),
            text=owner,
            now=now,
        )
        if isinstance(claimed.answer, Lease):
            self.work(claimed.answer)
        elif not claimed.error:
            found = self.ask("lease", resource, lambda: self.leases.get(resource))
            self.ask("fence", resource, lambda: self.sink.get(resource))
            if isinstance(found.answer, LeaseRow) and found.answer.result is not None:
                self.done[lane] += 1

    def work(self, lease: Lease) -> None:
        """Write three times, with a heartbeat between, until something is refused or fails."""
        resource, epoch = lease.resource, lease.epoch
        if self.dice.random() < 0.5:
            sealed = self.ask(
                "seal", resource, lambda: self.sink.seal(resource, epoch), epoch=epoch
            )
            if sealed.answer != "sealed":
                self.old.append(lease)
                return
        for seq in range(3):
            if self.write(lease, seq).answer not in ("written", "replay"):
                self.old.append(lease)
                return
            if seq == 1:
                now = ticks()
                self.ask(
                    "renew",
                    resource,
                    lambda: self.leases.renew(lease, now=now, ttl=TTL),  # noqa: B023  # called here
                    epoch=epoch,
                    now=now,
                )
        self.end(lease)

    def write(self, lease: Lease, seq: int) -> Report:
        """Write something new, and once more the same where nobody knows what became of it."""
        value = self.unique()

        def once() -> Report:
            return self.ask(
                "write",
                lease.resource,
                lambda: self.sink.write(lease.resource, lease.epoch, value, seq=seq),
                epoch=lease.epoch,
                seq=seq,
                text=value,
            )

        report = once()
        return once() if report.error == "unknown" else report

    def end(self, lease: Lease) -> None:
        """Complete, or release, or walk away and let the lease run out."""
        way, now, result = self.dice.random(), ticks(), self.unique()
        if way < 0.2:
            self.ask(
                "complete",
                lease.resource,
                lambda: self.leases.complete(lease, result, now=now),
                epoch=lease.epoch,
                text=result,
                now=now,
            )
        elif way < 0.6:
            self.ask(
                "release",
                lease.resource,
                lambda: self.leases.release(lease, now=now),
                epoch=lease.epoch,
                now=now,
            )
        self.old.append(lease)

    def unique(self) -> str:
        """Name a call, so that its effect can be told from all others."""
        self.calls += 1
        return f"worker {self.number}, call {self.calls}"


def work(
    number: int, module: str, locations: tuple[str, str], timeout: float, pipe: Connection
) -> None:
    """Be a worker until the parent says stop, or is gone."""
    worker = Worker(number, module, locations, timeout, pipe)
    while not pipe.poll():
        worker.turn()
    with suppress(EOFError):
        pipe.recv()  # a socket that is closed with something unread resets the other end
    worker.leases.close()
    worker.sink.close()


def ticks() -> int:
    """Read the clock that all processes of a machine share, in milliseconds."""
    return time.monotonic_ns() // 1_000_000


# What must hold over a finished run. Each predicate yields a line for each thing that it found.


class Highest:
    """The highest of the numbers that had been acknowledged before a moment."""

    def __init__(self, acknowledged: Iterable[tuple[float, tuple[int, int]]]) -> None:
        self.moments: list[float] = []
        self.numbers: list[tuple[int, int]] = []
        for moment, number in sorted(acknowledged):
            self.moments.append(moment)
            self.numbers.append(max(number, self.numbers[-1]) if self.numbers else number)

    def before(self, moment: float) -> tuple[int, int]:
        """Answer (0, -1), lower than every write, if there was none."""
        position = bisect.bisect_left(self.moments, moment)
        return self.numbers[position - 1] if position else (0, -1)


def twice(history: History) -> Iterator[str]:
    """One epoch of a resource was granted to two claims."""
    granted: dict[tuple[str, int], str] = {}
    for report in history.reports:
        if report.call == "claim" and isinstance(report.answer, Lease):
            key = (report.resource, report.answer.epoch)
            if key in granted:
                yield f"{key} was granted to {granted[key]} and to {report.text}"
            granted[key] = report.text


def lowered(history: History) -> Iterator[str]:
    """An epoch or a fence was lower than one answered before, in an answer or in the end."""
    for resource, reports in _by_resource(history):
        epochs = Highest((r.ended, (_epoch(r), 0)) for r in reports if _epoch(r))
        fences = Highest((r.ended, (_fence(r), 0)) for r in reports if _fence(r))
        for report in reports:
            known = epochs.before(report.began)[0]
            if report.call == "claim" and isinstance(report.answer, Lease):
                if report.answer.epoch <= known:
                    yield f"{resource}: {report} came after epoch {known}"
            elif report.call == "lease" and not report.error:
                found = report.answer.epoch if isinstance(report.answer, LeaseRow) else 0
                if found < known:
                    yield f"{resource}: {report} came after epoch {known}"
            elif report.call == "fence" and not report.error:
                known = fences.before(report.began)[0]
                found = report.answer.fence if isinstance(report.answer, SinkRow) else 0
                if found < known:
                    yield f"{resource}: {report} came after fence {known}"
        lease, sink = _final(history, resource)
        if (lease.epoch if lease else 0) < epochs.before(float("inf"))[0]:
            yield f"{resource}: the final {lease} is lower than {epochs.numbers[-1][0]}"
        if (sink.fence if sink else 0) < fences.before(float("inf"))[0]:
            yield f"{resource}: the final {sink} is lower than {fences.numbers[-1][0]}"


def lost(history: History) -> Iterator[str]:
    """An acknowledged write or result was not there later on, or not there in the end."""
    for resource, reports in _by_resource(history):
        stored = [r for r in reports if r.call == "write" and r.answer in ("written", "replay")]
        values = {(r.epoch, r.seq): r.text for r in stored}
        writes = Highest((r.ended, (r.epoch, r.seq)) for r in stored)
        lease, sink = _final(history, resource)
        reads = [(r.began, r.answer) for r in reports if r.call == "fence" and not r.error]
        for moment, row in [*reads, (float("inf"), sink)]:
            found = (row.epoch, row.seq) if isinstance(row, SinkRow) else (0, -1)
            if found < writes.before(moment):
                yield f"{resource}: {row} is older than the write {writes.before(moment)}"
            elif isinstance(row, SinkRow) and values.get(found, row.value) != row.value:
                yield f"{resource}: {row} is not the value {values[found]!r}"
        for report in reports:
            if report.call == "complete" and report.answer is True:
                kept = lease and (lease.epoch, lease.result) == (report.epoch, report.text)
                if not kept:
                    yield f"{resource}: {lease} is not the result of {report}"


def stale(history: History) -> Iterator[str]:
    """A write was accepted though a higher epoch had been acknowledged before it began."""
    for resource, reports in _by_resource(history):
        fences = Highest((r.ended, (_fence(r), 0)) for r in reports if _fence(r))
        for report in reports:
            fence = fences.before(report.began)[0]
            if report.call == "write" and report.answer == "written" and report.epoch < fence:
                yield f"{resource}: {report} was accepted after epoch {fence}"


def early(history: History) -> Iterator[str]:
    """A claim was granted before a deadline that had been answered, and nobody had given it back.

    So an acknowledged renewal is not lost either, and a release that failed has changed nothing.
    """
    for resource, reports in _by_resource(history):
        held = [(r, r.answer) for r in reports if isinstance(r.answer, Lease)]
        released = {
            r.epoch: r.began
            for r in reversed(reports)
            if r.call == "release" and (r.answer is True or r.error == "unknown")
        }
        for claim, granted in held:
            for report, lease in held:
                if (
                    claim.call == "claim"
                    and report.ended < claim.began
                    and lease.epoch < granted.epoch
                    and claim.now < lease.deadline
                    and released.get(lease.epoch, float("inf")) > claim.ended
                ):
                    yield f"{resource}: {claim} came within {report}"


def phantom(history: History) -> Iterator[str]:
    """A call that failed, after which nothing has changed, had an effect all the same."""
    failed = {r.text for r in history.reports if r.error == "failed" and r.text}
    rows = [r.answer for r in history.reports if r.call in ("lease", "fence")]
    for row in [*rows, *history.leases, *history.sink]:
        texts = {row.owner, row.result} if isinstance(row, LeaseRow) else set()
        texts |= {row.value} if isinstance(row, SinkRow) else set()
        for text in texts & failed:
            yield f"{row} shows the failed {text!r}"


def slow(history: History) -> Iterator[str]:
    """A call took longer than its timeout."""
    for report in history.reports:
        if report.ended - report.began > history.timeout + ALLOWANCE:
            yield f"{report} took {report.ended - report.began:.2f} s"


CHECKS: Final = {
    check.__name__: check for check in (twice, lowered, lost, stale, early, phantom, slow)
}


def violations(history: History) -> dict[str, list[str]]:
    """Judge a finished run: what each predicate found, without those that found nothing."""
    found = {name: list(check(history)) for name, check in CHECKS.items()}
    return {name: lines for name, lines in found.items() if lines}


def _by_resource(history: History) -> list[tuple[str, list[Report]]]:
    reports: dict[str, list[Report]] = defaultdict(list)
    for report in history.reports:
        reports[report.resource].append(report)
    return sorted(reports.items())


def _final(history: History, resource: str) -> tuple[LeaseRow | None, SinkRow | None]:
    leased = {row.resource: row for row in history.leases}
    written = {row.resource: row for row in history.sink}
    return leased.get(resource), written.get(resource)


def _epoch(report: Report) -> int:
    """Answer the epoch that this answer proves the lease table to have reached, 0 for none."""
    return report.answer.epoch if isinstance(report.answer, (Lease, LeaseRow)) else 0


def _fence(report: Report) -> int:
    """Answer the fence that this answer proves the sink to have reached, 0 for none."""
    if isinstance(report.answer, SinkRow):
        return report.answer.fence
    # A stale one proves a higher fence, but not which.
    reached = isinstance(report.answer, str) and report.answer != "stale"
    return report.epoch if reached else 0


# Runs with a fault in the middle.


class Run:
    """Worker processes, and what they have reported so far."""

    def __init__(self, module: str, locations: tuple[str, str], timeout: float) -> None:
        self.reports: list[Report] = []
        self.pipes: list[Connection] = []
        self.processes = []
        for number in range(WORKERS):
            ours, theirs = SPAWN.Pipe()
            process = SPAWN.Process(target=work, args=(number, module, locations, timeout, theirs))
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        self.open = list(self.pipes)

    def collect(self, what: str, enough: Callable[[], bool]) -> None:
        """Receive reports until there are enough; TimeoutError names what was awaited."""
        end = time.monotonic() + LIMIT
        while not enough():
            if not self.receive(what, end):
                raise RuntimeError(f"a worker died while the run waited for {what}")

    def receive(self, what: str, end: float) -> bool:
        """Receive a report from each worker that has one; False if a pipe has ended instead."""
        ready = wait(self.open, timeout=max(0.0, end - time.monotonic()))
        if not ready:
            raise TimeoutError(f"waited {LIMIT:g} s for {what}")
        before = len(self.open)
        for pipe in [pipe for pipe in self.open if pipe in ready]:
            try:
                self.reports.append(pipe.recv())
            except (EOFError, ConnectionResetError):
                self.open.remove(pipe)
        return len(self.open) == before

    def finish(self) -> None:
        """Tell the workers to stop, and receive what they still report until each has ended."""
        for pipe in self.pipes:
            pipe.send("stop")
        end = time.monotonic() + LIMIT
        while self.open:
            self.receive("the workers to end", end)
        for process in self.processes:
            process.join(LIMIT)
            if process.exitcode != 0:
                raise RuntimeError(f"a worker ended with {process.exitcode}")

    def end(self) -> None:
        """Leave no process behind, whatever happened."""
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()
        for pipe in self.pipes:
            pipe.close()

    def has_written(self, since: float) -> bool:
        """Say whether enough writes that began after a moment were acknowledged."""
        written = [r for r in self.reports if r.call == "write" and r.answer == "written"]
        return sum(r.began > since for r in written) >= WRITES

    def has_failed(self, since: float, errors: int) -> bool:
        """Say whether enough calls have ended in an error after a moment."""
        return sum(r.error != "" and r.ended > since for r in self.reports) >= errors

    def was_interesting(self) -> bool:
        """Say whether all was tried that could go wrong: nothing bad happened counts only then."""
        answers = {(r.call, r.answer) for r in self.reports if isinstance(r.answer, (str, bool))}
        return answers >= INTERESTING


class FaultTest(unittest.TestCase):
    """A run of contending workers with faults in its middle."""

    def play(
        self,
        module: str,
        server: serve.Postgres | serve.Etcd,
        victims: Callable[[], list[int]],
        *,
        timeout: float,
        errors: int,
        times: int = 1,
        twin: str | None = None,
    ) -> History:
        """Play one run: `times` times kill members, and start them once `errors` calls failed.

        The workers use the module `twin`, if there is one, in place of the store itself.
        """
        store = importlib.import_module(module)
        lengths = []
        with (
            store.fresh() as locations,
            store.LeaseTable(locations[0]) as leases,
            store.FencedSink(locations[1]) as sink,
        ):
            run = Run(twin or module, locations, timeout)
            try:
                lifted = 0.0
                for _ in range(times):
                    run.collect("writes before a fault", partial(run.has_written, lifted))
                    killed, began = victims(), time.monotonic()
                    server.kill(*killed)
                    run.collect("calls to fail", partial(run.has_failed, began, errors))
                    server.start(*killed)
                    lifted = time.monotonic()
                    lengths.append(f"{lifted - began:.1f} s")
                run.collect("writes after a fault", partial(run.has_written, lifted))
                if twin is None:
                    run.collect(f"all of {sorted(INTERESTING)}", run.was_interesting)
                run.finish()
            finally:
                run.end()
            history = History(run.reports, list(leases.rows()), list(sink.rows()), timeout)
        self.tell(history, lengths)
        return history

    def tell(self, history: History, lengths: list[str]) -> None:
        """Say in one line what the run was like."""
        reports = history.reports
        words = {
            "calls": len(reports),
            "written": sum(r.answer == "written" for r in reports),
            "stale": sum(r.answer == "stale" for r in reports),
            "takeovers": sum(row.epoch - 1 for row in history.leases),
            "completed": sum(row.result is not None for row in history.leases),
            "failed": sum(r.error == "failed" for r in reports),
            "unknown": sum(r.error == "unknown" for r in reports),
            "slowest": f"{max(r.ended - r.began for r in reports):.2f} s",
            "faults": " + ".join(lengths),
        }
        line = ", ".join(f"{name} {count}" for name, count in words.items())
        print(f"\n{self.id().rpartition('.')[2]}: {line}", file=sys.stderr)


class PostgresFaults(FaultTest):
    """PostgreSQL, killed and started again."""

    def test_a_killed_server_comes_back_with_all_it_answered(self) -> None:
        with serve.postgres() as server, mock.patch.dict(os.environ, server.environment):
            history = self.play(
                "postgres_leases", server, lambda: [0], timeout=2.0, errors=5 * WORKERS, times=3
            )
        self.assertEqual(violations(history), {})

    def test_a_sink_without_a_fence_is_found_out(self) -> None:
        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch.object(sys, "path", [folder, *sys.path]),  # spawned processes get it, too
            serve.postgres() as server,
            mock.patch.dict(os.environ, server.environment),
        ):
            Path(folder, "unfenced_leases.py").write_text(UNFENCED)
            history = self.play(
                "postgres_leases",
                server,
                lambda: [0],
                timeout=2.0,
                errors=5 * WORKERS,
                twin="unfenced_leases",
            )
        self.assertIn("stale", violations(history))


class EtcdFaults(FaultTest):
    """An etcd cluster of three that loses members and gets them back.

    The timeout is shorter than an election takes, so that calls fail meanwhile.
    """

    def test_a_killed_leader_is_replaced_and_comes_back(self) -> None:
        with serve.etcd(members=3) as server, mock.patch.dict(os.environ, server.environment):
            history = self.play(
                "etcd_leases",
                server,
                lambda: [server.leader()],
                timeout=0.5,
                errors=WORKERS,
                times=3,
            )
        self.assertEqual(violations(history), {})

    def test_a_lost_majority_stops_everything_until_it_is_back(self) -> None:
        if not os.environ.get("LEASES_MAJORITY"):
            self.skipTest("on request: --majority")
        with serve.etcd(members=3) as server, mock.patch.dict(os.environ, server.environment):
            leader = server.leader()
            history = self.play(
                "etcd_leases",
                server,
                lambda: [leader, (leader + 1) % 3],
                timeout=1.0,
                errors=3 * WORKERS,
            )
        self.assertEqual(violations(history), {})


# Old states put back.


RESOURCES: Final = ["receipt", "report"]  # with the same history


class Restored(NamedTuple):
    """What became of old leases after a backup was put back, and which epoch came next."""

    findings: list[Finding]
    stale_write: str  # of B's epoch, which C had taken over before the restore
    renewed: bool  # any old lease of "report"
    completed: bool  # any old lease of "receipt"
    epoch: int  # of the next claim of "report"


class RestoreTest(unittest.TestCase):
    """A backup of an old state, really put back, with and without `reconcile`.

    A takes over in epoch 1 and writes; the backup is made; B takes over in epoch 2 and writes;
    C takes over in epoch 3 and writes. Then the backup is put back under their open connections.
    """

    def play(
        self,
        module: str,
        *,
        save: Callable[[str, str], None],
        restore: Callable[[], None],
        put_right: bool,
    ) -> Restored:
        """Play it on a store; without `put_right` nobody calls `reconcile`."""
        store = importlib.import_module(module)
        with (
            store.fresh() as locations,
            store.LeaseTable(locations[0]) as leases,
            store.FencedSink(locations[1]) as sink,
        ):
            finished = self.take_over_and_write(leases, sink, "finished", "A", 0)
            self.assertTrue(leases.complete(finished, "by A", now=1))
            held = [self.take_over_and_write(leases, sink, each, "A", 0) for each in RESOURCES]
            save(*locations)
            for tick, owner in ((10, "B"), (20, "C")):
                for each in RESOURCES:
                    held.append(self.take_over_and_write(leases, sink, each, owner, tick))
            self.assertEqual([lease.epoch for lease in held], [1, 1, 2, 2, 3, 3])
            self.assertEqual(sink.write("report", 2, "late", seq=1), "stale")
            restore()
            findings = reconcile(leases, sink) if put_right else []
            stale_write = sink.write("report", 2, "late", seq=1)
            # A's lease ran until tick 10, and C's until 30.
            old = {each: [lease for lease in held if lease.resource == each] for each in RESOURCES}
            renewed = [
                leases.renew(lease, now=t, ttl=10) for lease in old["report"] for t in (9, 29)
            ]
            completed = [
                leases.complete(lease, lease.owner, now=t)
                for lease in old["receipt"]
                for t in (9, 29)
            ]
            new = leases.claim("report", "D", now=40, ttl=10)
            self.assertEqual(leases.get("finished"), LeaseRow("finished", "A", 1, 10, "by A"))
            self.assertEqual(sink.get("finished"), SinkRow("finished", 1, 1, 0, "by A"))
            if put_right:
                self.assertEqual(sink.write("report", new.epoch, "by D"), "written")
            return Restored(findings, stale_write, any(renewed), any(completed), new.epoch)

    def take_over_and_write(
        self, leases: LeaseTable, sink: FencedSink, resource: str, owner: str, tick: int
    ) -> Lease:
        """Do what a worker does that is alone."""
        lease = take_over(leases, sink, resource, owner, now=tick, ttl=10)
        if lease is None:
            self.fail(f"{owner} could not take over {resource}")
        self.assertEqual(sink.write(resource, lease.epoch, f"by {owner}"), "written")
        return lease


class PostgresRestores(RestoreTest):
    """pg_dump of the lease table's schema, the sink's or both, restored over what came later."""

    server: ClassVar[serve.Postgres]

    @classmethod
    def setUpClass(cls) -> None:
        stack = ExitStack()
        cls.addClassCleanup(stack.close)
        cls.server = stack.enter_context(serve.postgres())
        stack.enter_context(mock.patch.dict(os.environ, cls.server.environment))

    def restored(self, *kept: int, put_right: bool) -> Restored:
        """Back up the lease table (0), the sink (1) or both, and put that back."""
        with tempfile.TemporaryDirectory() as folder:
            backup = Path(folder) / "backup.sql"
            return self.play(
                "postgres_leases",
                save=lambda *schemas: self.server.save(backup, *(schemas[n] for n in kept)),
                restore=lambda: self.server.restore(backup),
                put_right=put_right,
            )

    def test_a_restored_lease_table_hands_out_an_epoch_twice(self) -> None:
        restored = self.restored(0, put_right=False)
        self.assertEqual(restored, Restored([], "stale", True, True, 2))

    def test_a_restored_sink_accepts_a_stale_write(self) -> None:
        restored = self.restored(1, put_right=False)
        self.assertEqual(restored, Restored([], "written", True, True, 4))

    def test_both_restored_do_both(self) -> None:
        restored = self.restored(0, 1, put_right=False)
        self.assertEqual(restored, Restored([], "written", True, True, 2))

    def test_reconcile_puts_a_restored_lease_table_right(self) -> None:
        restored = self.restored(0, put_right=True)
        findings = [Finding(each, "lease", 1, 1003) for each in RESOURCES]
        self.assertEqual(restored, Restored(findings, "stale", False, False, 1004))

    def test_reconcile_puts_a_restored_sink_right(self) -> None:
        restored = self.restored(1, put_right=True)
        findings = [Finding(each, "fence", 1, 1003) for each in RESOURCES]
        self.assertEqual(restored, Restored(findings, "stale", False, False, 1004))

    def test_reconcile_puts_both_right(self) -> None:
        restored = self.restored(0, 1, put_right=True)
        self.assertEqual(restored, Restored([], "stale", False, False, 1002))


class EtcdRestores(RestoreTest):
    """A snapshot restored into a new member, lease table and sink alike."""

    def restored(self, *, put_right: bool) -> Restored:
        """Save a snapshot and put it back."""
        with (
            serve.etcd() as server,
            mock.patch.dict(os.environ, server.environment),
            tempfile.TemporaryDirectory() as folder,
        ):
            backup = Path(folder) / "backup.db"
            return self.play(
                "etcd_leases",
                save=lambda *_: server.save(backup),
                restore=lambda: server.restore(backup),
                put_right=put_right,
            )

    def test_a_restored_snapshot_breaks_what_was_promised(self) -> None:
        restored = self.restored(put_right=False)
        self.assertEqual(restored, Restored([], "written", True, True, 2))

    def test_reconcile_puts_a_restored_snapshot_right(self) -> None:
        restored = self.restored(put_right=True)
        self.assertEqual(restored, Restored([], "stale", False, False, 1002))


# The predicates themselves.


def report(
    call: str,
    answer: Answer,
    began: float,
    *,
    epoch: int = 0,
    seq: int = 0,
    text: str = "",
    now: int = 0,
    error: str = "",
    took: float = 0.5,
) -> Report:
    """Make up a report about the resource "r"."""
    return Report(0, call, "r", epoch, seq, text, now, answer, error, began, began + took)


def granted(began: float, epoch: int, *, now: int = 0, deadline: int = 10) -> Report:
    """Make up a claim that was granted."""
    owner = f"owner {epoch} at {began:g}"
    lease = Lease("r", owner, epoch, deadline)
    return report("claim", lease, began, text=owner, now=now)


class Checks(unittest.TestCase):
    """Made-up reports, good ones and then each with one thing wrong: every predicate finds its own.

    A works in epoch 1 and releases; B claims, seals, writes twice, is refused once as the worker
    of epoch 1, and completes.
    """

    GOOD: Final = (
        granted(1, 1),
        report("write", "written", 2, epoch=1, text="one"),
        report("write", None, 3, epoch=1, seq=1, text="two", error="failed"),
        report("write", None, 4, epoch=1, seq=1, text="three", error="unknown"),
        report("release", True, 5, epoch=1, now=1),
        granted(6, 2, now=2, deadline=12),
        report("seal", "sealed", 7, epoch=2),
        report("fence", SinkRow("r", 2, 1, 1, "three"), 8),
        report("write", "written", 9, epoch=2, text="four"),
        report("write", "stale", 10, epoch=1, seq=2, text="five"),
        report("write", "written", 11, epoch=2, seq=1, text="six"),
        report("lease", LeaseRow("r", "owner 2 at 6", 2, 12, None), 12),
        report("complete", True, 13, epoch=2, text="done", now=3),
    )
    LEASE: Final = LeaseRow("r", "owner 2 at 6", 2, 12, "done")
    SINK: Final = SinkRow("r", 2, 2, 1, "six")

    def found(
        self,
        *more: Report,
        without: str = "",
        lease: LeaseRow | None = LEASE,
        sink: SinkRow | None = SINK,
    ) -> set[str]:
        """Judge the good reports, without the calls of a name, and more of them."""
        reports = [each for each in self.GOOD if each.call != without]
        history = History(
            [*reports, *more], [lease] if lease else [], [sink] if sink else [], timeout=2.0
        )
        return set(violations(history))

    def test_the_good_reports_pass(self) -> None:
        self.assertEqual(self.found(), set())

    def test_an_epoch_granted_twice_is_found(self) -> None:
        # The two claims ran at once, so that nothing but the number tells.
        self.assertEqual(self.found(granted(6.1, 2, now=2)), {"twice"})

    def test_an_epoch_granted_out_of_order_is_found(self) -> None:
        lease, sink = self.LEASE._replace(epoch=5), self.SINK._replace(fence=5)
        reports = [granted(1, 5), report("release", True, 2, epoch=5), granted(3, 4)]
        self.assertEqual(violations(History(reports, [lease], [sink], 2.0)).keys(), {"lowered"})

    def test_a_lowered_epoch_is_found_in_the_end(self) -> None:
        lease = self.LEASE._replace(epoch=1)
        self.assertEqual(self.found(lease=lease, without="complete"), {"lowered"})
        self.assertEqual(self.found(lease=None, without="complete"), {"lowered"})

    def test_a_lowered_epoch_is_found_by_a_reader(self) -> None:
        row = LeaseRow("r", "owner 1 at 1", 1, 10, None)
        self.assertEqual(self.found(report("lease", row, 14)), {"lowered"})
        self.assertEqual(self.found(report("lease", None, 14)), {"lowered"})

    def test_a_lowered_fence_is_found_in_the_end(self) -> None:
        sealed = report("seal", "sealed", 14, epoch=3)
        self.assertEqual(self.found(sealed), {"lowered"})
        self.assertEqual(self.found(sealed, sink=self.SINK._replace(fence=3)), set())

    def test_a_lowered_fence_is_found_by_a_reader(self) -> None:
        row = SinkRow("r", 1, 1, 1, "three")
        self.assertEqual(self.found(report("fence", row, 8.6)), {"lowered"})

    def test_a_lost_write_is_found_in_the_end(self) -> None:
        lost_row = self.SINK._replace(seq=0, value="four")
        self.assertEqual(self.found(sink=lost_row), {"lost"})
        self.assertEqual(self.found(sink=None), {"lost", "lowered"})
        self.assertEqual(self.found(sink=self.SINK._replace(value="another")), {"lost"})

    def test_a_lost_write_is_found_by_a_reader(self) -> None:
        row = SinkRow("r", 2, 1, 1, "three")
        self.assertEqual(self.found(report("fence", row, 14)), {"lost"})

    def test_a_lost_result_is_found(self) -> None:
        self.assertEqual(self.found(lease=self.LEASE._replace(result=None)), {"lost"})
        self.assertEqual(self.found(lease=self.LEASE._replace(result="other")), {"lost"})

    def test_a_stale_write_that_was_accepted_is_found(self) -> None:
        after_seal = report("write", "written", 7.6, epoch=1, seq=2, text="late")
        self.assertEqual(self.found(after_seal), {"stale"})
        during_seal = report("write", "written", 7.4, epoch=1, seq=2, text="late", took=1)
        self.assertEqual(self.found(during_seal), set())

    def test_a_claim_within_a_lease_is_found(self) -> None:
        self.assertEqual(self.found(without="release"), {"early"})

    def test_a_lost_renewal_is_found(self) -> None:
        renewed = report("renew", Lease("r", "owner 2 at 6", 2, 40), 14, epoch=2, now=5)
        taken = granted(15, 3, now=12)
        row = LeaseRow("r", taken.text, 3, 22, None)
        self.assertEqual(self.found(taken, without="complete", lease=row), set())
        self.assertEqual(self.found(renewed, taken, without="complete", lease=row), {"early"})

    def test_a_release_that_failed_but_took_effect_is_found(self) -> None:
        failed = report("release", None, 5, epoch=1, error="failed")
        self.assertEqual(self.found(failed, without="release"), {"early"})
        unknown = report("release", None, 5, epoch=1, error="unknown")
        self.assertEqual(self.found(unknown, without="release"), set())

    def test_a_failed_call_that_took_effect_is_found(self) -> None:
        failed = report("write", None, 14, epoch=2, seq=2, text="seven", error="failed")
        sink = self.SINK._replace(seq=2, value="seven")
        self.assertEqual(self.found(failed, sink=sink), {"phantom"})
        unknown = failed._replace(error="unknown")
        self.assertEqual(self.found(unknown, sink=sink), set())
        row = SinkRow("r", 1, 1, 1, "two")
        self.assertEqual(self.found(report("fence", row, 4)), {"phantom"})

    def test_a_failed_claim_or_result_that_took_effect_is_found(self) -> None:
        claim = report("claim", None, 14, text="somebody", error="failed")
        taken = LeaseRow("r", "somebody", 3, 20, None)
        self.assertEqual(self.found(claim, without="complete", lease=taken), {"phantom"})
        complete = report("complete", None, 14, epoch=2, text="wrong", error="failed")
        row = self.LEASE._replace(result="wrong")
        self.assertEqual(self.found(complete, without="complete", lease=row), {"phantom"})

    def test_a_call_beyond_its_timeout_is_found(self) -> None:
        took = 2.0 + ALLOWANCE
        for error in ("", "failed", "unknown"):
            claim = report("claim", None, 14, error=error, took=took + 0.1)
            self.assertEqual(self.found(claim), {"slow"})
            self.assertEqual(self.found(claim._replace(ended=14 + took)), set())


def main() -> None:
    """Run the tests; where something is not installed, say so in one line."""
    if "--majority" in sys.argv:
        sys.argv.remove("--majority")
        os.environ["LEASES_MAJORITY"] = "1"
    try:
        if importlib.util.find_spec("psycopg") is None:
            raise serve.ServerError("psycopg is not installed (pip install 'psycopg[binary]')")
        for name in serve.PACKAGES:
            serve.program(name)
    except serve.ServerError as error:
        print(f"test_faults.py: {error}", file=sys.stderr)
        sys.exit(2)
    unittest.main()


if __name__ == "__main__":
    main()
