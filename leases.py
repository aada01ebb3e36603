"""Lease a resource to one worker at a time, and fence off the workers whose lease is over.

A lease table alone does not protect the document that the work ends in:

    tick  A                          B                          lease table   document
      0   claim: epoch 1, until 10                              A, epoch 1
     10   (paused)                   claim: epoch 2, until 20   B, epoch 2
     10   (paused)                   write "new", complete      done: new     new
     11   write "old"                                           done: new     old, if nobody checks

A's write has to be refused by whoever receives it, so the receiver keeps the highest epoch it has
seen, its fence, and compares and writes in one transaction:

    >>> leases, sink = LeaseTable(":memory:"), FencedSink(":memory:")
    >>> a = leases.claim("report", "A", now=0, ttl=10)
    >>> b = leases.claim("report", "B", now=10, ttl=10)
    >>> sink.write("report", b.epoch, "new"), leases.complete(b, "new", now=10)
    ('written', True)
    >>> sink.write("report", a.epoch, "old"), leases.complete(a, "old", now=11)
    ('stale', False)

Assumed: workers send the epoch of their lease with each write; one lease table decides about a
resource; SQLite's locks work where the files lie (not on most network file systems).

Not promised: that only one worker runs at any moment; that a write comes before its deadline;
that a fence knows of a takeover before the new holder's first write (`take_over` makes it known);
that an epoch is genuine (it is a number, no password); that a database put back to an older state
remembers (`reconcile` is for that).

A lock excludes as long as its holder lives, and a holder that is paused stops everyone. A lease
ends at its deadline whatever its holder does, so two workers can believe in it at once, and what
protects the data is the epoch that rises with each claim, not the lease. It is also called a
fencing token, a generation, a term or a ballot.

Ticks are ints in a unit of your choice, milliseconds for instance, and always come from you: no
answer depends on a clock. `timeout` is in seconds. See https://sqlite.org/lang_transaction.html.
"""

from __future__ import annotations

import os
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Final, Literal, NamedTuple, TypeVar

__all__ = [
    "Fenced",
    "FencedSink",
    "Finding",
    "Lease",
    "LeaseLost",
    "LeaseRow",
    "LeaseTable",
    "LeasesError",
    "Outcome",
    "OutcomeUnknown",
    "SinkRow",
    "reconcile",
    "take_over",
]

_Answer = TypeVar("_Answer")
_Self = TypeVar("_Self", bound="_Database")

ISOLATION: Final = "IMMEDIATE"
LARGEST = 2**63 - 1  # SQLite's largest integer; one more would be stored as a REAL

BEGIN = "BEGIN IMMEDIATE"  # a plain BEGIN takes the write lock only after the row has been read
COMMIT = "COMMIT"
# WAL lets readers go on beside a writer. EXTRA also syncs the folder after the journal has been
# unlinked, where a rollback journal is used (https://sqlite.org/pragma.html#pragma_synchronous).
DURABLE = "PRAGMA synchronous = EXTRA"
WRITE_AHEAD = "PRAGMA journal_mode = WAL"
COLUMNS = "SELECT name FROM pragma_table_info(?) ORDER BY cid"

CREATE_LEASE = """
CREATE TABLE IF NOT EXISTS lease (
    resource TEXT NOT NULL PRIMARY KEY,
    owner TEXT NOT NULL,
    epoch INTEGER NOT NULL CHECK (typeof(epoch) = 'integer' AND epoch >= 1),
    deadline INTEGER NOT NULL CHECK (typeof(deadline) = 'integer' AND deadline >= 0),
    result TEXT
) WITHOUT ROWID
"""
LEASE_ROW = "SELECT resource, owner, epoch, deadline, result FROM lease WHERE resource = ?"
LEASE_PAGE = """
SELECT resource, owner, epoch, deadline, result FROM lease
WHERE resource > ? ORDER BY resource LIMIT 100
"""
NEVER_CLAIMED = ("", "", 0, 0, None)  # in place of a row that is not there
GRANT = """
INSERT INTO lease (resource, owner, epoch, deadline) VALUES (?, ?, ?, ?)
ON CONFLICT (resource) DO UPDATE
SET owner = excluded.owner, epoch = excluded.epoch, deadline = excluded.deadline
"""
# Who may still act on a lease, for every call that asks: its owner, in its epoch, before its
# deadline, as long as no result is recorded.
HELD = """
WHERE resource = ? AND owner = ? AND epoch = ? AND deadline > ? AND result IS NULL
"""
RENEW = "UPDATE lease SET deadline = max(deadline, ?)" + HELD
COMPLETE = "UPDATE lease SET result = ?" + HELD
RELEASE = "UPDATE lease SET deadline = 0" + HELD
IS_HELD = "SELECT 1 FROM lease" + HELD
ADVANCE = """
INSERT INTO lease (resource, owner, epoch, deadline) VALUES (?, '', ?, 0)
ON CONFLICT (resource) DO UPDATE SET epoch = excluded.epoch, deadline = 0
WHERE lease.epoch < excluded.epoch AND lease.result IS NULL
"""

