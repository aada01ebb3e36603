# /// script
# requires-python = ">=3.10"
# dependencies = []
# ///
"""Keep leases and fences in etcd v3: leases.py's two classes, past one machine.

Start a server, name it, and run the experiment or a worker of your own on it:

    etcd &                                               # or a cluster; Debian: etcd-server
    export ETCDCTL_ENDPOINTS=127.0.0.1:2379              # that one is the default; or a,b,c
    python3 run_experiment.py --store examples/etcd_leases.py --check results.json

It speaks to the JSON gateway (/v3, etcd 3.4 or newer) with the standard library; no TLS, no login.
A location is any name: the rows are the keys that begin with it, one JSON object each.

Each call is one linearizable read and one transaction that writes the row if its mod_revision is
still the one that was read; if not, the call begins anew. A refusal writes nothing. Both classes
have no connection to hand out, so neither `guard` nor `transaction`.

What became of a write whose answer is lost? Each call writes a random id of its own.
- Nothing listened, or the time was up before it was sent: EtcdError, nothing has changed.
- It was refused outright (not allowed, too large): EtcdError, nothing has changed.
- No answer, half of one, or one that settles nothing ("request timed out", "leader changed"): the
  row is read again. Our id: it took effect. Unchanged: the request may still be on its way through
  another member, so it is sent again, same id, same comparison; of all of them one at most can take
  effect. Changed by another, maybe after us: OutcomeUnknown. Time up: OutcomeUnknown, and it may
  still take effect.
- "Too many requests" or "database space exceeded" (etcd also says that of the very write that it
  has just applied): likewise, but if the row is unchanged it is over, EtcdError.
Asking again after it is safe where the contract says so: `write` then answers "replay".

etcd's own leases are no fence. They delete a key some time after a client has gone silent, by the
server's clock; the client that was only paused goes on, and nobody checks what it then writes. The
`concurrency` package's locks and elections are built on them and checked in the client; etcd's
own pages say that whoever is written to must compare a revision. The epoch here is kept in a row
that is never deleted, and compared there, by the sink, which may be another database.
https://etcd.io/docs/v3.5/learning/why/#notes-on-the-usage-of-lock-and-lease

What was answered is on the disks of a majority. It can still be lost by a restored snapshot, and
by members that lost their disks and were started anew under their old names: a majority of those
forgets. Run `reconcile` before workers are let in again.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

try:
    import leases
except ImportError:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    import leases

from leases import LARGEST, Lease, LeaseRow, Outcome, OutcomeUnknown, SinkRow

__all__ = ["EtcdError", "FencedSink", "LeaseTable", "fresh"]

_Answer = TypeVar("_Answer")
_Row = TypeVar("_Row", LeaseRow, SinkRow)
_Self = TypeVar("_Self", bound="_Client")

SHORTEST, LONGEST = 0.5, 86400.0  # seconds; a network needs some, and a socket takes no more
PAUSE = 0.02  # seconds between two rounds over all endpoints
PAGE = 100  # rows
# gRPC's codes of an answer by which nothing was done: INVALID_ARGUMENT, PERMISSION_DENIED,
# UNIMPLEMENTED, UNAUTHENTICATED. https://grpc.io/docs/guides/status-codes/
REFUSED = (3, 7, 12, 16)
# RESOURCE_EXHAUSTED settles it by the next read: etcd applies the write that exceeds the quota,
# and then answers "database space exceeded" all the same.
EXHAUSTED = 8


class EtcdError(OSError):
    """No endpoint has answered in time, or etcd has refused the call: nothing has changed."""


class _Doubt(Exception):
    """A request was sent, and nobody has said what became of it; over, if it was `answered`."""

    def __init__(self, answered: bool) -> None:
        super().__init__(answered)
        self.answered = answered


class _Socket(socket.socket):
    """A socket whose reads end by a point in time, also if the bytes come one by one."""

    by = 0.0

    def recv_into(self, *args: Any, **options: Any) -> int:
        self.settimeout(_left(self.by))
        return super().recv_into(*args, **options)


class _Client:
    """One kept-alive connection to one endpoint after the other: its waiting, its errors."""

    def __init__(self, database: str, *, timeout: float = 5.0) -> None:
        leases._check_timeout(timeout)
        leases._check_name("database", database)
        self._database = database
        self._timeout = min(max(timeout, SHORTEST), LONGEST)
        self._endpoints = _endpoints()
        self._tried = ", ".join(f"{host}:{port}" for host, port in self._endpoints)
        self._at = 0  # the endpoint in use
        self._why = ""  # the last failure of any
        self._http = HTTPConnection(*self._endpoints[0])
        self._closed = False
        self._process, self._thread = os.getpid(), threading.get_ident()

    def close(self) -> None:
        """Close the connection; a second time, or in a forked process, do nothing."""
        if os.getpid() == self._process:
            self._closed = True
            self._http.close()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ready(self) -> float:
        """Refuse a call that would mix two callers' answers; give the time at which it is over."""
        if (os.getpid(), threading.get_ident()) != (self._process, self._thread):
            raise RuntimeError(f"{self._database!r} was opened in another process or thread")
        if self._closed:
            raise RuntimeError(f"{self._database!r} is closed")
        self._why = ""
        return time.monotonic() + self._timeout

    def _ask(self, call: str, body: object, until: float, *, once: bool = False) -> dict[str, Any]:
        """Post to one endpoint after the other until one answers.

        With `once`, raises _Doubt as soon as a request may have arrived that was not answered.
        Raises EtcdError after a plain refusal, and when the time is up before this request was
        sent.
        """
        text = json.dumps(body).encode()
        while True:
            now = time.monotonic()
            # Time for every endpoint, and for coming back to the first.
            by = min(until, now + self._timeout / (len(self._endpoints) + 1))
            if by <= now:
                wrong = f"no answer within {self._timeout} s from {self._tried}"
                raise EtcdError(f"{wrong} ({self._why})" if self._why else wrong)
            sent, code = False, None
            try:
                self._connect(by)
                sent = True
                self._http.request("POST", f"/v3/kv/{call}", text)
                response = self._http.getresponse()
                reply = json.loads(response.read())
                if not isinstance(reply, dict):
                    raise ValueError("the answer is not etcd's")
            except (OSError, HTTPException, ValueError) as error:
                if not self._why or not isinstance(error, TimeoutError):  # that says the least
                    self._why = f"{type(error).__name__}: {error}"
            else:
                if response.status == 200:
                    return reply
                code = reply.get("code")
                self._why = reply.get("message") or reply.get("error") or str(response.status)
                if code in REFUSED:
                    raise EtcdError(f"{self._tried}: {self._why}")
            self._next(until)
            if sent and once:
                raise _Doubt(code == EXHAUSTED)

    def _connect(self, by: float) -> None:
        if self._http.sock is None:
            plain = socket.create_connection(self._endpoints[self._at], _left(by))
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket = self._http.sock = _Socket(fileno=plain.detach())
        self._socket.by = by
        self._socket.settimeout(_left(by))

    def _next(self, until: float) -> None:
        self._http.close()
        self._at = (self._at + 1) % len(self._endpoints)
        self._http = HTTPConnection(*self._endpoints[self._at])
        if self._at == 0:
            time.sleep(max(0.0, min(PAUSE, until - time.monotonic())))


