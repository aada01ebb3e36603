"""Hold etcd_leases.py to what a real server, or a cluster, does when replies get lost.

    python3 examples/serve.py etcd3 -- python3 examples/test_etcd.py
    ETCDCTL_ENDPOINTS=127.0.0.1:2379 python3 examples/test_etcd.py

That its answers are those of leases.py is what `test_leases.py --store` looks at. Here a proxy
stands between the client and the first endpoint, and does to the transactions what its plan says,
one step each; requests after the last step, and all reads, pass.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
import unittest
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

import etcd_leases
from etcd_leases import EtcdError, FencedSink, LeaseTable

from leases import (
    LARGEST,
    Finding,
    Lease,
    LeaseRow,
    OutcomeUnknown,
    SinkRow,
    reconcile,
    take_over,
)

Reply = tuple[int, bytes]
Step = Callable[["Handler", bytes], "Reply | None"]  # None: the connection is closed unanswered
WORKERS, CLAIMS = 4, 25


def main() -> None:
    """Run the tests, or say which server was missing."""
    try:
        with etcd_leases.fresh():
            pass
    except (OSError, ValueError) as error:
        sys.exit(f"test_etcd.py: {error}")
    faulthandler.dump_traceback_later(240, exit=True)
    unittest.main()


def upstream() -> tuple[str, int]:
    """Find the first of the endpoints; ETCDCTL_ENDPOINTS may name the proxy by now."""
    url = urlsplit(f"http://{ENDPOINTS.split(',')[0].split('://')[-1]}")
    return url.hostname or "", url.port or 2379


ENDPOINTS = os.environ.get("ETCDCTL_ENDPOINTS") or "127.0.0.1:2379"


def post(path: str, body: bytes) -> Reply:
    """Put one request to the server itself."""
    connection = HTTPConnection(*upstream(), timeout=20)
    try:
        connection.request("POST", path, body)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


class Proxy(ThreadingHTTPServer):
    """What stands between: its plan, and what it has seen and kept."""

    daemon_threads = True

    def __init__(self, plan: list[Step]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.plan = plan
        self.txns: list[bytes] = []
        self.reads = 0
        self.kept: list[bytes] = []
        self.over = threading.Event()

    def handle_error(self, *_: object) -> None:
        """Say nothing of a client that has gone; any other error shows in the client's answer."""


class Handler(BaseHTTPRequestHandler):
    """Play one step of the plan to each transaction."""

    server: Proxy
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        step: Step = passed
        if self.path.endswith("/txn"):
            self.server.txns.append(body)
            step = self.server.plan.pop(0) if self.server.plan else passed
        else:
            self.server.reads += 1
        reply = step(self, body)
        if reply is None:
            self.close_connection = True
            return
        status, payload = reply
        self.send_response(status)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *_: object) -> None:
        pass


def passed(handler: Handler, body: bytes) -> Reply:
    return post(handler.path, body)


def request_lost(handler: Handler, body: bytes) -> None:
    del handler, body


def reply_lost(handler: Handler, body: bytes) -> None:
    passed(handler, body)


def reply_cut(handler: Handler, body: bytes) -> None:
    status, payload = passed(handler, body)
    head = f"HTTP/1.1 {status} OK\r\nContent-Length: {len(payload)}\r\n\r\n".encode()
    handler.wfile.write(head + payload[:10])


def silence(handler: Handler, body: bytes) -> None:
    """Apply the request, and keep the connection open without a word."""
    passed(handler, body)
    handler.server.over.wait(60)


def kept(handler: Handler, body: bytes) -> None:
    """Keep the request under way: the client takes it for lost."""
    handler.server.kept.append(body)


def kept_comes_first(handler: Handler, body: bytes) -> Reply:
    post(handler.path, handler.server.kept.pop())
    return passed(handler, body)


def before(change: Callable[[], object]) -> Step:
    """Let another change the row while the request is under way; the reply is lost."""
    return lambda handler, body: reply_lost(handler, body) if change() else None


