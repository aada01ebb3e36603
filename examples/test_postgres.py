# /// script
# requires-python = ">=3.10"
# dependencies = ["psycopg[binary]>=3.1"]
# ///
# a test's name is its sentence
# the error that is expected and the block that raises it stay two things
"""Race postgres_leases.py against a real server, and naive twins of it that must break.

    PGHOST=… PGPORT=… PGUSER=… python3 examples/test_postgres.py [-v] [TEST ...]

Needs a server to which libpq's variables lead, and a role that may create schemas and end its own
backends. What every store must answer is held by test_leases.py --store; here is what only this
engine can get wrong. No sleep guesses an order: one party stops before its COMMIT, and the server
itself says when the other waits for it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import unittest
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any
from unittest import mock

import psycopg

sys.path.insert(0, str(Path(__file__).resolve().parent))
import postgres_leases as store
from postgres_leases import FencedSink, LeaseTable, fresh

from leases import (
    Fenced,
    Lease,
    LeaseLost,
    LeaseRow,
    OutcomeUnknown,
    SinkRow,
    reconcile,
    take_over,
)

LIMIT = 20.0  # seconds that anything awaited may take
SPAWN = multiprocessing.get_context("spawn")
BLOCKED = "SELECT cardinality(pg_blocking_pids(%s)) > 0"
GONE = "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = %s)"
STATE = "SELECT state FROM pg_stat_activity WHERE pid = %s"
TERMINATE = "SELECT pg_terminate_backend(%s)"
DOCUMENT = "CREATE TABLE IF NOT EXISTS document (resource text, value text)"
INSERT = "INSERT INTO document VALUES ('report', 'a')"


def main() -> None:
    try:
        with fresh():
            pass
    except psycopg.OperationalError as error:
        print(f"test_postgres.py: no server answers: {error}", file=sys.stderr)
        sys.exit(2)
    unittest.main()


# The stores under test, held before COMMIT, and their broken twins.


class Held:
    """A store that stops before one of its statements, if it is given a gate."""

    gate: Gate | None = None

    def _execute(self, query: Any, values: tuple[Any, ...] = ()) -> Any:
        if self.gate is not None and query == self.gate.before:
            self.gate.pass_through()
        return super()._execute(query, values)  # type: ignore[misc]


class Gate:
    def __init__(self, before: str = store.COMMIT) -> None:
        self.before, self.reached, self.opened = before, threading.Event(), threading.Event()

    def pass_through(self) -> None:
        self.reached.set()
        if not self.opened.wait(LIMIT):
            raise TimeoutError("nobody opened the gate")


class HeldSink(Held, FencedSink):
    pass


class HeldTable(Held, LeaseTable):
    pass


class PlainRead:
    """Decide by a plain SELECT, then upsert: right under SQLite's BEGIN IMMEDIATE, wrong here."""

    def _insert_or_lock(self: Any, first: tuple[Any, ...]) -> Any:
        row = self._execute(self._one, first[:1]).fetchone()
        if row is None:
            self._execute(self.upsert, first)
            return None
        return self._type._make(row)


class PlainReadSink(PlainRead, HeldSink):
    upsert = store.FIRST_SINK.replace(
        "DO NOTHING",
        "DO UPDATE SET fence = excluded.fence, epoch = excluded.epoch, seq = excluded.seq, "
        "value = excluded.value",
    )


class PlainReadTable(PlainRead, HeldTable):
    upsert = store.FIRST_LEASE.replace(
        "DO NOTHING",
        "DO UPDATE SET owner = excluded.owner, epoch = excluded.epoch, "
        "deadline = excluded.deadline",
    )


class LockAboveTheFenceSink(HeldSink):
    """Lock the row only where the fence must be raised: equal epochs then go by a plain read."""

    def _insert_or_lock(self: Any, first: tuple[Any, ...]) -> Any:
        if self._execute(self._first, first).rowcount == 1:
            return None
        row = self._type._make(self._execute(self._one, first[:1]).fetchone())
        if first[1] > row.fence:
            row = self._type._make(self._execute(self._lock, first[:1]).fetchone())
        return row


class OneSnapshotSink(HeldSink):
    """Insert and read in one statement: it reads in the snapshot from before the wait."""

    def _insert_or_lock(self: Any, first: tuple[Any, ...]) -> Any:
        both = f"WITH new AS ({self._first} RETURNING 1) SELECT * FROM sink WHERE resource = %s"
        row = self._execute(both, (*first, first[0])).fetchone()
        return None if row is None else self._type._make(row)


class UnlockedGuardTable(HeldTable):
    """Ask for the lease without locking its row."""

    def _execute(self, query: Any, values: tuple[Any, ...] = ()) -> Any:
        unlocked = query.replace("FOR UPDATE", "") if query == store.LOCK_HELD else query
        return super()._execute(unlocked, values)


class UnlockedOpeningTable(HeldTable):
    """Trust CREATE TABLE IF NOT EXISTS alone."""

    def _execute(self, query: Any, values: tuple[Any, ...] = ()) -> Any:
        return super()._execute("SELECT 1" if query == store.OPENING else query, values)


def call(method: str, *values: Any) -> tuple[Any, ...]:
    """Name a method and its arguments, those by keyword in a dict at the end."""
    return (method, *values)