CREATE_SINK = """
CREATE TABLE IF NOT EXISTS sink (
    resource TEXT NOT NULL PRIMARY KEY,
    fence INTEGER NOT NULL CHECK (typeof(fence) = 'integer' AND fence >= 1),
    epoch INTEGER NOT NULL CHECK (typeof(epoch) = 'integer' AND epoch BETWEEN 0 AND fence),
    seq INTEGER NOT NULL CHECK (typeof(seq) = 'integer' AND seq >= 0),
    value TEXT CHECK ((value IS NULL) = (epoch = 0))
)
"""
SINK_ROW = "SELECT resource, fence, epoch, seq, value FROM sink WHERE resource = ?"
SINK_PAGE = """
SELECT resource, fence, epoch, seq, value FROM sink
WHERE resource > ? ORDER BY resource LIMIT 100
"""
NEVER_FENCED = ("", 0, 0, 0, None)
STORE = """
INSERT INTO sink (resource, fence, epoch, seq, value) VALUES (?, ?, ?, ?, ?)
ON CONFLICT (resource) DO UPDATE
SET fence = excluded.fence, epoch = excluded.epoch, seq = excluded.seq, value = excluded.value
"""
RAISE_FENCE = """
INSERT INTO sink (resource, fence, epoch, seq) VALUES (?, ?, 0, 0)
ON CONFLICT (resource) DO UPDATE SET fence = excluded.fence
"""


class LeasesError(Exception):
    """The base of this module's own errors."""


class LeaseLost(LeasesError):
    """A block was not run, since its lease is not held any more.

    `resource`, `epoch` (the lease's) and `current` (the table's, 0 for no row) are attributes.
    """

    def __init__(self, resource: str, epoch: int, current: int) -> None:
        super().__init__(resource, epoch, current)
        self.resource, self.epoch, self.current = resource, epoch, current

    def __str__(self) -> str:
        return f"{self.resource!r}: epoch {self.epoch} is not held; the current is {self.current}"


class Fenced(LeasesError):
    """A block was not run, since its epoch is below the sink's fence.

    `resource`, `epoch` (the one offered) and `fence` are attributes.
    """

    def __init__(self, resource: str, epoch: int, fence: int) -> None:
        super().__init__(resource, epoch, fence)
        self.resource, self.epoch, self.fence = resource, epoch, fence

    def __str__(self) -> str:
        return f"{self.resource!r}: epoch {self.epoch} is below the fence, {self.fence}"


class OutcomeUnknown(LeasesError):
    """The reply to a call was lost: it has taken effect, or it has not, or it still may.

    A store over a network raises it; SQLite never does. After any other error nothing has changed.
    """


Outcome = Literal["written", "replay", "conflict", "passed", "stale", "sealed"]


class Lease(NamedTuple):
    """What a claim or a renewal hands out: `owner` may work in `epoch` while now < `deadline`."""

    resource: str
    owner: str
    epoch: int
    deadline: int


class LeaseRow(NamedTuple):
    """A row of the lease table; `result` is None until the work is completed."""

    resource: str
    owner: str
    epoch: int
    deadline: int
    result: str | None


class SinkRow(NamedTuple):
    """A row of the sink: `epoch` and `seq` are the stored value's, 0 and 0 while it is None."""

    resource: str
    fence: int
    epoch: int
    seq: int
    value: str | None