def after(change: Callable[[], object]) -> Step:
    """Let another change the row when the request has taken effect; the reply is lost."""

    def step(handler: Handler, body: bytes) -> None:
        reply_lost(handler, body)
        change()

    return step


def sent_twice(handler: Handler, body: bytes) -> Reply:
    """Repeat the request on the way, as a careless balancer does: the second time it is refused."""
    passed(handler, body)
    return passed(handler, body)


def answered(status: int, code: int, message: str, applied: bool) -> Step:
    """Answer as the gateway does when it answers with an error."""

    def step(handler: Handler, body: bytes) -> Reply:
        if applied:
            passed(handler, body)
        return status, json.dumps({"error": message, "message": message, "code": code}).encode()

    return step


class EtcdTest(unittest.TestCase):
    """Two locations, and a look at their keys without the store."""

    def setUp(self) -> None:
        fresh = etcd_leases.fresh()
        self.places = fresh.__enter__()
        self.addCleanup(fresh.__exit__, None, None, None)

    def table(self, **options: Any) -> Any:
        table = LeaseTable(self.places[0], **options)
        self.addCleanup(table.close)
        return table

    def sink(self, **options: Any) -> Any:
        sink = FencedSink(self.places[1], **options)
        self.addCleanup(sink.close)
        return sink

    @contextmanager
    def proxy(self, *plan: Step) -> Iterator[Proxy]:
        """Run a proxy, and have what is opened in the block speak to it alone."""
        proxy = Proxy(list(plan))
        thread = threading.Thread(target=proxy.serve_forever, args=(0.01,))
        thread.start()
        try:
            with endpoints(f"127.0.0.1:{proxy.server_address[1]}"):
                yield proxy
        finally:
            proxy.over.set()
            proxy.shutdown()
            proxy.server_close()
            thread.join()

    def stored(self, resource: str, number: int = 0) -> tuple[dict[str, Any], int]:
        """Read a key past the store: its object, and how often it has been written."""
        key = f"{self.places[number]}\0{('lease', 'sink')[number]}\0{resource}"
        status, reply = post("/v3/kv/range", json.dumps({"key": base64(key)}).encode())
        self.assertEqual(status, 200, reply)
        pairs = json.loads(reply).get("kvs", [])
        if not pairs:
            return {}, 0
        row = json.loads(b64decode(pairs[0]["value"]))
        self.assertRegex(row.pop("id"), "^[0-9a-f]{32}$")
        return row, int(pairs[0]["version"])

    def other_claims(self) -> Lease | None:
        with endpoints(ENDPOINTS), LeaseTable(self.places[0]) as other:
            return other.claim("r", "B", now=10, ttl=10)


@contextmanager
def endpoints(names: str) -> Iterator[None]:
    """Name other endpoints to what is opened in the block; not thread-safe, nor need it be."""
    with mock.patch.dict(os.environ, {"ETCDCTL_ENDPOINTS": names}):
        yield


def base64(text: str) -> str:
    return b64encode(text.encode()).decode()


A = {"owner": "A", "epoch": 1, "deadline": 10, "result": None}
B = {"owner": "B", "epoch": 1, "deadline": 20, "result": None}
CLAIMED = Lease("r", "A", 1, 10)