class Actor:
    """A store that lives in a thread of its own, so that it can wait while the test goes on."""

    def __init__(self, kind: Callable[..., Any], location: str) -> None:
        self.thread = ThreadPoolExecutor(1)
        self.store = self.thread.submit(kind, location, timeout=LIMIT).result(LIMIT)
        self.pid = self.store._connection.info.backend_pid

    def call(self, method: str, *args: Any, **options: Any) -> Future[Any]:
        return self.thread.submit(getattr(self.store, method), *args, **options)

    def close(self) -> None:
        self.thread.submit(self.store.close)
        self.thread.shutdown()


class Postgres(unittest.TestCase):
    """Two fresh schemas, and a connection that only looks and kills."""

    def setUp(self) -> None:
        stack = ExitStack()
        self.addCleanup(stack.close)
        self.enter = stack.enter_context
        self.lease, self.sink = self.enter(fresh())
        self.observer = self.enter(psycopg.connect(autocommit=True))

    def ask(self, query: str, *values: object) -> Any:
        row = self.observer.execute(query, values or None).fetchone()
        return None if row is None else row[0]

    def until(self, query: str, *values: object, unless: Future[Any] | None = None) -> None:
        end = time.monotonic() + LIMIT
        while not (unless is not None and unless.done()) and not self.ask(query, *values):
            if time.monotonic() > end:
                self.fail(f"still not so after {LIMIT} s: {query} {values}")
            time.sleep(0.002)

    def sink_rows(self) -> list[SinkRow]:
        with FencedSink(self.sink) as sink:
            return list(sink.rows())

    def lease_rows(self) -> list[LeaseRow]:
        with LeaseTable(self.lease) as table:
            return list(table.rows())

    def documents(self, location: str) -> list[Any]:
        query = psycopg.sql.SQL("SELECT value FROM {}.document ORDER BY value")
        rows = self.observer.execute(query.format(psycopg.sql.Identifier(location)))
        return [value for (value,) in rows]

    def actor(self, kind: Callable[..., Any], location: str) -> Actor:
        actor = Actor(kind, location)
        self.addCleanup(actor.close)
        return actor

    def race(
        self,
        kind: Callable[..., Any],
        location: str,
        first: tuple[Any, ...],
        second: tuple[Any, ...],
        before: str = store.COMMIT,
    ) -> tuple[Any, Any]:
        """Stop A's call before a statement, run B's until it ends or waits for A, let A go on."""
        a, b = self.actor(kind, location), self.actor(kind, location)
        a.store.gate = gate = Gate(before)
        try:
            answer = a.call(first[0], *first[1:-1], **first[-1])
            self.assertTrue(gate.reached.wait(LIMIT), f"A did not come to {before}")
            other = b.call(second[0], *second[1:-1], **second[-1])
            self.until(BLOCKED, b.pid, unless=other)
        finally:
            gate.opened.set()
        return answer.result(LIMIT), other.result(LIMIT)


class SinkRaces(Postgres):
    """Two writes of one resource; each schedule with the store, then with a twin that breaks."""

    def first_writes(self, kind: Callable[..., Any]) -> tuple[Any, list[SinkRow]]:
        a, b = call("write", "report", 2, "new", {}), call("write", "report", 1, "old", {})
        return self.race(kind, self.sink, a, b), self.sink_rows()

    def test_of_two_first_writes_the_higher_epoch_stays(self) -> None:
        answers, rows = self.first_writes(HeldSink)
        self.assertEqual(answers, ("written", "stale"))
        self.assertEqual(rows, [SinkRow("report", 2, 2, 0, "new")])

    def test_a_plain_read_lets_the_lower_first_write_win(self) -> None:
        answers, rows = self.first_writes(PlainReadSink)
        self.assertEqual(answers, ("written", "written"))
        self.assertEqual(rows, [SinkRow("report", 1, 1, 0, "old")])

    def test_one_snapshot_for_insert_and_read_answers_for_a_write_it_never_made(self) -> None:
        answers, rows = self.first_writes(OneSnapshotSink)
        self.assertEqual(answers, ("written", "written"))
        self.assertEqual(rows, [SinkRow("report", 2, 2, 0, "new")])

    def equal_first_writes(self, kind: Callable[..., Any]) -> tuple[Any, list[SinkRow]]:
        a, b = call("write", "report", 1, "a", {}), call("write", "report", 1, "b", {})
        return self.race(kind, self.sink, a, b), self.sink_rows()

    def test_of_two_equal_first_writes_the_second_is_a_conflict(self) -> None:
        answers, rows = self.equal_first_writes(HeldSink)
        self.assertEqual(answers, ("written", "conflict"))
        self.assertEqual(rows, [SinkRow("report", 1, 1, 0, "a")])

    def test_a_plain_read_accepts_two_equal_first_writes(self) -> None:
        answers, rows = self.equal_first_writes(PlainReadSink)
        self.assertEqual(answers, ("written", "written"))
        self.assertEqual(rows, [SinkRow("report", 1, 1, 0, "b")])

    def equal_writes(self, kind: Callable[..., Any]) -> tuple[Any, list[SinkRow]]:
        with FencedSink(self.sink) as sink:
            sink.seal("report", 1)
        a, b = call("write", "report", 1, "a", {}), call("write", "report", 1, "b", {})
        return self.race(kind, self.sink, a, b, before=store.STORE), self.sink_rows()

    def test_equal_writes_in_a_sealed_term_conflict(self) -> None:
        answers, rows = self.equal_writes(HeldSink)
        self.assertEqual(answers, ("written", "conflict"))
        self.assertEqual(rows, [SinkRow("report", 1, 1, 0, "a")])

    def test_a_lock_only_above_the_fence_accepts_two_equal_writes(self) -> None:
        answers, rows = self.equal_writes(LockAboveTheFenceSink)
        self.assertEqual(answers, ("written", "written"))
        self.assertEqual(rows, [SinkRow("report", 1, 1, 0, "a")])

    def raised_fence(self, kind: Callable[..., Any]) -> tuple[Any, list[SinkRow]]:
        with FencedSink(self.sink) as sink:
            sink.write("report", 1, "first")
        a, b = call("seal", "report", 3, {}), call("write", "report", 2, "old", {})
        return self.race(kind, self.sink, a, b), self.sink_rows()

    def test_a_write_that_waited_sees_the_fence_raised_meanwhile(self) -> None:
        answers, rows = self.raised_fence(HeldSink)
        self.assertEqual(answers, ("sealed", "stale"))
        self.assertEqual(rows, [SinkRow("report", 3, 1, 0, "first")])

    def test_a_plain_read_lowers_the_fence_raised_meanwhile(self) -> None:
        answers, rows = self.raised_fence(PlainReadSink)
        self.assertEqual(answers, ("sealed", "written"))
        self.assertEqual(rows, [SinkRow("report", 2, 2, 0, "old")])

    def test_a_first_write_that_was_rolled_back_leaves_the_way_to_the_next(self) -> None:
        a, b = self.actor(HeldSink, self.sink), self.actor(HeldSink, self.sink)
        a.store.gate = gate = Gate()
        lost = a.call("write", "report", 2, "new")
        self.assertTrue(gate.reached.wait(LIMIT))
        answer = b.call("write", "report", 1, "old")
        self.until(BLOCKED, b.pid)
        self.ask(TERMINATE, a.pid)
        self.assertEqual(answer.result(LIMIT), "written")
        gate.opened.set()
        # A's COMMIT met a connection that was gone; that it was never sent can't be told.
        self.assertRaises(OutcomeUnknown, lost.result, LIMIT)
        self.assertEqual(self.sink_rows(), [SinkRow("report", 1, 1, 0, "old")])


