# /// script
# requires-python = ">=3.10"
# dependencies = ["psycopg[binary]>=3.1"]
# ///
"""Keep leases and fences in PostgreSQL 15 or newer: a store with the answers of leases.py.

It is used from where leases.py is, with `pip install "psycopg[binary]"`, and held against the same
results and tests. The server is named by libpq's variables (PGHOST, PGPORT, PGUSER, PGDATABASE …):

    python3 run_experiment.py --store examples/postgres_leases.py --check results.json
    python3 test_leases.py --store examples/postgres_leases.py
    python3 examples/test_postgres.py

A location is the name of a schema that exists ("public"). Lease table and sink may share one, or
lie in two databases: the sink is at home where the business tables are.

Why READ COMMITTED is enough. It is asked for with each BEGIN, since the server's default may be
another. Each statement sees what was committed before it began, and one that locks a row waits for
whoever holds it and then goes by the newest version. So a first write inserts with ON CONFLICT DO
NOTHING; where that inserted nothing the row is there, and SELECT … FOR UPDATE locks it before
anything is decided, also when the epoch equals the fence. What was read then stays true until
COMMIT. The trap is a fence read in an older snapshot than the write: by a plain SELECT, by two
transactions, or at REPEATABLE READ. test_postgres.py runs such twins, and they break.

An answer is durable: each transaction sets synchronous_commit = on, whatever the server's default.
The engine can still lose answered calls in a failover to a standby that was behind (asynchronous
replication, or a synchronous one whose waiting was cancelled), in a restored dump, and with fsync
off. Run `reconcile` then, before workers are let in. No client finds out that a server lies.

An error before COMMIT means that nothing has changed; a reply to COMMIT that was lost raises
OutcomeUnknown. Ask again: the same write is a "replay", the same result True; a claim that may
have been granted ends at its deadline. A lost connection is made anew by the next call.

CockroachDB, YugabyteDB, AlloyDB, Aurora and others speak the protocol; they were not tried, and
some differ in just what is used here: what READ COMMITTED means, lock_timeout, advisory locks.

Differs from leases.py: an index entry has at most 2704 bytes, so a longer resource that doesn't
compress below that is refused by the server; and in a database whose encoding isn't UTF8, so is
text that it can't hold.
"""

from __future__ import annotations

import importlib.util
import math
import os
import secrets
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from pathlib import Path
from typing import Generic, TypeVar

import psycopg
from psycopg import sql
from psycopg.pq import Conninfo, TransactionStatus
from psycopg.rows import TupleRow

if importlib.util.find_spec("leases") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from leases import (
    LARGEST,
    Fenced,
    Lease,
    LeaseLost,
    LeaseRow,
    Outcome,
    OutcomeUnknown,
    SinkRow,
    _check_int,
    _check_name,
    _check_text,
    _check_timeout,
    _deadline,
    _held,
    _outcome,
)

__all__ = ["FencedSink", "LeaseTable", "fresh"]

_Answer = TypeVar("_Answer")
_Row = TypeVar("_Row", LeaseRow, SinkRow)
_Self = TypeVar("_Self", bound="_Schema")  # type: ignore[type-arg]  # of any rows
_Value = str | int | None
_Block = AbstractContextManager[psycopg.Connection[TupleRow]]

BEGIN = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE;"
COMMIT = "COMMIT"
# For one transaction each: a block may change the session's own, and a pooler its session. Without
# pg_temp at the end, a block's temporary table named sink would hide the real one.
SETTINGS = """
SET LOCAL search_path = {}, pg_temp;
SET LOCAL lock_timeout = {};
SET LOCAL synchronous_commit = on;
SET LOCAL client_encoding = 'UTF8'
"""
# A block may have set synchronous_commit too, and what counts is its value at COMMIT.
TRANSACTION = "SELECT pg_current_xact_id()::text, set_config('synchronous_commit', 'on', true)"
OPENING = "SELECT pg_advisory_xact_lock(7809632219779425)"  # CREATE … IF NOT EXISTS itself races
COLUMNS = """
SELECT attname FROM pg_attribute
WHERE attrelid = to_regclass(quote_ident(%s) || '.' || %s) AND attnum > 0 AND NOT attisdropped
ORDER BY attnum
"""
CREATE_SCHEMAS = "CREATE SCHEMA {}; CREATE SCHEMA {}"
DROP_SCHEMAS = "SET lock_timeout = '10s'; DROP SCHEMA IF EXISTS {}, {} CASCADE"