class _Table(_Client, Generic[_Row]):
    """Rows as keys of etcd: how they are read, and changed if nobody else has changed them."""

    _name: str
    _type: type[_Row]

    def get(self, resource: str) -> _Row | None:
        """Read a resource's row, or None. What it says may be over before you act on it."""
        leases._check_name("resource", resource)
        return self._read(resource, self._ready())[0]

    def rows(self) -> Iterator[_Row]:
        """Read all rows in the order of their resources' bytes, a page at a time; no snapshot."""
        start, end = self._key(""), self._key("")[:-1] + b"\x01"
        while True:
            body = {"key": _base64(start), "range_end": _base64(end), "limit": PAGE}
            page = self._ask("range", body, self._ready()).get("kvs")
            if not page:
                return
            for pair in page:
                yield self._parse(pair)[0]
                self._ready()
            start = b64decode(page[-1]["key"]) + b"\0"

    def _change(
        self, resource: str, decide: Callable[[_Row | None], tuple[_Answer, _Row | None]]
    ) -> _Answer:
        """Answer with what `decide` makes of the row, once the row it gives, if any, is written."""
        until, own = self._ready(), secrets.token_hex(16)
        doubt = pending = False  # whether a request was sent in vain; whether it may still arrive
        while True:
            try:
                row, revision, writer = self._read(resource, until)
                if not doubt and writer != own:
                    answer, changed = decide(row)
                    if changed is None:
                        return answer
                    compared, body = revision, self._body(changed, revision, own)
                elif writer == own:
                    return answer
                elif revision != compared:
                    raise OutcomeUnknown(f"{resource!r} was changed by another ({self._why})")
                elif not pending:
                    doubt = False
                    raise EtcdError(f"{self._tried}: {self._why}")
                if self._ask("txn", body, until, once=True).get("succeeded"):
                    return answer
                self._why = f"others keep changing {resource!r}"
            except _Doubt as error:
                doubt, pending = True, pending or not error.answered
            except EtcdError as error:
                if doubt:
                    raise OutcomeUnknown(f"{resource!r}: {error}") from error
                raise

    def _body(self, row: _Row, revision: int, own: str) -> dict[str, object]:
        """Write the row, and the id of the call, if its key still has this revision."""
        key = _base64(self._key(row.resource))
        fields = {name: value for name, value in row._asdict().items() if name != "resource"}
        text = json.dumps({**fields, "id": own}, ensure_ascii=False).encode()
        return {
            "compare": [{"key": key, "target": "MOD", "mod_revision": str(revision)}],
            "success": [{"request_put": {"key": key, "value": _base64(text)}}],
        }

    def _read(self, resource: str, until: float) -> tuple[_Row | None, int, str]:
        """Give a row, its key's revision (0 for none) and the id of the call that wrote it."""
        pairs = self._ask("range", {"key": _base64(self._key(resource))}, until).get("kvs")
        if not pairs:
            return None, 0, ""
        row, writer = self._parse(pairs[0])
        return row, int(pairs[0]["mod_revision"]), writer

    def _parse(self, pair: dict[str, str]) -> tuple[_Row, str]:
        key = b64decode(pair["key"])
        try:
            fields = json.loads(b64decode(pair["value"]))
            values: list[Any] = [fields[name] for name in self._type._fields[1:]]
            resource = key[len(self._key("")) :].decode()
            return self._type._make([resource, *values]), fields["id"]
        except (ValueError, TypeError, KeyError):
            raise EtcdError(f"{self._tried}: {key!r} holds no row of {self._name}") from None

    def _key(self, resource: str) -> bytes:
        # No name holds U+0000, so that no location's keys are among another's.
        return f"{self._database}\0{self._name}\0{resource}".encode()