class LeaseRaces(Postgres):
    """Two claims of one resource, and a claim beside a guard's block."""

    def claims(self, kind: Callable[..., Any], tick: int) -> tuple[Any, list[LeaseRow]]:
        options = {"now": tick, "ttl": 10}
        a, b = call("claim", "report", "A", options), ("claim", "report", "B", options)
        return self.race(kind, self.lease, a, b), self.lease_rows()

    def test_of_two_first_claims_one_is_granted(self) -> None:
        answers, rows = self.claims(HeldTable, 0)
        self.assertEqual(answers, (Lease("report", "A", 1, 10), None))
        self.assertEqual(rows, [LeaseRow("report", "A", 1, 10, None)])

    def test_a_plain_read_grants_the_first_epoch_twice(self) -> None:
        answers, _ = self.claims(PlainReadTable, 0)
        self.assertEqual([lease.epoch for lease in answers], [1, 1])

    def test_of_two_claims_of_an_expired_lease_one_is_granted(self) -> None:
        with LeaseTable(self.lease) as table:
            table.claim("report", "old", now=0, ttl=10)
        answers, rows = self.claims(HeldTable, 10)
        self.assertEqual(answers, (Lease("report", "A", 2, 20), None))
        self.assertEqual(rows, [LeaseRow("report", "A", 2, 20, None)])

    def test_a_plain_read_grants_an_expired_lease_twice(self) -> None:
        with LeaseTable(self.lease) as table:
            table.claim("report", "old", now=0, ttl=10)
        answers, _ = self.claims(PlainReadTable, 10)
        self.assertEqual([lease.epoch for lease in answers], [2, 2])

    def test_a_renewal_that_waited_for_a_claim_is_refused(self) -> None:
        with LeaseTable(self.lease) as table:
            lease: Any = table.claim("report", "old", now=0, ttl=10)
        a, b = (
            ("claim", "report", "A", {"now": 10, "ttl": 10}),
            ("renew", lease, {"now": 9, "ttl": 9}),
        )
        answers = self.race(HeldTable, self.lease, a, b)
        self.assertEqual(answers, (Lease("report", "A", 2, 20), None))
        self.assertEqual(self.lease_rows(), [LeaseRow("report", "A", 2, 20, None)])

    def test_a_completion_that_waited_for_a_claim_is_refused(self) -> None:
        with LeaseTable(self.lease) as table:
            lease: Any = table.claim("report", "old", now=0, ttl=10)
        a, b = (
            ("claim", "report", "A", {"now": 10, "ttl": 10}),
            ("complete", lease, "r", {"now": 9}),
        )
        self.assertFalse(self.race(HeldTable, self.lease, a, b)[1])
        self.assertEqual(self.lease_rows(), [LeaseRow("report", "A", 2, 20, None)])

    def test_an_advance_that_waited_for_a_claim_raises_its_epoch(self) -> None:
        a, b = call("claim", "report", "A", {"now": 0, "ttl": 10}), call("advance", "report", 5, {})
        self.assertTrue(self.race(HeldTable, self.lease, a, b)[1])
        self.assertEqual(self.lease_rows(), [LeaseRow("report", "A", 5, 0, None)])

    def test_a_claim_waits_for_the_block_of_a_guard(self) -> None:
        table, b = self.enter(LeaseTable(self.lease)), self.actor(HeldTable, self.lease)
        lease: Any = table.claim("report", "A", now=0, ttl=10)
        with table.guard(lease, now=9) as connection:
            answer = b.call("claim", "report", "B", now=10, ttl=10)
            self.until(BLOCKED, b.pid)
            connection.execute(DOCUMENT)
        self.assertEqual(answer.result(LIMIT), Lease("report", "B", 2, 20))

    def test_a_guard_that_locks_nothing_lets_a_claim_in_before_its_write(self) -> None:
        table, b = self.enter(UnlockedGuardTable(self.lease)), self.actor(HeldTable, self.lease)
        lease: Any = table.claim("report", "A", now=0, ttl=10)
        with table.guard(lease, now=9) as connection:
            answer = b.call("claim", "report", "B", now=10, ttl=10)
            self.assertEqual(answer.result(LIMIT), Lease("report", "B", 2, 20))
            connection.execute(DOCUMENT)
            connection.execute(INSERT)  # of an epoch that was over before it, and it is committed
        self.assertEqual(self.documents(self.lease), ["a"])

    def test_a_guard_that_waited_for_a_claim_is_refused(self) -> None:
        a, b = self.actor(HeldTable, self.lease), self.actor(HeldTable, self.lease)
        lease = a.call("claim", "report", "A", now=0, ttl=10).result(LIMIT)
        a.store.gate = gate = Gate()

        def guarded() -> None:
            with b.store.guard(lease, now=9):
                raise AssertionError("the block ran")

        a.call("claim", "report", "B", now=10, ttl=10)
        self.assertTrue(gate.reached.wait(LIMIT))
        lost = b.thread.submit(guarded)
        self.until(BLOCKED, b.pid)
        gate.opened.set()
        self.assertRaisesRegex(LeaseLost, "current is 2", lost.result, LIMIT)