CREATE_LEASE = """
CREATE TABLE IF NOT EXISTS {}.lease (
    resource text COLLATE "C" PRIMARY KEY,
    owner text COLLATE "C" NOT NULL,
    epoch bigint NOT NULL CHECK (epoch >= 1),
    deadline bigint NOT NULL CHECK (deadline >= 0),
    result text COLLATE "C"
)
"""
LEASE_ROW = "SELECT * FROM lease WHERE resource = %s"  # its columns were checked at opening
LOCK_LEASE = "SELECT * FROM lease WHERE resource = %s FOR UPDATE"
LEASE_PAGE = "SELECT * FROM lease WHERE resource > %s ORDER BY resource LIMIT 100"
FIRST_LEASE = """
INSERT INTO lease (resource, owner, epoch, deadline) VALUES (%s, %s, %s, %s)
ON CONFLICT (resource) DO NOTHING
"""
GRANT = "UPDATE lease SET owner = %s, epoch = %s, deadline = %s WHERE resource = %s"
# These predicates are looked at again in the newest version of a row that had to be waited for.
HELD = """
WHERE resource = %s AND owner = %s AND epoch = %s AND deadline > %s AND result IS NULL
"""
RENEW = "UPDATE lease SET deadline = greatest(deadline, %s)" + HELD + "RETURNING deadline"
COMPLETE = "UPDATE lease SET result = %s" + HELD
RELEASE = "UPDATE lease SET deadline = 0" + HELD
LOCK_HELD = "SELECT 1 FROM lease" + HELD + "FOR UPDATE"
ADVANCE = """
INSERT INTO lease (resource, owner, epoch, deadline) VALUES (%s, '', %s, 0)
ON CONFLICT (resource) DO UPDATE SET epoch = excluded.epoch, deadline = 0
WHERE lease.epoch < excluded.epoch AND lease.result IS NULL
"""

CREATE_SINK = """
CREATE TABLE IF NOT EXISTS {}.sink (
    resource text COLLATE "C" PRIMARY KEY,
    fence bigint NOT NULL CHECK (fence >= 1),
    epoch bigint NOT NULL CHECK (epoch BETWEEN 0 AND fence),
    seq bigint NOT NULL CHECK (seq >= 0),
    value text COLLATE "C" CHECK ((value IS NULL) = (epoch = 0))
)
"""
SINK_ROW = "SELECT * FROM sink WHERE resource = %s"
LOCK_SINK = "SELECT * FROM sink WHERE resource = %s FOR UPDATE"
SINK_PAGE = "SELECT * FROM sink WHERE resource > %s ORDER BY resource LIMIT 100"
FIRST_SINK = """
INSERT INTO sink (resource, fence, epoch, seq, value) VALUES (%s, %s, %s, %s, %s)
ON CONFLICT (resource) DO NOTHING
"""
STORE = "UPDATE sink SET fence = %s, epoch = %s, seq = %s, value = %s WHERE resource = %s"
RAISE_FENCE = "UPDATE sink SET fence = %s WHERE resource = %s"

ENDED = "a block cannot end its own transaction"


class _Connection(psycopg.Connection[TupleRow]):
    """A connection that refuses to end a block's transaction; the SQL for it goes through."""

    ended = False

    def commit(self) -> None:
        self.ended = True  # so that nothing of the block is kept, also when it catches the error
        raise psycopg.ProgrammingError(ENDED)

    rollback = commit