class LostReplyTest(EtcdTest):
    """A transaction whose answer never comes."""

    def claim(self, *plan: Step, timeout: float = 5.0) -> tuple[Proxy, Lease | None]:
        with self.proxy(*plan) as proxy:
            return proxy, self.table(timeout=timeout).claim("r", "A", now=0, ttl=10)

    def assert_same(self, proxy: Proxy, times: int) -> None:
        """All requests were one and the same: one id, one comparison."""
        self.assertEqual(len(proxy.txns), times)
        self.assertEqual(len(set(proxy.txns)), 1)

    def test_a_call_is_one_read_and_one_transaction(self) -> None:
        proxy, lease = self.claim()
        self.assertEqual((lease, proxy.reads, len(proxy.txns)), (CLAIMED, 1, 1))
        with self.proxy() as proxy:
            self.assertIsNone(self.table().claim("r", "B", now=0, ttl=1))
            self.assertEqual(self.sink().seal("r", 3), "sealed")
            self.assertEqual(self.sink().write("r", 2, "late"), "stale")
        self.assertEqual((proxy.reads, len(proxy.txns)), (3, 1))
        self.assertEqual(self.stored("r"), (A, 1))

    def test_its_own_id_says_that_it_took_effect(self) -> None:
        for step in (reply_lost, reply_cut):
            with self.subTest(step.__name__):
                self.setUp()
                proxy, lease = self.claim(step)
                self.assertEqual(lease, CLAIMED)
                self.assert_same(proxy, 1)
                self.assertEqual(self.stored("r"), (A, 1))

    def test_a_server_that_falls_silent_is_asked_again(self) -> None:
        proxy, lease = self.claim(silence, timeout=2)
        self.assertEqual(lease, CLAIMED)
        self.assert_same(proxy, 1)
        self.assertEqual(self.stored("r"), (A, 1))

    def test_a_lost_request_is_sent_again_with_its_id(self) -> None:
        proxy, lease = self.claim(request_lost, request_lost)
        self.assertEqual(lease, CLAIMED)
        self.assert_same(proxy, 3)
        self.assertEqual(self.stored("r"), (A, 1))

    def test_the_sink_answers_its_own_write_with_written(self) -> None:
        for resource, step in (("a", reply_lost), ("b", request_lost)):
            with self.proxy(step):
                self.assertEqual(self.sink().write(resource, 7, "v", seq=2), "written")
            row = {"fence": 7, "epoch": 7, "seq": 2, "value": "v"}
            self.assertEqual(self.stored(resource, 1), (row, 1))

    def test_another_change_before_it_leaves_the_outcome_unknown(self) -> None:
        with self.assertRaisesRegex(OutcomeUnknown, "'r' was changed by another"):
            self.claim(before(self.other_claims))
        self.assertEqual(self.stored("r"), (B, 1))

    def test_another_change_after_it_leaves_the_outcome_unknown(self) -> None:
        with self.assertRaisesRegex(OutcomeUnknown, "'r' was changed by another"):
            self.claim(after(self.other_claims))
        self.assertEqual(self.stored("r"), ({**B, "epoch": 2}, 2))

    def test_another_change_before_the_retry_is_found_out(self) -> None:
        with self.assertRaises(OutcomeUnknown):
            self.claim(request_lost, before(self.other_claims))
        self.assertEqual(self.stored("r"), (B, 1))

    def test_a_retry_that_overtakes_leaves_the_first_without_effect(self) -> None:
        proxy, lease = self.claim(kept)
        self.assertEqual(lease, CLAIMED)
        self.assert_same(proxy, 2)
        _, late = post("/v3/kv/txn", proxy.kept.pop())
        self.assertNotIn("succeeded", json.loads(late))
        self.assertEqual(self.stored("r"), (A, 1))

    def test_a_first_that_comes_before_its_retry_is_its_own(self) -> None:
        proxy, lease = self.claim(kept, kept_comes_first)
        self.assertEqual(lease, CLAIMED)
        self.assert_same(proxy, 2)
        self.assertEqual(self.stored("r"), (A, 1))

    def test_a_request_that_was_doubled_on_the_way_is_its_own(self) -> None:
        proxy, lease = self.claim(sent_twice)
        self.assertEqual((lease, len(proxy.txns)), (CLAIMED, 1))
        self.assertEqual(self.stored("r"), (A, 1))

    def test_when_its_time_is_up_it_may_still_take_effect(self) -> None:
        with self.proxy(kept, *[request_lost] * 1000) as proxy:
            table, began = self.table(timeout=0.5), time.monotonic()
            with self.assertRaisesRegex(OutcomeUnknown, "no answer within 0.5 s"):
                table.claim("r", "A", now=0, ttl=10)
            self.assertLess(time.monotonic() - began, 2)
            self.assertEqual(self.stored("r"), ({}, 0))
            post("/v3/kv/txn", proxy.kept.pop())
            self.assertEqual(table.get("r"), LeaseRow("r", "A", 1, 10, None))

    def test_a_lost_read_is_simply_made_again(self) -> None:
        self.table().claim("r", "A", now=0, ttl=10)
        with self.proxy() as proxy:
            table = self.table()
            with mock.patch.object(Handler, "do_POST", once(Handler.do_POST)):
                self.assertEqual(table.get("r"), LeaseRow("r", "A", 1, 10, None))
            self.assertEqual(proxy.reads, 1)