class Opening(Postgres):
    """Tables that are not there yet, or not these."""

    def opened_during_another(self, kind: Callable[..., Any]) -> None:
        with psycopg.connect() as first, ThreadPoolExecutor(1) as thread:
            first.execute("SELECT set_config('search_path', %s, true)", (self.lease,))
            first.execute(store.OPENING)
            schema = psycopg.sql.Identifier(self.lease)
            first.execute(psycopg.sql.SQL(store.CREATE_LEASE).format(schema))
            opened = thread.submit(lambda: kind(self.lease, timeout=LIMIT).close())
            self.until(
                "SELECT EXISTS (SELECT FROM pg_locks WHERE %s = ANY (pg_blocking_pids(pid)))",
                first.info.backend_pid,
            )
            first.commit()
            opened.result(LIMIT)

    def test_an_opening_waits_for_another(self) -> None:
        self.opened_during_another(LeaseTable)

    def test_create_if_not_exists_alone_fails_beside_another(self) -> None:
        self.assertRaises(psycopg.IntegrityError, self.opened_during_another, UnlockedOpeningTable)

    def test_eight_processes_open_a_fresh_location_together(self) -> None:
        barrier = SPAWN.Barrier(8)
        reports = spawn(8, open_together, barrier, self.lease, self.sink)
        granted = [epoch for (epoch,) in reports if epoch]
        self.assertEqual(granted, [1])
        self.assertEqual([row.epoch for row in self.lease_rows()], [1])

    def test_other_columns_are_an_error_that_names_them(self) -> None:
        for kind, location in ((LeaseTable, self.lease), (FencedSink, self.sink)):
            with psycopg.connect() as connection:
                connection.execute("SELECT set_config('search_path', %s, false)", (location,))
                connection.execute("CREATE TABLE lease (resource text, holder text)")
                connection.execute("CREATE TABLE sink (resource text, holder text)")
            with self.assertRaisesRegex(psycopg.Error, rf"holder.*{location}.*port"):
                kind(location)

    def test_a_missing_schema_is_an_error_that_names_it(self) -> None:
        self.assertRaisesRegex(psycopg.Error, "schema 'no such'", LeaseTable, "no such")

    def test_a_server_that_is_not_there_is_named(self) -> None:
        with mock.patch.dict(os.environ, PGHOST="127.0.0.1", PGPORT="1", PGDATABASE="d"):
            with self.assertRaisesRegex(psycopg.OperationalError, "127.0.0.1, port 1, database d"):
                LeaseTable(self.lease)

    def test_a_name_is_a_name(self) -> None:
        for name in ('a "b"', "Ünï", "$1; --", "x" * 63):
            self.observer.execute(
                psycopg.sql.SQL("CREATE SCHEMA {}").format(psycopg.sql.Identifier(name))
            )
            try:
                with FencedSink(name) as sink:
                    self.assertEqual(sink.write("r", 1, "v"), "written")
            finally:
                self.observer.execute(
                    psycopg.sql.SQL("DROP SCHEMA {} CASCADE").format(psycopg.sql.Identifier(name))
                )
        self.assertRaises(ValueError, FencedSink, "x" * 64)

    def test_names_are_ordered_and_compared_byte_for_byte(self) -> None:
        names = ["a", "B", "ä", "a\u0308", "Z", "\U0001f600", "\uffff", " ", "a b"]
        with FencedSink(self.sink) as sink:
            for name in names:
                sink.seal(name, 1)
            self.assertEqual([row.resource for row in sink.rows()], sorted(names))
        LeaseTable(self.lease).close()
        collations = """
            SELECT array_agg(DISTINCT collname::text) FROM pg_attribute
            JOIN pg_class ON pg_class.oid = attrelid
            JOIN pg_collation ON pg_collation.oid = attcollation
            WHERE relnamespace::regnamespace::text = ANY (%s) AND relkind = 'r' AND attnum > 0
        """
        self.assertEqual(self.ask(collations, [self.lease, self.sink]), ["C"])

    def test_fresh_leaves_nothing_behind(self) -> None:
        with fresh() as locations:
            LeaseTable(locations[0]).close()
        named = "SELECT count(*) FROM pg_namespace WHERE nspname = ANY (%s)"
        self.assertEqual(self.ask(named, list(locations)), 0)