class _Schema(Generic[_Row]):
    """One connection to one schema: its transactions, its errors, its way back after a loss."""

    _type: type[_Row]
    _table: str
    _create: str
    _first: str
    _lock: str
    _one: str
    _page: str

    def __init__(self, database: str, *, timeout: float = 5.0) -> None:
        _check_timeout(timeout)
        _check_name("database", database)
        if len(database.encode()) > 63:  # the server would cut it off there
            raise ValueError(f"database must be a schema's name, at most 63 bytes: {database!r}")
        # The server's largest lock_timeout is 2**31 - 1 ms, and 0 would be no limit at all.
        milliseconds = max(1, math.ceil(min(timeout, 2_147_483) * 1000))
        self._database = database
        self._schema = sql.Identifier(database)
        self._settings = sql.SQL(SETTINGS).format(self._schema, sql.Literal(milliseconds))
        self._seconds = max(2, math.ceil(milliseconds / 1000))  # libpq's least connect_timeout
        self._process, self._thread = os.getpid(), threading.get_ident()
        self._closed = self._inside = False
        self._connect()
        try:
            self._transact(self._open)
        except BaseException as error:
            self.close()
            if isinstance(error, psycopg.Error):
                raise _located(error, f"schema {database!r}, ") from None
            raise

    def _connect(self) -> None:
        self._connection = _connect(self._seconds)
        # Ours alone: what a block does to the connection's row_factory or adapters is not seen.
        self._cursor = self._connection.cursor()

    def _open(self) -> None:
        if not self._columns():
            self._execute(OPENING)
            # By its full name: in a schema that is missing it would be a temporary table.
            self._execute(sql.SQL(self._create).format(self._schema))
        if (found := self._columns()) != self._type._fields:
            wrong = f"table {self._table} has the columns {found}, not {self._type._fields}"
            raise psycopg.ProgrammingError(wrong)

    def _columns(self) -> tuple[str, ...]:
        return tuple(name for (name,) in self._execute(COLUMNS, (self._database, self._table)))

    def close(self) -> None:
        """Close the connection; a second time, or in a forked process, do nothing.

        Raises RuntimeError inside a block of this object.
        """
        if os.getpid() == self._process:
            self._refuse_inside()
            self._closed = True
            self._connection.close()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ready(self) -> None:
        """Refuse a call that would slip into another's transaction, or come after the end."""
        self._refuse_elsewhere()
        self._refuse_inside()
        if self._closed:
            raise psycopg.ProgrammingError("cannot operate on a closed object")

    def _refuse_elsewhere(self) -> None:
        if (os.getpid(), threading.get_ident()) != (self._process, self._thread):
            raise RuntimeError("opened in another process or thread; open it anew in this one")

    def _refuse_inside(self) -> None:
        if self._inside:
            raise RuntimeError(f"{self._database} is in use by a block that has not ended")

    def _execute(
        self, query: str | sql.Composed, values: tuple[_Value, ...] = ()
    ) -> psycopg.Cursor[TupleRow]:
        try:
            return self._cursor.execute(query, values or None)
        except psycopg.Error as error:
            if error.diag.severity_nonlocalized in ("FATAL", "PANIC"):
                self._connection.close()  # the server has ended it, and libpq may not know yet
            raise

    def _begin(self, *, lent: bool = False) -> None:
        """Begin a transaction, on a new connection where the last one turns out to be lost."""
        self._roll_back()  # in case an interrupt cut the last call's own rollback short
        try:
            if not self._connection.closed:
                self._start(lent)
                return
        except psycopg.OperationalError:
            if not self._connection.closed:
                raise
        self._connect()
        self._start(lent)

    def _start(self, lent: bool) -> None:
        # Without autocommit psycopg sends the BEGIN itself, again after a block has sent COMMIT,
        # so that what follows there is not committed. Otherwise one trip does for both.
        self._connection.autocommit = not lent
        self._execute(self._settings if lent else sql.SQL(BEGIN) + self._settings)

    def _commit(self) -> None:
        try:
            self._execute(COMMIT)
        except psycopg.Error as error:
            if self._connection.closed:
                raise OutcomeUnknown(f"the reply to COMMIT was lost: {error}") from error
            raise

    def _roll_back(self, *, renew: bool = False) -> None:
        """Leave no transaction open, be it by closing the connection, as `renew` always does."""
        if os.getpid() == self._process:
            with suppress(psycopg.Error):
                psycopg.Connection.rollback(self._connection)
            if renew or self._connection.pgconn.transaction_status != TransactionStatus.IDLE:
                self._connection.close()

    def _transact(self, decide: Callable[[], _Answer]) -> _Answer:
        """Answer with what `decide` reads and writes in one transaction, or change nothing."""
        self._ready()
        try:
            self._begin()
            answer = decide()
            self._commit()
        except BaseException:
            self._roll_back()
            raise
        return answer

    def get(self, resource: str) -> _Row | None:
        """Read a resource's row, or None. What it says may be over before you act on it."""
        _check_name("resource", resource)
        return next(iter(self._read(self._one, resource)), None)

    def rows(self) -> Iterator[_Row]:
        """Read all rows in the order of their resources, a page at a time.

        No lock is held between two rows and other calls may come between, so it is no snapshot.
        """
        page = self._read(self._page, "")
        while page:
            for row in page:
                yield row
                self._ready()
            page = self._read(self._page, page[-1].resource)

    def _read(self, query: str, resource: str) -> list[_Row]:
        self._ready()
        try:
            self._begin()
            return [self._type._make(row) for row in self._execute(query, (resource,))]
        finally:
            self._roll_back()  # there is nothing to commit, and so no outcome to be unsure of

    def _insert_or_lock(self, first: tuple[_Value, ...]) -> _Row | None:
        """Insert a resource's first row and answer None, or answer the row it has, locked.

        The insert waits for a first row that another transaction has not committed yet.
        """
        if self._execute(self._first, first).rowcount == 1:
            return None
        row = self._execute(self._lock, first[:1]).fetchone()
        if row is None:
            raise psycopg.OperationalError(f"the row of {first[0]!r} was deleted meanwhile")
        return self._type._make(row)

    @contextmanager
    def _block(self, admit: Callable[[], None]) -> Iterator[_Connection]:
        """Lend the connection for the caller's own SQL, in a transaction that `admit` begins."""
        self._ready()
        try:
            self._begin(lent=True)
            admit()
            begun = self._execute(TRANSACTION).fetchone()
            self._inside = True
            try:
                yield self._connection
                self._refuse_elsewhere()
                if self._connection.ended or self._execute(TRANSACTION).fetchone() != begun:
                    raise psycopg.ProgrammingError(ENDED)
            except BaseException:
                # The next call gets a new connection: a block that has ended its transaction may
                # have set another isolation_level as well.
                self._roll_back(renew=True)
                raise
            finally:
                self._inside = False
            self._commit()
        except BaseException:
            self._roll_back()
            raise