def once(then: Callable[[Handler], None]) -> Callable[[Handler], None]:
    """Drop the first request."""
    rest = iter([False])

    def do_post(handler: Handler) -> None:
        if next(rest, True):
            then(handler)
        else:
            handler.close_connection = True

    return do_post


class ErrorAnswerTest(EtcdTest):
    """What the gateway answers, and what that says about the row."""

    def claim(self, step: Step, **options: Any) -> Any:
        with self.proxy(step):
            return self.table(**options).claim("r", "A", now=0, ttl=10)

    def test_an_unsettled_answer_is_asked_about_again(self) -> None:
        for status, code, message in (
            (503, 14, "etcdserver: request timed out"),
            (503, 14, "etcdserver: leader changed"),
            (500, 2, "context deadline exceeded"),
        ):
            for applied in (True, False):
                with self.subTest(message, applied=applied):
                    self.setUp()
                    lease = self.claim(answered(status, code, message, applied))
                    self.assertEqual((lease, self.stored("r")), (CLAIMED, (A, 1)))

    def test_a_plain_refusal_changes_nothing(self) -> None:
        for code in (3, 7, 12, 16):
            with self.subTest(code), self.assertRaisesRegex(EtcdError, "127.0.0.1:.*: too large"):
                self.claim(answered(400, code, "too large", False))
            self.assertEqual(self.stored("r"), ({}, 0))

    def test_a_full_database_has_applied_the_write_or_not(self) -> None:
        full = "etcdserver: mvcc: database space exceeded"
        with self.assertRaisesRegex(EtcdError, full):
            self.claim(answered(503, 8, full, False))
        self.assertEqual(self.stored("r"), ({}, 0))
        self.assertEqual(self.claim(answered(503, 8, full, True)), CLAIMED)
        self.assertEqual(self.stored("r"), (A, 1))

    def test_a_refusal_after_a_lost_request_is_unknown(self) -> None:
        refusal = answered(400, 3, "too large", False)
        with self.proxy(kept, refusal) as proxy, self.assertRaises(OutcomeUnknown):
            self.table().claim("r", "A", now=0, ttl=10)
        post("/v3/kv/txn", proxy.kept.pop())
        self.assertEqual(self.stored("r"), (A, 1))

    def test_a_value_that_is_too_long_is_refused_by_etcd(self) -> None:
        for length in (1_600_000, 3_000_000):  # by the member, and by its gateway
            with self.assertRaisesRegex(EtcdError, "large"):
                self.sink().write("r", 1, "x" * length)
        self.assertIsNone(self.sink().get("r"))

    def test_a_server_of_another_kind_is_named(self) -> None:
        def web(handler: Handler) -> None:
            handler.send_response(200)
            handler.send_header("Content-Length", "2")
            handler.end_headers()
            handler.wfile.write(b"[]")

        with self.proxy(), mock.patch.object(Handler, "do_POST", web):
            with self.assertRaisesRegex(EtcdError, "127.0.0.1:.*not etcd's"):
                self.table(timeout=0.5).get("r")