class Settings(Postgres):
    """Each transaction asks for what it needs, whatever the server's or the session's default."""

    def test_a_transaction_does_not_depend_on_defaults(self) -> None:
        weak = (
            "-c default_transaction_isolation=serializable -c synchronous_commit=off "
            "-c default_transaction_read_only=on -c search_path=nowhere"
        )
        with mock.patch.dict(os.environ, PGOPTIONS=weak, PGCLIENTENCODING="LATIN1"):
            sink = self.enter(FencedSink(self.sink, timeout=1.5))
        with sink.transaction("ключ", 1) as connection:
            shown = [
                connection.execute(f"SHOW {name}").fetchone()
                for name in ("transaction_isolation", "synchronous_commit", "lock_timeout")
            ]
        self.assertEqual(shown, [("read committed",), ("on",), ("1500ms",)])
        self.assertEqual(self.sink_rows(), [SinkRow("ключ", 1, 0, 0, None)])

    def test_a_plain_call_commits_under_the_same_settings(self) -> None:
        seen: list[Any] = []

        class Telling(FencedSink):
            def _execute(self, query: Any, values: tuple[Any, ...] = ()) -> Any:
                if query == store.COMMIT:
                    for name in ("transaction_isolation", "synchronous_commit"):
                        seen.append(super()._execute(f"SHOW {name}").fetchone())
                return super()._execute(query, values)

        weak = "-c default_transaction_isolation=serializable -c synchronous_commit=off"
        with mock.patch.dict(os.environ, PGOPTIONS=weak), Telling(self.sink) as sink:
            sink.write("report", 1, "v")
        self.assertEqual(seen, 2 * [("read committed",), ("on",)])

    def test_what_a_block_sets_does_not_outlive_it(self) -> None:
        sink = self.enter(FencedSink(self.sink))
        with sink.transaction("r", 1) as connection:
            connection.execute("CREATE TEMPORARY TABLE sink (resource text)")
            connection.execute("SET search_path TO pg_temp")
            connection.execute("SET lock_timeout TO 0")
            connection.execute("SET client_encoding TO 'LATIN1'")
            connection.row_factory = psycopg.rows.dict_row  # type: ignore[assignment]
        self.assertEqual(sink.write("ключ", 2, "ü"), "written")
        self.assertEqual(self.sink_rows()[1], SinkRow("ключ", 2, 2, 0, "ü"))

    def test_rows_hold_no_transaction_between_two_rows(self) -> None:
        sink = self.enter(FencedSink(self.sink))
        for number in range(205):
            sink.seal(f"{number:03}", 1)
        rows = sink.rows()
        self.assertEqual(next(rows).resource, "000")
        self.assertEqual(self.ask(STATE, sink._connection.info.backend_pid), "idle")
        sink.seal("204b", 1)
        self.assertEqual(len(list(rows)), 205)


class Timeouts(Postgres):
    """A lock that another holds."""

    def test_a_lock_that_is_held_too_long_is_the_servers_error(self) -> None:
        holder = self.enter(FencedSink(self.sink))
        for timeout, most in ((0, 5.0), (0.3, 8.0)):
            sink = self.enter(FencedSink(self.sink, timeout=timeout))
            with holder.transaction("report", 2):
                begun = time.monotonic()
                with self.assertRaises(psycopg.errors.LockNotAvailable):
                    sink.write("report", 1, "v")
                with self.assertRaises(psycopg.errors.LockNotAvailable):
                    sink.seal("report", 9)
                self.assertTrue(2 * timeout <= time.monotonic() - begun < most)
                self.assertEqual(sink.write("other", 1, "v", seq=int(timeout * 10)), "written")
            self.assertEqual(sink.write("report", 1, "v"), "stale")
        self.assertEqual(
            self.sink_rows(),
            [SinkRow("other", 1, 1, 3, "v"), SinkRow("report", 2, 0, 0, None)],
        )