class LeaseTable(_Schema[LeaseRow]):
    """The authority that says who may work: one row a resource, one epoch a claim.

    `database` is the name of a schema. A lock is waited for up to `timeout` seconds (at least a
    millisecond; a call waits for two locks at most), connecting up to as many, but two at least.
    A server that is stopped without its connection being lost is waited for without a limit. Use
    the object in one thread of one process, and close it, or use it as a context manager.

    Raises TypeError and ValueError for wrong arguments, before anything is sent; RuntimeError in
    another process or thread; psycopg.Error for what the server reports, after which nothing has
    changed; OutcomeUnknown if the reply to COMMIT was lost. After any error no transaction is open
    and the object works on, on a new connection if it must.
    """

    _type, _table, _create, _first = LeaseRow, "lease", CREATE_LEASE, FIRST_LEASE
    _lock, _one, _page = LOCK_LEASE, LEASE_ROW, LEASE_PAGE

    def claim(
        self, resource: str, owner: str, *, now: int, ttl: int, above: int = 0
    ) -> Lease | None:
        """Take the resource until now + ttl ticks, in an epoch of its own, higher than `above`.

        Answers None while a lease runs, also the same owner's, and for ever once a result is
        recorded. Raises OverflowError when the epoch has reached 2**63 - 1.
        """
        _check_name("resource", resource)
        _check_name("owner", owner)
        _check_int("above", above, 0)
        deadline = _deadline(now, ttl)

        def decide() -> Lease | None:
            epoch = above + 1
            row = self._insert_or_lock((resource, owner, min(epoch, LARGEST), deadline))
            if row is not None:
                if row.result is not None or row.deadline > now:
                    return None
                epoch = max(above, row.epoch) + 1
            if epoch > LARGEST:  # a first row is rolled back
                raise OverflowError(f"the epoch of {resource!r} can't be raised any more")
            if row is not None:
                self._execute(GRANT, (owner, epoch, deadline, resource))
            return Lease(resource, owner, epoch, deadline)

        return self._transact(decide)

    def renew(self, lease: Lease, *, now: int, ttl: int) -> Lease | None:
        """Extend a lease to now + ttl ticks, in the same epoch; never shorten it.

        Answers the lease with its deadline, or None once it is over: taken over, expired, released
        or completed.
        """
        held = _held(lease, now)
        deadline = _deadline(now, ttl)

        def decide() -> Lease | None:
            row = self._execute(RENEW, (deadline, *held)).fetchone()
            return None if row is None else lease._replace(deadline=row[0])

        return self._transact(decide)

    def complete(self, lease: Lease, result: str, *, now: int) -> bool:
        """Record the result of a lease that is still held; the first result stands for ever.

        True also for the same result again from the same owner and epoch, at any tick, so that a
        worker that got OutcomeUnknown can ask again. Otherwise False.
        """
        _check_text("result", result)
        held = _held(lease, now)

        def decide() -> bool:
            if self._execute(COMPLETE, (result, *held)).rowcount == 1:
                return True
            # A newer snapshot than the update's, but what is compared here never changes again.
            row = self._execute(LEASE_ROW, (lease.resource,)).fetchone()
            return row is not None and (*row[1:3], row[4]) == (lease.owner, lease.epoch, result)

        return self._transact(decide)

    def release(self, lease: Lease, *, now: int) -> bool:
        """Give a lease back before its deadline; False if it was no longer held.

        The row stays, so that the next epoch is a higher one, with the deadline 0.
        """
        held = _held(lease, now)
        return self._transact(lambda: self._execute(RELEASE, held).rowcount == 1)

    def advance(self, resource: str, epoch: int) -> bool:
        """Raise a resource's epoch and end its lease; False if it is that high or completed.

        What `seal` is to a sink. A resource that was never claimed gets a row that nobody owns.
        """
        _check_name("resource", resource)
        _check_int("epoch", epoch, 1)
        return self._transact(lambda: self._execute(ADVANCE, (resource, epoch)).rowcount == 1)

    def guard(self, lease: Lease, *, now: int) -> _Block:
        """Check the lease and run the block's own SQL in one transaction of this database.

        The lease's row is locked until the block ends: other calls on its resource wait. Raises
        LeaseLost without running the block unless the lease is held at `now`. For the block hold
        the rules of `FencedSink.transaction`.
        """
        held = _held(lease, now)

        def admit() -> None:
            if self._execute(LOCK_HELD, held).fetchone() is None:
                row = self._execute(LEASE_ROW, (lease.resource,)).fetchone()
                raise LeaseLost(lease.resource, lease.epoch, 0 if row is None else row[2])

        return self._block(admit)