class EndpointTest(EtcdTest):
    """Which server is asked, and for how long."""

    def test_the_next_endpoint_is_asked_when_one_refuses(self) -> None:
        with (
            closed_port() as port,
            endpoints(f"127.0.0.1:{port},http://127.0.0.1:{port},{ENDPOINTS}"),
        ):
            table = self.table()
            self.assertEqual(table.claim("r", "A", now=0, ttl=10), CLAIMED)
            self.assertEqual(table.renew(CLAIMED, now=5, ttl=10), Lease("r", "A", 1, 15))

    def test_the_next_endpoint_is_asked_when_one_is_silent(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            with endpoints(f"127.0.0.1:{silent.getsockname()[1]},{ENDPOINTS}"):
                self.assertEqual(self.table(timeout=2).claim("r", "A", now=0, ttl=10), CLAIMED)

    def test_where_nobody_listens_the_error_says_what_was_tried(self) -> None:
        with closed_port() as port, endpoints(f"127.0.0.1:{port}"):
            table, began = self.table(timeout=0.6), time.monotonic()
            wrong = f"^no answer within 0.6 s from 127.0.0.1:{port} "
            with self.assertRaisesRegex(OSError, wrong):
                table.get("r")
            with self.assertRaisesRegex(EtcdError, wrong):
                table.claim("r", "A", now=0, ttl=1)
            self.assertGreater(time.monotonic() - began, 1.1)  # it waits for one that restarts
            self.assertLess(time.monotonic() - began, 5)

    def test_a_server_that_trickles_is_given_up_in_time(self) -> None:
        over = threading.Event()

        def trickle(handler: Handler) -> None:
            for _ in range(50):
                if over.wait(0.1):
                    break
                handler.wfile.write(b"H")

        with self.proxy(), mock.patch.object(Handler, "do_POST", trickle):
            table, began = self.table(timeout=0.5), time.monotonic()
            with self.assertRaises(EtcdError):
                table.get("r")
            self.assertLess(time.monotonic() - began, 3)
            over.set()

    def test_an_object_works_on_after_an_error(self) -> None:
        with self.proxy(*[request_lost] * 1000) as proxy:
            table = self.table(timeout=0.5)
            self.assertRaises(OutcomeUnknown, table.claim, "r", "A", now=0, ttl=10)
            proxy.plan.clear()
            self.assertEqual(table.claim("r", "A", now=0, ttl=10), CLAIMED)

    @unittest.skipUnless(hasattr(signal, "pthread_kill"), "POSIX signals")
    def test_an_interrupted_call_leaves_no_answer_to_the_next(self) -> None:
        def interrupt(handler: Handler, body: bytes) -> Reply:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            handler.server.over.wait(0.1)
            return passed(handler, body)

        self.sink().write("s", 1, "v")
        with self.proxy(interrupt):
            sink = self.sink()
            with self.assertRaises(KeyboardInterrupt):
                sink.write("r", 1, "v")
            self.assertEqual(sink.get("s"), SinkRow("s", 1, 1, 0, "v"))
            self.assertEqual(sink.write("t", 1, "v"), "written")

    def test_an_endpoint_that_is_none_is_a_value_error(self) -> None:
        for wrong in ("https://a:1", "a:b", "http://", "a:1,:2", "unix://a:1"):
            with self.subTest(wrong), endpoints(wrong):
                with self.assertRaisesRegex(ValueError, "ETCDCTL_ENDPOINTS"):
                    self.table()

    @unittest.skipUnless(hasattr(os, "fork"), "needs os.fork")
    def test_a_forked_process_is_refused_and_harms_nothing(self) -> None:
        table = self.table()
        table.claim("r", "A", now=0, ttl=10)
        reader, writer = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                table.get("r")
            except RuntimeError as error:
                os.write(writer, str(error).encode())
            finally:
                table.close()
                os._exit(0)
        os.waitpid(pid, 0)
        os.close(writer)
        with open(reader) as answer:
            self.assertIn("another process", answer.read())
        self.assertEqual(table.get("r"), LeaseRow("r", "A", 1, 10, None))

    def test_a_closed_object_and_another_thread_are_refused(self) -> None:
        table, errors = self.table(), []

        def use() -> None:
            try:
                table.get("r")
            except RuntimeError as error:
                errors.append(str(error))

        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
        table.close()
        table.close()
        use()
        self.assertRegex(" ".join(errors), "another process or thread.*is closed")


@contextmanager
def closed_port() -> Iterator[int]:
    """Bind a port on which nobody listens, so that a connection is refused."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


class RowsTest(EtcdTest):
    """Names and numbers as they are stored."""

    def test_odd_names_are_apart_and_in_the_order_of_their_bytes(self) -> None:
        names = [
            "/",
            "//",
            "a/b",
            "a",
            "a ",
            "%2F",
            "%",
            "A",
            "é",
            "e\u0301",
            "\uffff",
            "\U0001f389",
        ]
        names += ["\x01", "\x7f", "\r\n", '"', "\\", "x" * 5000]
        table, sink = self.table(), self.sink()
        for name in names:
            self.assertEqual(table.claim(name, name, now=0, ttl=1), Lease(name, name, 1, 1))
            self.assertEqual(sink.write(name, 1, name), "written")
        names.sort(key=str.encode)
        self.assertEqual([row.resource for row in table.rows()], names)
        self.assertEqual(list(sink.rows()), [SinkRow(name, 1, 1, 0, name) for name in names])
        self.assertEqual([table.get(n) for n in names], list(table.rows()))

    def test_rows_are_read_page_after_page(self) -> None:
        sink = self.sink()
        names = [f"r{number:03}" for number in range(0, 502, 2)]
        for name in names:
            sink.seal(name, 1)
        with self.proxy() as proxy:
            rows = self.sink().rows()
            seen = [next(rows).resource for _ in range(150)]
            self.assertEqual(proxy.reads, 2)
            sink.seal("r001", 1)  # behind
            sink.seal("r499", 1)  # ahead, and no snapshot
            seen += [row.resource for row in islice(rows, 1000)]
        self.assertEqual(seen, sorted([*names, "r499"]))

    def test_numbers_are_exact_to_the_largest(self) -> None:
        table, sink = self.table(), self.sink()
        lease = table.claim("r", "A", now=LARGEST - 1, ttl=1, above=LARGEST - 1)
        self.assertEqual(lease, Lease("r", "A", LARGEST, LARGEST))
        self.assertEqual(table.get("r"), LeaseRow("r", "A", LARGEST, LARGEST, None))
        self.assertEqual(sink.write("r", LARGEST, "v", seq=LARGEST), "written")
        self.assertEqual(sink.get("r"), SinkRow("r", LARGEST, LARGEST, LARGEST, "v"))
        self.assertTrue(table.release(lease, now=0))
        with self.assertRaises(OverflowError):
            table.claim("r", "B", now=0, ttl=1)
        self.assertEqual(self.stored("r")[1], 2)

    def test_locations_of_similar_names_share_nothing(self) -> None:
        here = self.places[0]
        for place in (here, here + "/", here + "/a", here + "a"):
            with LeaseTable(place) as table, FencedSink(place) as sink:
                self.assertEqual((list(table.rows()), list(sink.rows())), ([], []))
                self.assertEqual(table.claim("a/b", "A", now=0, ttl=1), Lease("a/b", "A", 1, 1))
                self.assertEqual(sink.seal("a/b", 5), "sealed")

    def test_fresh_leaves_nothing_behind(self) -> None:
        with etcd_leases.fresh() as places:
            with LeaseTable(places[0]) as table, FencedSink(places[1]) as sink:
                table.claim("r", "A", now=0, ttl=1)
                sink.seal("r", 1)
                self.assertEqual(self.beginning(places[0][:-6]), 2)
        self.assertEqual(self.beginning(places[0][:-6]), 0)

    def beginning(self, prefix: str) -> int:
        body = {"key": base64(prefix), "range_end": base64(prefix + "\x7f"), "count_only": True}
        return int(json.loads(post("/v3/kv/range", json.dumps(body).encode())[1]).get("count", 0))

    def test_a_key_of_somebody_else_is_named(self) -> None:
        body = {"key": base64(f"{self.places[0]}\0lease\0r"), "value": base64("{}")}
        post("/v3/kv/put", json.dumps(body).encode())
        with self.assertRaisesRegex(EtcdError, "lease.*holds no row"):
            self.table().claim("r", "A", now=0, ttl=1)

    def test_errors_survive_being_pickled(self) -> None:
        error = pickle.loads(pickle.dumps(EtcdError("no answer")))
        self.assertEqual((type(error), str(error)), (EtcdError, "no answer"))


class ProtocolTest(EtcdTest):
    """take_over and reconcile, which are leases.py's own."""

    def test_a_takeover_seals_the_sink(self) -> None:
        table, sink = self.table(), self.sink()
        sink.seal("r", 5)
        lease = take_over(table, sink, "r", "A", now=0, ttl=10)
        self.assertEqual(lease, Lease("r", "A", 6, 10))
        self.assertEqual(sink.get("r"), SinkRow("r", 6, 0, 0, None))
        self.assertEqual(sink.write("r", 5, "late"), "stale")
        self.assertIsNone(take_over(table, sink, "r", "B", now=9, ttl=10))

    def test_a_takeover_whose_seal_is_unknown_gives_the_lease_back(self) -> None:
        table = self.table()
        with self.proxy(*[request_lost] * 1000):
            sink = self.sink(timeout=0.5)
            with self.assertRaises(OutcomeUnknown):
                take_over(table, sink, "r", "A", now=0, ttl=10)
        self.assertEqual(table.get("r"), LeaseRow("r", "A", 1, 0, None))

    def test_reconcile_puts_both_right(self) -> None:
        table, sink = self.table(), self.sink()
        table.claim("behind", "A", now=0, ttl=10)
        sink.seal("behind", 4)
        table.claim("ahead", "A", now=0, ttl=10, above=8)
        sink.write("ahead", 2, "v")
        self.assertEqual(
            reconcile(table, sink, margin=10),
            [Finding("ahead", "fence", 2, 19), Finding("behind", "lease", 1, 14)],
        )
        self.assertEqual(table.get("behind"), LeaseRow("behind", "A", 14, 0, None))
        self.assertEqual(sink.get("ahead"), SinkRow("ahead", 19, 2, 0, "v"))


class ContentionTest(EtcdTest):
    """Processes that want the same row at once."""

    def test_each_epoch_is_granted_once(self) -> None:
        context = multiprocessing.get_context("spawn")
        with context.Pool(WORKERS) as pool:
            arguments = [(self.places, f"w{number}") for number in range(WORKERS)]
            granted = pool.starmap_async(contend, arguments, chunksize=1).get(120)
        epochs = sorted(epoch for mine, _ in granted for epoch in mine)
        self.assertEqual(epochs, list(range(1, WORKERS * CLAIMS + 1)))
        self.assertEqual(self.stored("r")[0]["epoch"], WORKERS * CLAIMS)
        self.assertGreater(sum(refused for _, refused in granted), 0, "nobody contended")
        fences = [row.fence for row in self.sink().rows()]
        self.assertEqual(fences, [WORKERS * CLAIMS])


def contend(places: tuple[str, str], owner: str) -> tuple[list[int], int]:
    """Claim, write and release until enough was granted; count the refusals."""
    granted: list[int] = []
    refused = 0
    with LeaseTable(places[0], timeout=30) as table, FencedSink(places[1], timeout=30) as sink:
        until = time.monotonic() + 60
        while len(granted) < CLAIMS and time.monotonic() < until:
            lease = table.claim("r", owner, now=0, ttl=1)
            if lease is None:
                refused += 1
                continue
            granted.append(lease.epoch)
            if sink.write("r", lease.epoch, owner) != "written" or not table.release(lease, now=0):
                raise RuntimeError(f"{lease} was not alone")
    return granted, refused


if __name__ == "__main__":
    main()