class Blocks(Postgres):
    """What a block may do to its own transaction, and what is found out."""

    def setUp(self) -> None:
        super().setUp()
        self.store = self.enter(FencedSink(self.sink))
        with self.store.transaction("report", 1) as connection:
            connection.execute(DOCUMENT)

    def run_block(self, epoch: int, *statements: str) -> None:
        with self.store.transaction("report", epoch) as connection:
            for statement in statements:
                connection.execute(statement)

    def test_the_end_of_the_transaction_is_found_out(self) -> None:
        for epoch, (ending, kept, fence) in enumerate(
            [
                ("COMMIT", 1, 2),
                ("COMMIT; BEGIN", 1, 3),
                ("COMMIT AND CHAIN", 1, 4),
                ("ROLLBACK", 0, 4),
                ("ROLLBACK; BEGIN", 0, 4),
                ("ROLLBACK AND CHAIN", 0, 4),
            ],
            start=2,
        ):
            with self.subTest(ending):
                before = len(self.documents(self.sink))
                with self.assertRaisesRegex(psycopg.ProgrammingError, "end its own transaction"):
                    self.run_block(epoch, INSERT, ending, "SELECT 1")
                self.assertEqual(len(self.documents(self.sink)), before + kept)
                self.assertEqual(self.store.get("report"), SinkRow("report", fence, 0, 0, None))

    def test_what_follows_a_commit_is_not_kept(self) -> None:
        insert = INSERT.replace("document", f'"{self.sink}".document')
        with self.assertRaises(psycopg.ProgrammingError):
            self.run_block(2, insert, "COMMIT", insert, insert)
        self.assertEqual(self.documents(self.sink), ["a"])

    def test_commit_and_rollback_are_refused_and_nothing_is_kept(self) -> None:
        for method in ("commit", "rollback"):
            with self.assertRaises(psycopg.ProgrammingError):
                with self.store.transaction("report", 2) as connection:
                    connection.execute(INSERT)
                    self.assertRaises(psycopg.ProgrammingError, getattr(connection, method))
                    connection.execute(INSERT)
            self.assertEqual(self.documents(self.sink), [])
            self.assertEqual(self.store.get("report"), SinkRow("report", 1, 0, 0, None))

    def test_what_is_set_behind_a_rollback_does_not_last(self) -> None:
        with self.assertRaises(KeyError):
            with self.store.transaction("report", 2) as connection:
                connection.execute("ROLLBACK")
                connection.isolation_level = psycopg.IsolationLevel.SERIALIZABLE
                connection.autocommit = True
                raise KeyError
        with self.store.transaction("report", 2) as connection:
            shown = connection.execute("SHOW transaction_isolation").fetchone()
        self.assertEqual(shown, ("read committed",))
        self.run_block(3, INSERT)
        with self.assertRaises(ZeroDivisionError):
            with self.store.transaction("report", 4) as connection:
                connection.execute(INSERT)
                raise ZeroDivisionError
        self.assertEqual(self.documents(self.sink), ["a"])
        self.assertEqual(self.store.get("report"), SinkRow("report", 3, 0, 0, None))

    def test_a_swallowed_error_fails_the_block_unless_in_a_savepoint(self) -> None:
        with self.assertRaises(psycopg.errors.InFailedSqlTransaction):
            with self.store.transaction("report", 2) as connection:
                connection.execute(INSERT)
                self.assertRaises(psycopg.Error, connection.execute, "SELECT 1 / 0")
        self.assertEqual(self.documents(self.sink), [])
        with self.store.transaction("report", 2) as connection:
            connection.execute(INSERT)
            with self.assertRaises(psycopg.Error), connection.transaction():
                connection.execute("SELECT 1 / 0")
        self.assertEqual(self.documents(self.sink), ["a"])

    def test_a_constraint_that_fails_at_commit_changes_nothing(self) -> None:
        self.run_block(
            1,
            "CREATE TABLE parent (id int PRIMARY KEY)",
            "CREATE TABLE child (id int REFERENCES parent DEFERRABLE INITIALLY DEFERRED)",
        )
        with self.assertRaises(psycopg.errors.ForeignKeyViolation):
            self.run_block(2, "INSERT INTO child VALUES (1)")
        self.assertEqual(self.store.write("report", 1, "v"), "written")

    def test_a_block_that_is_fenced_does_not_run(self) -> None:
        self.store.seal("report", 5)
        with self.assertRaises(Fenced):
            self.run_block(4, INSERT)
        self.assertEqual(self.documents(self.sink), [])

    def test_other_calls_inside_a_block_are_refused_and_do_it_no_harm(self) -> None:
        rows = self.store.rows()
        next(rows)
        with self.store.transaction("report", 2) as connection:
            connection.execute(INSERT)
            for call in (
                lambda: self.store.get("report"),
                lambda: self.store.write("report", 3, "v"),
                lambda: next(rows),
                lambda: list(self.store.rows()),
                self.store.close,
                lambda: self.store.transaction("report", 9).__enter__(),
            ):
                self.assertRaises(RuntimeError, call)
        self.assertEqual(self.documents(self.sink), ["a"])

    def test_another_thread_is_refused(self) -> None:
        with ThreadPoolExecutor(1) as thread:
            call = thread.submit(self.store.get, "report")
            self.assertRaises(RuntimeError, call.result, LIMIT)

    @unittest.skipUnless(hasattr(os, "fork"), "needs fork")
    def test_a_forked_process_is_refused_and_does_no_harm(self) -> None:
        def in_a_child(work: Callable[[], object]) -> int:
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    work()
                except RuntimeError:
                    status = 7
                finally:
                    os._exit(status)
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

        def block() -> None:
            with self.store.transaction("report", 2) as connection:
                connection.execute(INSERT)
                if (child := os.fork()) == 0:
                    return
                self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 7)

        here = os.getpid()
        self.assertEqual(in_a_child(lambda: self.store.get("report")), 7)
        self.assertEqual(in_a_child(self.store.close), 1)
        try:
            block()
        except RuntimeError:
            if os.getpid() != here:
                os._exit(7)
            raise
        self.assertEqual(self.documents(self.sink), ["a"])
        self.assertEqual(self.store.get("report"), SinkRow("report", 2, 0, 0, None))

    def test_a_closed_object_says_so(self) -> None:
        self.store.close()
        self.store.close()
        self.assertRaisesRegex(psycopg.Error, "closed", self.store.get, "report")

    def test_an_interrupt_while_a_lock_is_awaited_changes_nothing(self) -> None:
        waiting = self.enter(FencedSink(self.sink, timeout=LIMIT))
        pid = waiting._connection.info.backend_pid

        def interrupt() -> None:
            self.until(BLOCKED, pid)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

        with ThreadPoolExecutor(1) as thread, self.store.transaction("report", 2):
            interrupted = thread.submit(interrupt)
            self.assertRaises(KeyboardInterrupt, waiting.write, "report", 3, "v")
            interrupted.result(LIMIT)
        self.assertEqual(waiting.write("report", 2, "v"), "written")