class FencedSink(_Schema[SinkRow]):
    """The receiver that says what may still be written: one fence and one value a resource.

    It never reads the lease table, which may be in another database or another engine.
    `database`, `timeout` and the errors are those of `LeaseTable`.
    """

    _type, _table, _create, _first = SinkRow, "sink", CREATE_SINK, FIRST_SINK
    _lock, _one, _page = LOCK_SINK, SINK_ROW, SINK_PAGE

    def write(self, resource: str, epoch: int, value: str, *, seq: int = 0) -> Outcome:
        """Store the value unless a higher epoch has been here, and say what became of it.

        "written": stored, and the fence is now `epoch`. "stale": the epoch is below the fence.
        "replay": the same write is there already, also after an OutcomeUnknown. "conflict": this
        term has written another value at this seq. "passed": a later write of the same term is
        there. Only "written" changes anything.
        """
        _check_name("resource", resource)
        _check_int("epoch", epoch, 1)
        _check_text("value", value)
        _check_int("seq", seq, 0)

        def decide() -> Outcome:
            row = self._insert_or_lock((resource, epoch, epoch, seq, value))
            outcome = _outcome(row, epoch, seq, value)
            if outcome == "written" and row is not None:
                self._execute(STORE, (epoch, epoch, seq, value, resource))
            return outcome

        return self._transact(decide)

    def seal(self, resource: str, epoch: int) -> Outcome:
        """Raise the fence to `epoch` without writing, so that lower epochs are refused from now.

        "sealed": this call raised it. "replay": it stood there already. "stale": it is higher.
        """
        _check_name("resource", resource)
        _check_int("epoch", epoch, 1)

        def decide() -> Outcome:
            fence = self._raise(resource, epoch)
            return "sealed" if epoch > fence else "replay" if epoch == fence else "stale"

        return self._transact(decide)

    def transaction(self, resource: str, epoch: int) -> _Block:
        """Check the fence and run the block's own SQL in one transaction of the sink's database.

        Raises the fence to `epoch`, gives the connection, commits both at the block's end, and
        rolls back both after any exception. Raises Fenced below the fence without running the
        block. The resource's row is locked until the block ends. Names without a schema are looked
        up in the sink's, and `timeout` holds for the block's locks too.

        The connection's commit() and rollback() raise psycopg.ProgrammingError, and nothing of the
        block is kept. SQL for them (COMMIT, ROLLBACK, PREPARE TRANSACTION) can't be refused. It is
        found out at the block's end, which then raises psycopg.ProgrammingError: what the block
        itself has committed stays, the fence protects only what came before the first such
        statement, and what is still open is rolled back. Savepoints are yours to use.

        A statement that failed, also where the block caught its error, fails the block at its end,
        unless it was inside a savepoint. Other calls on this object raise RuntimeError in a block.
        """
        _check_name("resource", resource)
        _check_int("epoch", epoch, 1)

        def admit() -> None:
            fence = self._raise(resource, epoch)
            if epoch < fence:
                raise Fenced(resource, epoch, fence)

        return self._block(admit)

    def _raise(self, resource: str, epoch: int) -> int:
        """Raise the fence to `epoch` if it is lower, lock it, and answer what it was."""
        row = self._insert_or_lock((resource, epoch, 0, 0, None))
        if row is not None and epoch > row.fence:
            self._execute(RAISE_FENCE, (epoch, resource))
        return 0 if row is None else row.fence