class LeaseTable(_Table[LeaseRow]):
    """The authority that says who may work: one key a resource, one epoch a claim.

    `database` is a location, any name. A call ends within `timeout` seconds (of less than half a
    second or more than a day: within those); each endpoint gets a part of them. Names in
    ETCDCTL_ENDPOINTS add their look-up. Nothing is sent before the first call.

    Raises TypeError and ValueError for wrong arguments, before anything is written; RuntimeError
    in a forked process, another thread or after `close`; EtcdError, an OSError, after which
    nothing has changed; OutcomeUnknown, after which something may have, or still may, as after
    KeyboardInterrupt. After any error the object works on.
    """

    _name, _type = "lease", LeaseRow

    def claim(
        self, resource: str, owner: str, *, now: int, ttl: int, above: int = 0
    ) -> Lease | None:
        """Take the resource until now + ttl ticks, in an epoch of its own, higher than `above`.

        Answers None while a lease runs, also the same owner's, and for ever once a result is
        recorded. Raises OverflowError when the epoch has reached 2**63 - 1. After OutcomeUnknown
        the lease may run, unknown to you, until its deadline.
        """
        leases._check_name("resource", resource)
        leases._check_name("owner", owner)
        leases._check_int("above", above, 0)
        deadline = leases._deadline(now, ttl)

        def decide(row: LeaseRow | None) -> tuple[Lease | None, LeaseRow | None]:
            if row is not None and (row.result is not None or row.deadline > now):
                return None, None
            epoch = max(above, row.epoch if row is not None else 0) + 1
            if epoch > LARGEST:
                raise OverflowError(f"the epoch of {resource!r} can't be raised any more")
            lease = Lease(resource, owner, epoch, deadline)
            return lease, LeaseRow(*lease, result=None)

        return self._change(resource, decide)

    def renew(self, lease: Lease, *, now: int, ttl: int) -> Lease | None:
        """Extend a lease to now + ttl ticks, in the same epoch; never shorten it; None if over."""
        deadline = leases._deadline(now, ttl)
        held, row = self._if_held(
            lease, now, lambda row: row._replace(deadline=max(row.deadline, deadline))
        )
        return lease._replace(deadline=row.deadline) if held and row is not None else None

    def complete(self, lease: Lease, result: str, *, now: int) -> bool:
        """Record the result of a lease that is still held; the first result stands for ever.

        True also for the same result again from the same owner and epoch, at any tick, so that
        asking again after OutcomeUnknown is safe. Otherwise False.
        """
        leases._check_text("result", result)
        held, row = self._if_held(lease, now, lambda row: row._replace(result=result))
        recorded = row is not None and (row.owner, row.epoch, row.result)
        return held or recorded == (lease.owner, lease.epoch, result)

    def release(self, lease: Lease, *, now: int) -> bool:
        """Give a lease back before its deadline, which becomes 0; False if it was not held."""
        return self._if_held(lease, now, lambda row: row._replace(deadline=0))[0]

    def advance(self, resource: str, epoch: int) -> bool:
        """Raise a resource's epoch and end its lease; False if it is that high or completed."""
        leases._check_name("resource", resource)
        leases._check_int("epoch", epoch, 1)

        def decide(row: LeaseRow | None) -> tuple[bool, LeaseRow | None]:
            if row is None:
                return True, LeaseRow(resource, "", epoch, 0, None)
            if row.epoch >= epoch or row.result is not None:
                return False, None
            return True, row._replace(epoch=epoch, deadline=0)

        return self._change(resource, decide)

    def _if_held(
        self, lease: Lease, now: int, change: Callable[[LeaseRow], LeaseRow]
    ) -> tuple[bool, LeaseRow | None]:
        """Change the row of a lease that is held; say whether it was, and what the row now is."""
        _, owner, epoch, _ = leases._held(lease, now)

        def decide(row: LeaseRow | None) -> tuple[tuple[bool, LeaseRow | None], LeaseRow | None]:
            if row is None or row.result is not None or row.deadline <= now:
                return (False, row), None
            if (row.owner, row.epoch) != (owner, epoch):
                return (False, row), None
            changed = change(row)
            return (True, changed), changed

        return self._change(lease.resource, decide)