class LostConnections(Postgres):
    """A backend that is ended, at each place where it makes a difference."""

    def setUp(self) -> None:
        super().setUp()
        self.store = self.enter(FencedSink(self.sink))
        self.store.write("report", 1, "v")

    def kill(self) -> None:
        pid = self.store._connection.info.backend_pid
        self.ask(TERMINATE, pid)
        self.until(GONE, pid)

    def test_between_two_calls_it_is_made_anew(self) -> None:
        for call, answer in (
            (lambda: self.store.write("report", 1, "v"), "replay"),
            (lambda: self.store.get("report"), SinkRow("report", 1, 1, 0, "v")),
            (lambda: self.store.seal("report", 2), "sealed"),
            (lambda: [row.fence for row in self.store.rows()], [2]),
        ):
            self.kill()
            self.assertEqual(call(), answer)

    def test_between_two_pages_it_is_made_anew(self) -> None:
        for number in range(150):
            self.store.seal(f"{number:03}", 1)
        rows = self.store.rows()
        next(rows)
        self.kill()
        self.assertEqual(len(list(rows)), 150)

    def test_in_an_idle_block_nothing_of_it_stays(self) -> None:
        for raised, statements in ((psycopg.OperationalError, []), (psycopg.Error, ["SELECT 1"])):
            with self.assertRaises(raised):
                with self.store.transaction("report", 5) as connection:
                    connection.execute(DOCUMENT)
                    self.kill()
                    for statement in statements:
                        connection.execute(statement)
            self.assertEqual(self.store.get("report"), SinkRow("report", 1, 1, 0, "v"))
        self.assertEqual(self.store.write("report", 2, "w"), "written")

    def test_while_waiting_for_a_lock_nothing_has_changed(self) -> None:
        b = self.actor(FencedSink, self.sink)
        with self.store.transaction("report", 2):
            answer = b.call("write", "report", 3, "w")
            self.until(BLOCKED, b.pid)
            self.ask(TERMINATE, b.pid)
            self.assertRaises(psycopg.OperationalError, answer.result, LIMIT)
        self.assertEqual(b.call("write", "report", 2, "w").result(LIMIT), "written")

    def test_while_commit_waits_the_outcome_is_unknown(self) -> None:
        with self.store.transaction("report", 1) as connection:
            connection.execute("""
                CREATE FUNCTION stop() RETURNS trigger LANGUAGE plpgsql AS $$
                BEGIN PERFORM pg_advisory_xact_lock(7); RETURN NULL; END $$
            """)
            connection.execute("""
                CREATE CONSTRAINT TRIGGER stop AFTER UPDATE ON sink
                DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION stop()
            """)
        self.ask("SELECT pg_advisory_lock(7)")
        b = self.actor(FencedSink, self.sink)
        answer = b.call("write", "report", 2, "w")
        self.until(BLOCKED, b.pid)
        self.ask(TERMINATE, b.pid)
        self.assertRaises(OutcomeUnknown, answer.result, LIMIT)
        self.ask("SELECT pg_advisory_unlock(7)")
        self.assertEqual(self.store.get("report"), SinkRow("report", 1, 1, 0, "v"))
        self.assertEqual(b.call("write", "report", 2, "w").result(LIMIT), "written")

    def test_after_a_commit_that_took_effect_the_outcome_is_unknown_too(self) -> None:
        with losing_the_reply_to_commit(self.observer.info) as (variables, lose):
            with mock.patch.dict(os.environ, variables), FencedSink(self.sink) as sink:
                lose.set()
                self.assertRaises(OutcomeUnknown, sink.write, "report", 2, "w")
                self.assertEqual(self.store.get("report"), SinkRow("report", 2, 2, 0, "w"))
                self.assertEqual(sink.write("report", 2, "w"), "replay")
                lose.set()
                with self.assertRaises(OutcomeUnknown):
                    with sink.transaction("report", 3) as connection:
                        connection.execute(DOCUMENT)
                self.assertEqual(sink.seal("report", 3), "replay")
                self.assertEqual(lose.is_set(), False)