@contextmanager
def fresh() -> Iterator[tuple[str, str]]:
    """Yield two empty schemas, for a lease table and for a sink, and drop them afterwards.

    A process that is killed meanwhile leaves them behind: their names begin with leases_.
    """
    locations = (f"leases_{secrets.token_hex(8)}", f"leases_{secrets.token_hex(8)}")
    _run(CREATE_SCHEMAS, locations)
    try:
        yield locations
    finally:
        _run(DROP_SCHEMAS, locations)


def _run(statement: str, names: tuple[str, str]) -> None:
    with closing(_connect(5)) as connection:
        connection.execute(sql.SQL(statement).format(*map(sql.Identifier, names)))
        psycopg.Connection.commit(connection)


def _connect(seconds: int) -> _Connection:
    """Connect as libpq's variables say, within as many seconds, and name what was tried if not."""
    try:
        connection = _Connection.connect(
            # Nothing is prepared, so that nothing of the session is needed beyond a transaction.
            prepare_threshold=None,
            client_encoding="UTF8",
            fallback_application_name="leases",
            connect_timeout=seconds,
            # A host that has vanished is found out, also while a lock is waited for.
            tcp_user_timeout=1000 * min(seconds, 60),
            keepalives_idle=min(seconds, 60),
            keepalives_interval=1,
        )
    except psycopg.Error as error:
        raise _located(error) from None
    connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
    connection.read_only = False
    return connection


def _located(error: psycopg.Error, where: str = "") -> psycopg.Error:
    """Put an error's message in one line that ends in the server that was tried."""
    tried = {
        option.keyword.decode(): (option.val or b"").decode() for option in Conninfo.get_defaults()
    }
    host = tried["host"] or tried["hostaddr"] or "local socket"
    server = f"host {host}, port {tried['port']}, database {tried['dbname'] or tried['user']}"
    error.args = (f"{' '.join(str(error).split())} ({where}{server})",)
    return error