class FencedSink(_Table[SinkRow]):
    """The receiver that says what may still be written: one fence and one value a resource.

    `database`, `timeout` and the errors are those of `LeaseTable`. A value must fit into one
    request to etcd, 1.5 MB unless the server was told otherwise.
    """

    _name, _type = "sink", SinkRow

    def write(self, resource: str, epoch: int, value: str, *, seq: int = 0) -> Outcome:
        """Store the value unless a higher epoch has been here, and say what became of it.

        "written", "stale", "replay", "conflict" and "passed" as in leases.py; only "written"
        changes anything.
        """
        leases._check_name("resource", resource)
        leases._check_int("epoch", epoch, 1)
        leases._check_text("value", value)
        leases._check_int("seq", seq, 0)

        def decide(row: SinkRow | None) -> tuple[Outcome, SinkRow | None]:
            outcome = leases._outcome(row, epoch, seq, value)
            written = SinkRow(resource, epoch, epoch, seq, value)
            return outcome, written if outcome == "written" else None

        return self._change(resource, decide)

    def seal(self, resource: str, epoch: int) -> Outcome:
        """Raise the fence to `epoch` without writing: "sealed", or "replay" at it, "stale" below.

        The value stays as it is, and the new term can still write at seq 0.
        """
        leases._check_name("resource", resource)
        leases._check_int("epoch", epoch, 1)

        def decide(row: SinkRow | None) -> tuple[Outcome, SinkRow | None]:
            if row is None:
                return "sealed", SinkRow(resource, epoch, 0, 0, None)
            if epoch > row.fence:
                return "sealed", row._replace(fence=epoch)
            return "replay" if epoch == row.fence else "stale", None

        return self._change(resource, decide)


@contextmanager
def fresh() -> Iterator[tuple[str, str]]:
    """Give two empty locations, for a lease table and for a sink, and remove them afterwards.

    Raises EtcdError if no server answers.
    """
    run = f"leases-{secrets.token_hex(8)}"
    with LeaseTable(run) as table:
        table.get("is a server there?")
    try:
        yield f"{run}/lease", f"{run}/sink"
    finally:
        body = {"key": _base64(f"{run}/".encode()), "range_end": _base64(f"{run}0".encode())}
        with LeaseTable(run) as table:
            table._ask("deleterange", body, table._ready())


def _endpoints() -> list[tuple[str, int]]:
    """Read ETCDCTL_ENDPOINTS as etcdctl does: host:port or http://host:port, with commas."""
    named = os.environ.get("ETCDCTL_ENDPOINTS", "").replace(" ", "") or "127.0.0.1:2379"
    found = []
    for name in filter(None, named.split(",")):
        url = urlsplit(name if "://" in name else f"http://{name}")
        try:
            host, port = url.hostname, url.port
        except ValueError:
            host = None
        if url.scheme != "http" or not host:
            raise ValueError(f"ETCDCTL_ENDPOINTS: {name!r} is no [http://]host:port")
        found.append((host, port or 2379))
    return found


def _left(by: float) -> float:
    """Give the seconds that are left, since a socket takes no negative timeout."""
    left = by - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


def _base64(data: bytes) -> str:
    return b64encode(data).decode()