class Contention(Postgres):
    """Real processes on one resource."""

    def test_each_epoch_is_granted_once(self) -> None:
        barrier = SPAWN.Barrier(4)
        reports = spawn(4, contend, barrier, self.lease, self.sink)
        epochs = sorted(epoch for report in reports for epoch in report)
        self.assertEqual(epochs, list(range(1, len(epochs) + 1)))
        self.assertEqual(len(epochs), 100)
        self.assertGreater(sum(1 for report in reports if report), 1)
        self.assertEqual(self.sink_rows(), [SinkRow("report", 100, 100, 0, "100")])

    def test_the_two_protocols_run_on_the_store(self) -> None:
        leases: Any = self.enter(LeaseTable(self.lease))
        sink: Any = self.enter(FencedSink(self.sink))
        a: Any = take_over(leases, sink, "report", "A", now=0, ttl=10)
        b: Any = take_over(leases, sink, "report", "B", now=10, ttl=10)
        self.assertEqual((a.epoch, b.epoch, sink.write("report", 1, "old")), (1, 2, "stale"))
        sink.seal("report", 7)
        found = [(one.what, one.found, one.expected) for one in reconcile(leases, sink, margin=3)]
        self.assertEqual(found, [("lease", 2, 10)])
        self.assertIsNone(leases.renew(b, now=11, ttl=10))


# Processes, and a proxy.


def spawn(count: int, work: Callable[..., None], barrier: Barrier, *args: str) -> list[Any]:
    """Run `work` in as many processes, and answer what each has sent; a failed one is an error."""
    pipes = [SPAWN.Pipe(duplex=False) for _ in range(count)]
    children = [
        SPAWN.Process(target=work, args=(number, out, barrier, *args))
        for number, (_, out) in enumerate(pipes)
    ]
    try:
        for child in children:
            child.start()
        reports = []
        for number, (inlet, outlet) in enumerate(pipes):
            outlet.close()
            if not inlet.poll(60):
                raise TimeoutError(f"process {number} sent nothing")
            reports.append(inlet.recv())
        for child in children:
            child.join(LIMIT)
            if child.exitcode != 0:
                raise RuntimeError(f"a process ended with {child.exitcode}")
        return reports
    finally:
        for child in children:
            if child.is_alive():
                child.kill()
                child.join()


def open_together(number: int, out: Any, barrier: Barrier, lease: str, sink: str) -> None:
    barrier.wait(60)
    with LeaseTable(lease) as leases, FencedSink(sink):
        granted = leases.claim("report", f"worker {number}", now=0, ttl=10)
        out.send((granted and granted.epoch,))


def contend(number: int, out: Any, barrier: Barrier, lease: str, sink: str) -> None:
    """Claim at the tick at which the lease ends, until the hundredth epoch, and write in each."""
    granted = []
    with LeaseTable(lease) as leases, FencedSink(sink) as target:
        barrier.wait(60)
        while (row := leases.get("report")) is None or row.epoch < 100:
            now = 0 if row is None else row.deadline
            claimed = leases.claim("report", f"worker {number}", now=now, ttl=1)
            if claimed is not None and claimed.epoch <= 100:
                granted.append(claimed.epoch)
                target.write("report", claimed.epoch, str(claimed.epoch))
    out.send(granted)


@contextmanager
def losing_the_reply_to_commit(
    server: psycopg.ConnectionInfo,
) -> Iterator[tuple[dict[str, str], threading.Event]]:
    """Stand between client and server; when set, cut the client off before the next COMMIT's reply.

    The server's own reply is awaited first, so that the COMMIT has taken effect.
    """
    lose = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))

    def connected() -> socket.socket:
        if server.host.startswith("/"):
            upstream = socket.socket(socket.AF_UNIX)
            upstream.connect(f"{server.host}/.s.PGSQL.{server.port}")
            return upstream
        return socket.create_connection((server.hostaddr or server.host, server.port))

    def serve() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            upstream, lost = connected(), threading.Event()
            threading.Thread(target=back, args=(upstream, client, lost), daemon=True).start()
            threading.Thread(target=forth, args=(client, upstream, lost), daemon=True).start()

    def forth(client: socket.socket, upstream: socket.socket, lost: threading.Event) -> None:
        with upstream:
            while data := receive(client):
                if b"COMMIT\0" in data and lose.is_set():
                    lost.set()
                    lose.clear()
                upstream.sendall(data)
            upstream.shutdown(socket.SHUT_RDWR)

    def back(upstream: socket.socket, client: socket.socket, lost: threading.Event) -> None:
        with client:
            while (data := receive(upstream)) and not lost.is_set():
                client.sendall(data)
            client.shutdown(socket.SHUT_RDWR)

    def receive(end: socket.socket) -> bytes:
        try:
            return end.recv(65536)
        except OSError:
            return b""

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield (
            {
                "PGHOST": "127.0.0.1",
                "PGPORT": str(listener.getsockname()[1]),
                "PGSSLMODE": "disable",
                "PGGSSENCMODE": "disable",
            },
            lose,
        )
    finally:
        listener.close()


if __name__ == "__main__":
    main()