class Finding(NamedTuple):
    """What `reconcile` found behind: `what` is "lease", "fence", "value" or "exhausted"."""

    resource: str
    what: str
    found: int
    expected: int


# How many forks lie between this process and the first. Every call looks at it, and os.getpid
# would take 2 to 3 % of one on a RAM disk. On Windows nothing forks.
_forks = 0


def _count_fork() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)


class _Database:
    """One connection to one SQLite file: its transactions, its waiting, its errors."""

    _table: str
    _create: str
    _columns: tuple[str, ...]

    def __init__(self, database: str | os.PathLike[str], *, timeout: float = 5.0) -> None:
        _check_timeout(timeout)
        self._timeout = min(timeout, LARGEST)
        self._wait_until = 0.0  # 0.0 while the current call has not had to wait
        self._inside = False
        self._forks = _forks
        self._path = _location(database)
        try:
            # No busy handler: _execute waits. An isolation level, so that what a block runs after
            # SQLite has ended the transaction makes Python send a BEGIN, which is refused there.
            self._connection = sqlite3.connect(self._path, timeout=0, isolation_level=ISOLATION)
        except sqlite3.Error as error:
            raise self._located(error) from None
        try:
            self._execute(DURABLE)
            self._execute(WRITE_AHEAD).fetchall()
            if not self._execute(COLUMNS, (self._table,)).fetchall():
                self._transact(lambda: self._execute(self._create))
            found = tuple(name for (name,) in self._execute(COLUMNS, (self._table,)))
            if found != self._columns:
                wrong = f"table {self._table} has the columns {found}, not {self._columns}"
                raise self._located(sqlite3.OperationalError(wrong))
        except BaseException:
            self._connection.close()
            raise

    def close(self) -> None:
        """Close the connection; a second time, or in a forked process, do nothing.

        Raises RuntimeError inside a block of this object.
        """
        if self._forks == _forks:
            self._refuse_inside()
            self._connection.close()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ready(self) -> None:
        """Refuse a call that would damage the file or slip into a block's transaction."""
        if self._forks != _forks or self._inside or self._connection.in_transaction:
            self._refuse_fork()
            self._refuse_inside()
            self._roll_back()  # an interrupt cut the last call's rollback short
        self._wait_until = 0.0

    def _refuse_fork(self) -> None:
        if self._forks != _forks:  # https://sqlite.org/howtocorrupt.html, section 2.6
            raise RuntimeError(f"{self._path} was opened before a fork; open it anew after it")

    def _refuse_inside(self) -> None:
        if self._inside:
            raise RuntimeError(f"{self._path} is in use by a block that has not ended")

    def _execute(self, sql: str, values: tuple[str | int, ...] = ()) -> sqlite3.Cursor:
        """Run one statement, waiting for a busy database up to `timeout` seconds in all a call."""
        tries = 0
        while True:
            try:
                return self._connection.execute(sql, values)
            except sqlite3.Error as error:
                now = time.monotonic()
                self._wait_until = self._wait_until or now + self._timeout
                if str(error) != "database is locked" or now >= self._wait_until:
                    raise self._located(error) from None
            # SQLite's own busy handler sleeps longer with each try, so that newcomers overtake
            # and an old waiter can starve. Here the bound shrinks, and the oldest tries most often.
            tries += 1
            time.sleep(max(0.02 / tries**2, 0.0002) * os.urandom(1)[0] / 255)

    def _located(self, error: sqlite3.Error) -> sqlite3.Error:
        """Add the database's path to an error's message."""
        error.args = (f"{error} (database: {self._path})",)
        return error

    def _transact(self, decide: Callable[[], _Answer]) -> _Answer:
        """Answer with what `decide` reads and writes in one transaction, or change nothing."""
        self._ready()
        try:
            self._execute(BEGIN)
            answer = decide()
            self._execute(COMMIT)
        except BaseException:
            self._roll_back()
            raise
        return answer

    def _roll_back(self) -> None:
        if self._connection.in_transaction and self._forks == _forks:
            self._connection.rollback()

    def _pages(self, sql: str) -> Iterator[tuple[str | int | None, ...]]:
        self._ready()
        page = self._execute(sql, ("",)).fetchall()
        while page:
            for row in page:
                yield row
                self._ready()
            page = self._execute(sql, page[-1][:1]).fetchall()

    @contextmanager
    def _block(self, admit: Callable[[], None]) -> Iterator[sqlite3.Connection]:
        """Lend the connection for the caller's own SQL, in a transaction that `admit` begins."""
        self._ready()
        connection = self._connection
        ending: list[int] = []

        def authorize(action: int, *_: object) -> int:
            """Let the block do anything but end its transaction."""
            # Once no transaction is open, SQLite has rolled back, and what follows would be
            # committed without the fence. https://sqlite.org/c3ref/set_authorizer.html
            if action in (sqlite3.SQLITE_TRANSACTION, sqlite3.SQLITE_SAVEPOINT):
                ending.append(action)
            elif connection.in_transaction:
                return sqlite3.SQLITE_OK
            return sqlite3.SQLITE_DENY

        try:
            self._execute(BEGIN)
            admit()
            self._inside = True
            try:
                connection.set_authorizer(authorize)
                yield connection
            finally:
                self._inside = False
                self._refuse_fork()
                kept = _take_back(connection)
            if ending or not kept:
                wrong = "a block cannot end its own transaction; nothing of it was kept"
                raise self._located(sqlite3.ProgrammingError(wrong))
            self._wait_until = 0.0
            self._execute(COMMIT)
        except BaseException:
            self._roll_back()
            raise


class LeaseTable(_Database):
    """The authority that says who may work: one row a resource, one epoch a claim.

    `database` is a path, or ":memory:" for one that is private to the object. A busy database is
    waited for up to `timeout` seconds. Use the object in one thread of one process, and close it,
    or use it as a context manager.

    Raises TypeError and ValueError for wrong arguments, before anything is written; RuntimeError
    in a forked process; sqlite3.Error, with the path in its message, for what SQLite reports.
    After any error nothing has changed and the object works on.
    """

    _table, _create, _columns = "lease", CREATE_LEASE, LeaseRow._fields

    def claim(
        self, resource: str, owner: str, *, now: int, ttl: int, above: int = 0
    ) -> Lease | None:
        """Take the resource until now + ttl ticks, in an epoch of its own, higher than `above`.

        Answers None while a lease runs, also the same owner's (a name is no identity: to extend
        is `renew`), and for ever once a result is recorded; so name one run of a job, not the job.

        Raises OverflowError when the epoch has reached 2**63 - 1.
        """
        _check_name("resource", resource)
        _check_name("owner", owner)
        _check_int("above", above, 0)
        until = _deadline(now, ttl)

        def decide() -> Lease | None:
            """Grant a free resource, in a higher epoch."""
            row = self._execute(LEASE_ROW, (resource,)).fetchone()
            _, _, epoch, deadline, result = row or NEVER_CLAIMED
            if result is not None or deadline > now:
                return None
            lease = Lease(resource, owner, max(above, epoch) + 1, until)
            if lease.epoch > LARGEST:
                raise OverflowError(f"the epoch of {resource!r} can't be raised any more")
            self._execute(GRANT, lease)
            return lease

        return self._transact(decide)

    def renew(self, lease: Lease, *, now: int, ttl: int) -> Lease | None:
        """Extend a lease to now + ttl ticks, in the same epoch; never shorten it.

        Answers the lease with its deadline, or None once it is over: taken over, expired (at its
        deadline it is, whoever asks first), released or completed.
        """
        held = _held(lease, now)
        deadline = _deadline(now, ttl)

        def decide() -> Lease | None:
            """Move the deadline of a lease that is held."""
            if self._execute(RENEW, (deadline, *held)).rowcount == 0:
                return None
            row = self._execute(LEASE_ROW, (lease.resource,)).fetchone()
            return Lease(*row[:4])

        return self._transact(decide)

    def complete(self, lease: Lease, result: str, *, now: int) -> bool:
        """Record the result of a lease that is still held; the first result stands for ever.

        True also for the same result again from the same owner and epoch, at any tick: the record
        stands, and a worker that lost the first answer can ask again. Otherwise False.
        """
        _check_text("result", result)
        held = _held(lease, now)

        def decide() -> bool:
            """Record the result, or find it recorded."""
            if self._execute(COMPLETE, (result, *held)).rowcount == 1:
                return True
            row = self._row(lease.resource)
            recorded = row is not None and (row.owner, row.epoch, row.result)
            return recorded == (lease.owner, lease.epoch, result)

        return self._transact(decide)

    def release(self, lease: Lease, *, now: int) -> bool:
        """Give a lease back before its deadline; False if it was no longer held.

        The row stays, so that the next epoch is a higher one. Its deadline becomes 0 rather than
        `now`: a tick read earlier can't revive it, and a claimant whose clock is behind can claim.
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

    def guard(self, lease: Lease, *, now: int) -> AbstractContextManager[sqlite3.Connection]:
        """Check the lease and run the block's own SQL in one transaction of this database.

        For data that lives beside the lease table: no fence is needed where the table itself is
        asked in the write's own transaction. Raises LeaseLost without running the block unless
        the lease is held at `now`. For the block hold the rules of `FencedSink.transaction`.
        """
        held = _held(lease, now)

        def admit() -> None:
            """Let the block run while the lease is held."""
            if self._execute(IS_HELD, held).fetchone() is None:
                row = self._row(lease.resource)
                raise LeaseLost(lease.resource, lease.epoch, row.epoch if row is not None else 0)

        return self._block(admit)

    def get(self, resource: str) -> LeaseRow | None:
        """Read a resource's row, or None. What it says may be over before you act on it."""
        _check_name("resource", resource)
        self._ready()
        return self._row(resource)

    def rows(self) -> Iterator[LeaseRow]:
        """Read all rows in the order of their resources, a page at a time.

        No lock is held between two rows and other calls may come between, so it is no snapshot.
        """
        return map(LeaseRow._make, self._pages(LEASE_PAGE))

    def _row(self, resource: str) -> LeaseRow | None:
        row = self._execute(LEASE_ROW, (resource,)).fetchone()
        return None if row is None else LeaseRow._make(row)


class FencedSink(_Database):
    """The receiver that says what may still be written: one fence and one value a resource.

    It never reads the lease table and works in a file of its own; epochs are all it goes by.
    `database`, `timeout` and the errors are those of `LeaseTable`.
    """

    _table, _create, _columns = "sink", CREATE_SINK, SinkRow._fields

    def write(self, resource: str, epoch: int, value: str, *, seq: int = 0) -> Outcome:
        """Store the value unless a higher epoch has been here, and say what became of it.

        `seq` orders the writes of one term, from 0; left at 0, a term writes one value.

        "written": stored, and the fence is now `epoch`. "stale": the epoch is below the fence,
        the lease behind it is lost. "replay": the same write is there already. "conflict": this
        term has written another value at this seq. "passed": a later write of the same term is
        there, and the lease is as good as before. Only "written" changes anything.
        """
        _check_name("resource", resource)
        _check_int("epoch", epoch, 1)
        _check_text("value", value)
        _check_int("seq", seq, 0)

        def decide() -> Outcome:
            """Store what is accepted."""
            outcome = _outcome(self._row(resource), epoch, seq, value)
            if outcome == "written":
                self._execute(STORE, (resource, epoch, epoch, seq, value))
            return outcome

        return self._transact(decide)

    def seal(self, resource: str, epoch: int) -> Outcome:
        """Raise the fence to `epoch` without writing, so that lower epochs are refused from now.

        "sealed": this call raised it. "replay": it stood there already. "stale": it is higher.
        The value stays as it is, and the new term can still write at seq 0: it has written nothing.
        """
        _check_name("resource", resource)
        _check_int("epoch", epoch, 1)

        def decide() -> Outcome:
            """Raise a fence that is lower."""
            fence = self._fence(resource)
            if epoch > fence:
                self._execute(RAISE_FENCE, (resource, epoch))
                return "sealed"
            return "replay" if epoch == fence else "stale"

        return self._transact(decide)

    def transaction(self, resource: str, epoch: int) -> AbstractContextManager[sqlite3.Connection]:
        """Check the fence and run the block's own SQL in one transaction of the sink's database.

        Raises the fence to `epoch`, gives the connection, commits both at the block's end, and
        rolls back both after any exception. Raises Fenced below the fence without running the
        block. All blocks of one term are admitted: their order and their retries are yours.

        The block can't end its transaction: commit(), rollback(), executescript(), BEGIN, COMMIT,
        ROLLBACK, SAVEPOINT and RELEASE raise sqlite3.DatabaseError, and the block is rolled back
        at its end with sqlite3.ProgrammingError, as it is if it changes isolation_level or
        autocommit or if SQLite has ended the transaction (OR ROLLBACK, RAISE(ROLLBACK)). Other
        calls on this object raise RuntimeError inside it; row_factory and text_factory are reset.

        Two things are yours. After SQLite's own rollback, a statement that the block had run
        before and that doesn't begin with INSERT, UPDATE, DELETE or REPLACE (WITH … INSERT) may
        run again, outside the fence. A cursor left half read keeps its snapshot, and later calls
        of this object find the database busy: read to the end, or close the cursor.
        """
        _check_name("resource", resource)
        _check_int("epoch", epoch, 1)

        def admit() -> None:
            """Let the block run unless the fence is higher, and raise a lower one."""
            fence = self._fence(resource)
            if epoch < fence:
                raise Fenced(resource, epoch, fence)
            if epoch > fence:
                self._execute(RAISE_FENCE, (resource, epoch))

        return self._block(admit)

    def get(self, resource: str) -> SinkRow | None:
        """Read a resource's row, or None."""
        _check_name("resource", resource)
        self._ready()
        return self._row(resource)

    def rows(self) -> Iterator[SinkRow]:
        """Read all rows in the order of their resources; like `LeaseTable.rows`, no snapshot."""
        return map(SinkRow._make, self._pages(SINK_PAGE))

    def _row(self, resource: str) -> SinkRow | None:
        row = self._execute(SINK_ROW, (resource,)).fetchone()
        return None if row is None else SinkRow._make(row)

    def _fence(self, resource: str) -> int:
        _, fence, *_ = self._execute(SINK_ROW, (resource,)).fetchone() or NEVER_FENCED
        return fence


def take_over(
    leases: LeaseTable, sink: FencedSink, resource: str, owner: str, *, now: int, ttl: int
) -> Lease | None:
    """Claim a resource and seal its sink, so that from its return on no older write is accepted.

    None if the claim was refused, or if somebody else got in between. Once epoch n has been
    returned, no write below n is ever accepted by that sink, and nobody else is ever handed n, as
    long as one lease table decides and no database is put back (see `reconcile`).

    An error of the sealing goes on after the lease was given back; if that fails too, the lease
    ends at its deadline. Raises OverflowError when the last epoch there is has been used.
    """
    row = sink.get(resource)
    lease = leases.claim(resource, owner, now=now, ttl=ttl, above=0 if row is None else row.fence)
    if lease is None:
        return None
    try:
        outcome = sink.seal(resource, lease.epoch)
    except BaseException:
        with suppress(Exception):
            leases.release(lease, now=now)
        raise
    if outcome == "stale":  # somebody newer was faster
        leases.release(lease, now=now)
    # "replay": the epoch is somebody else's too, handed out by an older state of the lease table
    # or by a second one. Nothing is given back then, since what stands there might be theirs.
    return lease if outcome == "sealed" else None


def reconcile(leases: LeaseTable, sink: FencedSink, *, margin: int = 1000) -> list[Finding]:
    """Put lease table and sink right after either was, or both were, restored from a backup.

    Run it before workers are let in. Where no result is recorded, the epochs of both are raised
    to `margin` above the higher one: every lease handed out before is over, and epochs that the
    restore has lost stay below. Where one is, the fence is raised to its epoch.

    Answers what was behind the other, ordered by resource: "lease" or "fence", with the epoch
    found (0 for no row) and the one it has now; "value" where a result is recorded but the sink
    holds no value of its epoch (found: the value's, 0 for none), for a person to look at; and
    "exhausted" where the margin does not fit below 2**63, which is left as it is.

    It can't know a resource that is on record on neither side, nor that more than `margin` epochs
    of one resource were lost, the margins of earlier calls among them. So make a new backup after
    it, and put an older one back only with a margin larger than all before together. Put a file
    back by SQLite's backup call, or while nobody has it open and without its -wal and -shm files.
    """
    _check_int("margin", margin, 1)
    leased = {row.resource: (row.epoch, row.result is not None) for row in leases.rows()}
    fenced = {row.resource: (row.fence, row.epoch) for row in sink.rows()}
    findings = []
    for resource in sorted({*leased, *fenced}):
        epoch, completed = leased.get(resource, (0, False))
        fence, written = fenced.get(resource, (0, 0))
        target = epoch if completed else max(epoch, fence) + margin
        if target > LARGEST:
            findings.append(Finding(resource, "exhausted", max(epoch, fence), LARGEST))
            continue
        leases.advance(resource, target)
        sink.seal(resource, target)
        if epoch < fence and not completed:
            findings.append(Finding(resource, "lease", epoch, target))
        if fence < epoch:
            findings.append(Finding(resource, "fence", fence, target))
        if completed and written != epoch:
            findings.append(Finding(resource, "value", written, epoch))
    return findings


def _outcome(row: SinkRow | None, epoch: int, seq: int, value: str) -> Outcome:
    """Judge an offer against the sink's row: the one place where a write is decided."""
    if row is None or epoch > row.fence:
        return "written"
    if epoch < row.fence:
        return "stale"
    if row.epoch < epoch or row.seq < seq:  # this term was only sealed, or its write is newer
        return "written"
    if row.seq > seq:
        return "passed"
    return "replay" if value == row.value else "conflict"


def _held(lease: Lease, now: int) -> tuple[str, str, int, int]:
    """Check a lease and a tick, and give the values that HELD compares."""
    if not isinstance(lease, Lease):
        raise TypeError(f"lease must be a Lease, not {type(lease).__name__}")
    resource, owner, epoch, deadline = lease
    _check_name("lease.resource", resource)
    _check_name("lease.owner", owner)
    _check_int("lease.epoch", epoch, 1)
    _check_int("lease.deadline", deadline, 0)
    _check_int("now", now, 0)
    return resource, owner, epoch, now


def _deadline(now: int, ttl: int) -> int:
    _check_int("now", now, 0)
    _check_int("ttl", ttl, 1)
    deadline = now + ttl
    if deadline > LARGEST:
        raise ValueError(f"now + ttl must be at most 2**63 - 1, not {deadline}")
    return deadline


def _check_int(argument: str, number: int, least: int) -> None:
    if type(number) is not int:  # isinstance would let True through
        raise TypeError(f"{argument} must be an int, not {type(number).__name__}")
    if not least <= number <= LARGEST:
        raise ValueError(f"{argument} must be from {least} to 2**63 - 1, not {number}")


def _check_timeout(timeout: float) -> None:
    if type(timeout) not in (int, float):
        raise TypeError(f"timeout must be an int or a float, not {type(timeout).__name__}")
    if not 0 <= timeout < float("inf"):
        raise ValueError(f"timeout must be finite and not negative, not {timeout}")


def _check_name(argument: str, name: str) -> None:
    _check_text(argument, name)
    if not name:
        raise ValueError(f"{argument} must not be empty")


def _check_text(argument: str, text: str) -> None:
    if not isinstance(text, str):
        raise TypeError(f"{argument} must be a str, not {type(text).__name__}")
    if "\0" in text:
        raise ValueError(f"{argument} must not contain U+0000: {text!r}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{argument} must encode to UTF-8: {error}") from None


def _location(database: str | os.PathLike[str]) -> str:
    """Make a path absolute, so that a later chdir changes nothing and no name is a URI."""
    path = os.fspath(database)
    if not isinstance(path, str):
        raise TypeError(f"database must be a str or a path of str, not {type(path).__name__}")
    if not path:
        raise ValueError("database must not be empty")
    return path if database == ":memory:" else os.path.abspath(path)


def _take_back(connection: sqlite3.Connection) -> bool:
    """Reset what a block may have changed; False if the transaction did not survive the block."""
    # Not None: on Python 3.10 that denies everything from then on.
    connection.set_authorizer(lambda *_: sqlite3.SQLITE_OK)
    kept = connection.in_transaction and connection.isolation_level == ISOLATION
    connection.isolation_level = ISOLATION
    if sys.version_info >= (3, 12):
        kept = kept and connection.autocommit == sqlite3.LEGACY_TRANSACTION_CONTROL
        connection.autocommit = sqlite3.LEGACY_TRANSACTION_CONTROL
    connection.row_factory, connection.text_factory = None, str
    return kept
