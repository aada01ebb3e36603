"""Pin every rule of leases.py and of the experiment: python3 test_leases.py

What the tables hold is read through a second, plain connection, never only from the object that
wrote it. No test sleeps or looks at a clock: where the library waits, its time is a `Time` of
ours. Names that begin with c01 to c20 are failures that were reported from the field, each as a
family of inputs.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import inspect
import io
import itertools
import json
import multiprocessing
import os
import pickle
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import types
import unittest
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import leases
import run_experiment
from leases import (
    Fenced,
    FencedSink,
    Finding,
    Lease,
    LeaseLost,
    LeaseRow,
    LeasesError,
    LeaseTable,
    SinkRow,
    reconcile,
    take_over,
)

HERE = Path(__file__).resolve().parent
TOP = 2**63 - 1
FOREVER = 60  # seconds: a limit that a test that works never comes near
SPAWN = multiprocessing.get_context("spawn")


class ContractTest(unittest.TestCase):
    """A test of what any store owes: answers and rows. A store's own suite subclasses these.

    `store` is the module that is put to the test, `name` the one that spawned processes import it
    by; a class that `needs` a method which the store does not have is left out.
    """

    store: Any = leases
    name = ""
    needs = ""

    def setUp(self) -> None:
        self.places = self.enter(run_experiment.fresh(self.store))

    def enter(self, context: Any) -> Any:
        entered = context.__enter__()
        self.addCleanup(context.__exit__, None, None, None)
        return entered

    def table(self, **options: Any) -> Any:
        return self.enter(self.store.LeaseTable(self.places[0], **options))

    def sink(self, **options: Any) -> Any:
        return self.enter(self.store.FencedSink(self.places[1], **options))

    def stored(self) -> list[Any]:
        """Read the lease table through another connection, a plain one if it is SQLite's."""
        return self.read(self.places[0], self.store.LeaseTable, "lease")

    def sunk(self) -> list[Any]:
        return self.read(self.places[1], self.store.FencedSink, "sink")

    def read(self, place: str, opens: Any, table: str) -> list[Any]:
        if os.path.isfile(place):
            with closing(sqlite3.connect(place, timeout=0)) as connection:
                return connection.execute(f"SELECT * FROM {table} ORDER BY resource").fetchall()
        with opens(place) as opened:
            return [tuple(row) for row in opened.rows()]

    def assert_usable(self, *objects: Any) -> None:
        """No transaction is open: another object can write at once, and so can these."""
        for number, opened in enumerate(objects):
            with type(opened)(self.places[hasattr(opened, "seal")], timeout=0) as other:
                for one in (other, opened):
                    if hasattr(one, "seal"):
                        answer = one.seal(f"usable{number}{one is other}", 1)
                        self.assertEqual(answer, "sealed")
                    else:
                        self.assertTrue(one.advance(f"usable{number}{one is other}", 1))


class DatabaseTest(ContractTest):
    """A test of what is SQLite's: one file for both, and plain connections that look into it."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="leases-test-")
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.path = self.folder / "leases.db"

    def table(self, **options: Any) -> Any:
        return self.enter(LeaseTable(self.path, **options))

    def sink(self, **options: Any) -> Any:
        return self.enter(FencedSink(self.path, **options))

    def plain(self, path: Path | None = None) -> sqlite3.Connection:
        """Open a second connection that knows nothing of the library."""
        connection = sqlite3.connect(path or self.path, isolation_level=None, timeout=0)
        self.addCleanup(connection.close)
        return connection

    def stored(self, sql: str = "SELECT * FROM lease ORDER BY resource") -> list[Any]:
        with closing(sqlite3.connect(self.path, timeout=0)) as connection:
            return connection.execute(sql).fetchall()

    def sunk(self) -> list[Any]:
        return self.stored("SELECT * FROM sink ORDER BY resource")

    def assert_usable(self, *objects: LeaseTable | FencedSink) -> None:
        """No transaction is open: another connection can write at once, and so can these."""
        other = self.plain()
        other.execute("BEGIN IMMEDIATE")
        other.execute("ROLLBACK")
        for number, opened in enumerate(objects):
            if isinstance(opened, LeaseTable):
                self.assertIsNotNone(opened.claim(f"usable{number}", "U", now=0, ttl=1))
            else:
                self.assertEqual(opened.write(f"usable{number}", 1, "u"), "written")


class Time:
    """Stands for the library's `time`: only its own sleeps pass, and they may do something."""

    def __init__(self, during: Callable[[], object] = lambda: None) -> None:
        self.now, self.slept, self.during = 1000.0, list[float](), during

    @property
    def sleeps(self) -> int:
        return len(self.slept)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + 0.001  # no sleep is shorter on a real machine
        self.slept.append(seconds)
        self.during()


def waiting(time: Time) -> Any:
    return mock.patch.object(leases, "time", time)


def writing(table: Any, sink: Any, granted: Lease) -> list[Callable[[], object]]:
    """Give one call of each kind that writes, each of which would succeed."""
    return [
        lambda: table.claim("s", "A", now=0, ttl=1),
        lambda: table.renew(granted, now=0, ttl=20),
        lambda: table.complete(granted, "x", now=0),
        lambda: table.release(granted, now=0),
        lambda: table.advance("t", 1),
        lambda: sink.write("r", 1, "v"),
        lambda: sink.seal("t", 1),
        lambda: sink.transaction("r", 1).__enter__(),
    ]


def lease(owner: str = "A", epoch: int = 1, resource: str = "r") -> Lease:
    return Lease(resource, owner, epoch, 10)


class ClaimTest(ContractTest):
    def test_the_first_claim_has_epoch_one(self) -> None:
        granted = self.table().claim("r", "A", now=3, ttl=7)
        self.assertEqual(granted, Lease("r", "A", 1, 10))
        self.assertEqual(self.stored(), [("r", "A", 1, 10, None)])

    def test_c17_a_lease_runs_until_just_before_its_deadline(self) -> None:
        table = self.table()
        table.claim("r", "A", now=0, ttl=10)
        for now in (0, 1, 9):
            self.assertIsNone(table.claim("r", "B", now=now, ttl=10))
        self.assertEqual(self.stored(), [("r", "A", 1, 10, None)])
        self.assertEqual(table.claim("r", "B", now=10, ttl=5), Lease("r", "B", 2, 15))
        self.assertEqual(self.stored(), [("r", "B", 2, 15, None)])

    def test_c17_at_each_tick_exactly_one_of_two_owners_gets_it(self) -> None:
        table = self.table()
        a = table.claim("r", "A", now=0, ttl=10)
        self.assertIsNone(table.claim("r", "B", now=9, ttl=10))
        self.assertEqual(table.renew(a, now=9, ttl=10), Lease("r", "A", 1, 19))
        self.assertIsNone(table.claim("r", "B", now=18, ttl=10))
        self.assertIs(table.complete(a, "x", now=19), False)
        self.assertEqual(table.claim("r", "B", now=19, ttl=10), Lease("r", "B", 2, 29))

    def test_c13_the_same_owner_is_refused_like_any_other(self) -> None:
        table = self.table()
        first = table.claim("r", "w", now=0, ttl=10)
        self.assertIsNone(table.claim("r", "w", now=9, ttl=10))
        self.assertEqual(table.claim("r", "w", now=10, ttl=10), Lease("r", "w", 2, 20))
        self.assertIs(table.complete(first, "x", now=11), False)
        self.assertIsNone(table.renew(first, now=11, ttl=10))
        self.assertIs(table.release(first, now=11), False)
        self.assertEqual(self.stored(), [("r", "w", 2, 20, None)])

    def test_c02_finished_work_is_never_claimed_again(self) -> None:
        table = self.table()
        table.complete(table.claim("r", "A", now=0, ttl=10), "x", now=2)
        for owner, now in itertools.product("AB", (0, 3, 9, 10, 99, TOP - 10)):
            self.assertIsNone(table.claim("r", owner, now=now, ttl=10))
        self.assertEqual(self.stored(), [("r", "A", 1, 10, "x")])

    def test_c18_the_epoch_goes_on_over_release_and_restart(self) -> None:
        table = self.table()
        table.release(table.claim("r", "A", now=0, ttl=10), now=1)
        epochs = [table.claim("r", "B", now=10 * n, ttl=10).epoch for n in range(1, 6)]
        table.close()
        epochs.append(self.table().claim("r", "C", now=100, ttl=10).epoch)
        self.assertEqual(epochs, [2, 3, 4, 5, 6, 7])
        self.assertEqual(self.stored(), [("r", "C", 7, 110, None)])

    def test_resources_are_leased_apart_and_compared_bytewise(self) -> None:
        table = self.table()
        names = [
            "r",
            "R",
            "r ",
            " r",
            "r\u00e9",
            "re\u0301",
            "%",
            "r'",
            "\n",
            "\U0001f600",
            "r" * 500,
        ]
        for name in names:
            self.assertEqual(table.claim(name, name, now=0, ttl=1).epoch, 1)
        self.assertEqual([row.resource for row in table.rows()], sorted(names, key=str.encode))
        self.assertEqual([row[0] for row in self.stored()], sorted(names, key=str.encode))


class RenewTest(ContractTest):
    def test_c14_renewing_sets_the_deadline_and_keeps_the_epoch(self) -> None:
        table = self.table()
        granted = table.claim("r", "A", now=0, ttl=10)
        for now in range(1, 6):
            self.assertEqual(table.renew(granted, now=now, ttl=10), Lease("r", "A", 1, now + 10))
        self.assertEqual(self.stored(), [("r", "A", 1, 15, None)])

    def test_c14_renewing_never_shortens_a_lease(self) -> None:
        table = self.table()
        granted = table.claim("r", "A", now=0, ttl=100)
        for now, ttl in ((5, 1), (0, 1), (99, 1), (50, 50)):
            self.assertEqual(table.renew(granted, now=now, ttl=ttl), granted)
        self.assertEqual(self.stored(), [("r", "A", 1, 100, None)])

    def test_c15_an_expired_lease_is_never_revived(self) -> None:
        table = self.table()
        granted = table.claim("r", "A", now=0, ttl=10)
        for now in (10, 11, 1000):
            self.assertIsNone(table.renew(granted, now=now, ttl=10))
            self.assertIs(table.complete(granted, "x", now=now), False)
            self.assertIs(table.release(granted, now=now), False)
        self.assertEqual(self.stored(), [("r", "A", 1, 10, None)])
        self.assertEqual(table.claim("r", "B", now=10, ttl=5), Lease("r", "B", 2, 15))

    def test_a_lease_is_renewed_until_its_last_tick(self) -> None:
        table = self.table()
        granted = table.claim("r", "A", now=0, ttl=10)
        self.assertEqual(table.renew(granted, now=9, ttl=1), granted)
        self.assertEqual(table.renew(granted, now=9, ttl=2), Lease("r", "A", 1, 11))

    def test_an_old_copy_of_a_lease_still_renews_it(self) -> None:
        table = self.table()
        granted = table.claim("r", "A", now=0, ttl=10)
        table.renew(granted, now=0, ttl=20)
        self.assertEqual(table.renew(granted, now=15, ttl=1), Lease("r", "A", 1, 20))

    def test_only_its_owner_in_its_epoch_acts_on_a_lease(self) -> None:
        table = self.table()
        table.claim("r", "A", now=0, ttl=10)
        strangers = [lease("B"), lease("a"), lease("A "), lease("A", 2), lease("A", TOP)]
        for stranger in [*strangers, lease(resource="s")]:
            self.assertIsNone(table.renew(stranger, now=1, ttl=50))
            self.assertIs(table.complete(stranger, "x", now=1), False)
            self.assertIs(table.release(stranger, now=1), False)
        self.assertEqual(self.stored(), [("r", "A", 1, 10, None)])

    def test_a_predecessor_of_the_same_name_is_refused(self) -> None:
        table = self.table()
        old = table.claim("r", "A", now=0, ttl=10)
        table.claim("r", "A", now=10, ttl=10)
        self.assertIsNone(table.renew(old, now=11, ttl=50))
        self.assertIs(table.complete(old, "x", now=11), False)
        self.assertIs(table.release(old, now=11), False)
        self.assertEqual(self.stored(), [("r", "A", 2, 20, None)])

    def test_completed_work_is_neither_renewed_nor_released(self) -> None:
        table = self.table()
        granted = table.claim("r", "A", now=0, ttl=10)
        table.complete(granted, "", now=1)
        self.assertIsNone(table.renew(granted, now=2, ttl=50))
        self.assertIs(table.release(granted, now=2), False)
        self.assertEqual(self.stored(), [("r", "A", 1, 10, "")])


class CompleteTest(ContractTest):
    def test_c01_the_first_result_stands_for_ever(self) -> None:
        table = self.table()
        granted = table.claim("r", "A", now=0, ttl=10)
        self.assertIs(table.complete(granted, "x", now=2), True)
        for other, now in itertools.product(("y", "", "X", "x "), (3, 10, 99)):
            self.assertIs(table.complete(granted, other, now=now), False)
        self.assertEqual(self.stored(), [("r", "A", 1, 10, "x")])

    def test_c03_an_empty_result_is_a_result(self) -> None:
        table = self.table()
        granted = table.claim("r", "A", now=0, ttl=10)
        self.assertIs(table.complete(granted, "", now=2), True)
        self.assertIsNone(table.claim("r", "B", now=10, ttl=10))
        self.assertIs(table.complete(granted, "z", now=3), False)
        self.assertEqual(self.stored(), [("r", "A", 1, 10, "")])

    def test_c04_asking_again_finds_the_record_standing(self) -> None:
        table = self.table()
        granted = table.claim("r", "A", now=0, ttl=10)
        for now in (9, 0, 10, 50):
            self.assertIs(table.complete(granted, "x", now=now), True)
        self.assertIs(table.complete(granted, "w", now=50), False)
        for stranger in (lease("B"), lease("A", 2), lease(resource="s")):
            self.assertIs(table.complete(stranger, "x", now=50), False)
        self.assertEqual(self.stored(), [("r", "A", 1, 10, "x")])

    def test_c17_work_is_completed_until_the_last_tick(self) -> None:
        table = self.table()
        granted = table.claim("r", "A", now=0, ttl=10)
        self.assertIs(table.complete(granted, "x", now=10), False)
        self.assertEqual(self.stored(), [("r", "A", 1, 10, None)])
        self.assertIs(table.complete(granted, "x", now=9), True)
        self.assertEqual(self.stored(), [("r", "A", 1, 10, "x")])

    def test_c12_another_connection_sees_the_first_success_at_once(self) -> None:
        table = self.table()
        granted = table.claim("r", "A", now=0, ttl=10)
        self.assertEqual(self.stored(), [("r", "A", 1, 10, None)])
        self.assertEqual(table.renew(granted, now=1, ttl=10), Lease("r", "A", 1, 11))
        self.assertEqual(self.stored(), [("r", "A", 1, 11, None)])
        self.assertIs(table.complete(granted, "x", now=1), True)
        self.assertEqual(self.stored(), [("r", "A", 1, 11, "x")])


class ReleaseTest(ContractTest):
    def test_a_released_lease_is_free_at_any_tick(self) -> None:
        for number, now in enumerate((0, 1, 5, 9)):
            table, name = self.table(), f"r{number}"
            granted = table.claim(name, "A", now=0, ttl=10)
            self.assertIs(table.release(granted, now=now), True)
            self.assertEqual(table.get(name), LeaseRow(name, "A", 1, 0, None))
            self.assertEqual(table.claim(name, "B", now=0, ttl=3), Lease(name, "B", 2, 3))

    def test_a_tick_read_earlier_revives_no_released_lease(self) -> None:
        table = self.table()
        granted = table.claim("r", "A", now=5, ttl=10)
        table.release(granted, now=9)
        for now in (0, 4, 5, 8, 9):
            self.assertIsNone(table.renew(granted, now=now, ttl=10))
            self.assertIs(table.complete(granted, "x", now=now), False)
            self.assertIs(table.release(granted, now=now), False)
        self.assertEqual(self.stored(), [("r", "A", 1, 0, None)])


class SinkTest(ContractTest):
    def test_c19_the_fence_compares_epochs_and_values(self) -> None:
        sink = self.sink()
        offers: list[tuple[str, int, str, str]] = [
            ("r", 2, "a", "written"),
            ("r", 2, "a", "replay"),
            ("r", 2, "b", "conflict"),
            ("r", 1, "a", "stale"),
            ("r", 1, "b", "stale"),
            ("r", 3, "a", "written"),
            ("r", 2, "a", "stale"),
            ("s", 1, "b", "written"),
        ]
        for resource, epoch, value, answer in offers:
            self.assertEqual(sink.write(resource, epoch, value), answer)
        self.assertEqual(self.sunk(), [("r", 3, 3, 0, "a"), ("s", 1, 1, 0, "b")])

    def test_only_a_written_value_changes_the_row(self) -> None:
        sink = self.sink()
        sink.write("r", 5, "a")
        for epoch, value in ((5, "a"), (5, "b"), (4, "a"), (4, "b"), (1, "")):
            self.assertNotEqual(sink.write("r", epoch, value), "written")
            self.assertEqual(self.sunk(), [("r", 5, 5, 0, "a")])

    def test_c05_values_are_equal_only_as_equal_strings(self) -> None:
        sink = self.sink()
        self.assertEqual(sink.write("r", 1, "1"), "written")
        self.assertEqual(sink.write("r", 1, "1"), "replay")
        for value in ("01", "1.0", "1 ", " 1", "", "\uff11", "1\n"):
            self.assertEqual(sink.write("r", 1, value), "conflict")
        for wrong in (1, True, None, b"1", 1.0):
            with self.assertRaisesRegex(TypeError, "value"):
                sink.write("r", 1, wrong)
        self.assertEqual(self.sunk(), [("r", 1, 1, 0, "1")])

    def test_an_empty_value_is_a_value(self) -> None:
        sink = self.sink()
        self.assertEqual(
            [sink.write("r", 1, v) for v in ("", "", "x")], ["written", "replay", "conflict"]
        )
        self.assertEqual(sink.get("r"), SinkRow("r", 1, 1, 0, ""))

    def test_c18_the_fence_goes_on_over_a_restart(self) -> None:
        sink = self.sink()
        sink.write("r", 6, "b")
        sink.close()
        sink = self.sink()
        self.assertEqual(sink.write("r", 1, "a"), "stale")
        self.assertEqual(sink.write("r", 6, "b"), "replay")
        self.assertEqual(self.sunk(), [("r", 6, 6, 0, "b")])

    def test_c11_a_worker_that_wakes_is_told_that_it_lost(self) -> None:
        table, sink = self.table(), self.sink()
        a = table.claim("r", "A", now=0, ttl=10)
        b = table.claim("r", "B", now=10, ttl=10)
        self.assertEqual(sink.write("r", b.epoch, "new"), "written")
        self.assertIs(table.complete(a, "old", now=11), False)
        self.assertEqual(sink.write("r", a.epoch, "old"), "stale")
        self.assertEqual(self.sunk(), [("r", 2, 2, 0, "new")])

    def test_a_large_value_comes_back_as_it_was(self) -> None:
        sink, value = self.sink(), "é\U0001f600\r\n" * 10_000
        self.assertEqual(sink.write("r", 1, value), "written")
        self.assertEqual(sink.write("r", 1, value), "replay")
        self.assertEqual(self.sunk(), [("r", 1, 1, 0, value)])


class SequenceTest(ContractTest):
    """`seq`: a term that writes more than once."""

    def test_a_term_writes_in_the_order_of_seq(self) -> None:
        sink = self.sink()
        offers: list[tuple[int, int, str, str]] = [
            (1, 0, "a", "written"),
            (1, 1, "b", "written"),
            (1, 1, "b", "replay"),
            (1, 1, "a", "conflict"),
            (1, 0, "a", "passed"),
            (1, 0, "z", "passed"),
            (1, 7, "b", "written"),
            (2, 0, "c", "written"),
            (1, 8, "d", "stale"),
            (3, 5, "e", "written"),
            (3, 4, "e", "passed"),
            (3, TOP, "f", "written"),
        ]
        for epoch, seq, value, answer in offers:
            self.assertEqual(sink.write("r", epoch, value, seq=seq), answer)
        self.assertEqual(self.sunk(), [("r", 3, 3, TOP, "f")])

    def test_a_late_operation_is_passed_and_the_lease_as_good(self) -> None:
        table, sink = self.table(), self.sink()
        held = table.claim("r", "A", now=0, ttl=10)
        for seq, value in ((0, "first"), (1, "second")):
            sink.write("r", held.epoch, value, seq=seq)
        self.assertEqual(sink.write("r", held.epoch, "first", seq=0), "passed")
        self.assertEqual(sink.write("r", held.epoch, "third", seq=2), "written")
        self.assertIs(table.complete(held, "third", now=9), True)
        self.assertEqual(self.sunk(), [("r", 1, 1, 2, "third")])


class SealTest(ContractTest):
    def test_a_seal_does_not_look_like_a_write(self) -> None:
        sink = self.sink()
        sink.write("r", 1, "old")
        self.assertEqual(sink.seal("r", 2), "sealed")
        self.assertEqual(sink.get("r"), SinkRow("r", 2, 1, 0, "old"))
        self.assertEqual(sink.write("r", 1, "old"), "stale")
        self.assertEqual(sink.write("r", 2, "old"), "written")
        self.assertEqual(sink.write("r", 2, "old"), "replay")
        self.assertEqual(self.sunk(), [("r", 2, 2, 0, "old")])

    def test_only_the_call_that_raised_the_fence_says_sealed(self) -> None:
        sink = self.sink()
        answers = [sink.seal("r", epoch) for epoch in (2, 2, 1, 3, 3, 2, TOP)]
        expected = ["sealed", "replay", "stale", "sealed", "replay", "stale", "sealed"]
        self.assertEqual(answers, expected)
        self.assertEqual(self.sunk(), [("r", TOP, 0, 0, None)])

    def test_sealing_at_a_written_epoch_changes_nothing(self) -> None:
        sink = self.sink()
        sink.write("r", 2, "v", seq=3)
        self.assertEqual([sink.seal("r", epoch) for epoch in (2, 1)], ["replay", "stale"])
        self.assertEqual(self.sunk(), [("r", 2, 2, 3, "v")])

    def test_after_a_seal_the_new_term_starts_at_any_seq(self) -> None:
        sink = self.sink()
        sink.write("r", 1, "old", seq=9)
        sink.seal("r", 2)
        self.assertEqual(sink.write("r", 2, "new", seq=0), "written")
        self.assertEqual(self.sunk(), [("r", 2, 2, 0, "new")])


class AdvanceTest(ContractTest):
    def test_advancing_ends_the_lease_of_a_lower_epoch(self) -> None:
        table = self.table()
        held = table.claim("r", "A", now=5, ttl=10)
        self.assertIs(table.advance("r", 7), True)
        self.assertEqual(self.stored(), [("r", "A", 7, 0, None)])
        for lost in (held, held._replace(epoch=7)):
            self.assertIsNone(table.renew(lost, now=5, ttl=10))
            self.assertIs(table.complete(lost, "x", now=5), False)
        self.assertEqual(table.claim("r", "B", now=0, ttl=3), Lease("r", "B", 8, 3))

    def test_advancing_never_lowers_and_never_touches_a_result(self) -> None:
        table = self.table()
        held = table.claim("r", "A", now=0, ttl=10, above=4)
        for epoch in (1, 4, 5):
            self.assertIs(table.advance("r", epoch), False)
        self.assertEqual(self.stored(), [("r", "A", 5, 10, None)])
        table.complete(held, "", now=1)
        self.assertIs(table.advance("r", TOP), False)
        self.assertEqual(self.stored(), [("r", "A", 5, 10, "")])

    def test_a_resource_never_claimed_gets_a_row_of_nobodys(self) -> None:
        table = self.table()
        self.assertIs(table.advance("r", 3), True)
        self.assertEqual(self.stored(), [("r", "", 3, 0, None)])
        self.assertEqual(table.claim("r", "A", now=0, ttl=1), Lease("r", "A", 4, 1))

    def test_a_claim_goes_above_what_it_is_told(self) -> None:
        table = self.table()
        self.assertEqual(table.claim("r", "A", now=0, ttl=1, above=9), Lease("r", "A", 10, 1))
        self.assertEqual(table.claim("r", "A", now=1, ttl=1, above=3), Lease("r", "A", 11, 2))
        self.assertIsNone(table.claim("r", "B", now=1, ttl=1, above=50))
        self.assertEqual(self.stored(), [("r", "A", 11, 2, None)])
        with self.assertRaises(OverflowError):
            table.claim("r", "B", now=2, ttl=1, above=TOP)
        with self.assertRaisesRegex(OverflowError, "'s'"):
            table.claim("s", "B", now=2, ttl=1, above=TOP)
        self.assertEqual(self.stored(), [("r", "A", 11, 2, None)])
        self.assert_usable(table)


class GuardTest(DatabaseTest):
    """`guard`: the lease and data beside its table, in one transaction."""

    def setUp(self) -> None:
        super().setUp()
        self.leases = self.table()
        self.plain().execute("CREATE TABLE work (id INTEGER PRIMARY KEY, text TEXT NOT NULL)")
        self.held = self.leases.claim("r", "A", now=0, ttl=10)

    def work(self) -> list[Any]:
        return self.stored("SELECT id, text FROM work ORDER BY id")

    def test_a_held_lease_lets_the_block_write(self) -> None:
        with self.leases.guard(self.held, now=9) as connection:
            connection.execute("INSERT INTO work VALUES (1, 'done')")
            self.assertEqual(self.work(), [])
        self.assertEqual(self.work(), [(1, "done")])
        self.assertEqual(self.stored(), [("r", "A", 1, 10, None)])

    def test_a_lease_that_is_lost_runs_no_block(self) -> None:
        table = self.leases

        def refused(held: Lease, now: int, current: int) -> None:
            with self.assertRaises(LeaseLost) as caught, table.guard(held, now=now):
                self.fail("the block was run")
            found = caught.exception
            self.assertEqual(
                (found.resource, found.epoch, found.current), (held.resource, held.epoch, current)
            )
            self.assert_usable()

        refused(self.held, 10, 1)
        refused(self.held, 11, 1)
        refused(self.held._replace(owner="B"), 0, 1)
        refused(self.held._replace(epoch=2), 0, 1)
        refused(self.held._replace(resource="s"), 0, 0)
        newer = table.claim("r", "B", now=10, ttl=10)
        refused(self.held, 5, 2)
        table.complete(newer, "x", now=11)
        refused(newer, 11, 2)
        self.assert_usable(table)

    def test_a_released_lease_runs_no_block(self) -> None:
        self.leases.release(self.held, now=5)
        with self.assertRaises(LeaseLost), self.leases.guard(self.held, now=0):
            self.fail("the block was run")

    def test_an_exception_or_a_constraint_keeps_nothing(self) -> None:
        for bad in ("INSERT INTO work VALUES (2, NULL)", "INSERT INTO work VALUES (1, 'again')"):
            with self.assertRaises(sqlite3.IntegrityError):
                with self.leases.guard(self.held, now=0) as connection:
                    connection.execute("INSERT INTO work VALUES (1, 'done')")
                    connection.execute(bad)
        with (
            self.assertRaises(KeyboardInterrupt),
            self.leases.guard(self.held, now=0) as connection,
        ):
            connection.execute("INSERT INTO work VALUES (1, 'done')")
            raise KeyboardInterrupt
        self.assertEqual(self.work(), [])
        self.assert_usable(self.leases)

    def test_no_takeover_comes_between_the_check_and_the_commit(self) -> None:
        rival = self.table(timeout=0)
        with self.leases.guard(self.held, now=9) as connection:
            connection.execute("INSERT INTO work VALUES (1, 'done')")
            with self.assertRaisesRegex(sqlite3.OperationalError, "locked"):
                rival.claim("r", "B", now=10, ttl=10)
        self.assertEqual(rival.claim("r", "B", now=10, ttl=10), Lease("r", "B", 2, 20))

    def test_a_guarded_block_cannot_end_its_transaction_either(self) -> None:
        with self.assertRaises(sqlite3.Error), self.leases.guard(self.held, now=0) as connection:
            connection.execute("INSERT INTO work VALUES (1, 'done')")
            self.assertRaises(RuntimeError, self.leases.get, "r")
            connection.commit()
        self.assertEqual(self.work(), [])
        self.assert_usable(self.leases)


class BothTest(ContractTest):
    """A lease table and a sink together."""

    def setUp(self) -> None:
        super().setUp()
        self.leases, self.fenced = self.table(), self.sink()

    def take(self, owner: str, now: int, ttl: int = 10) -> Lease | None:
        return take_over(self.leases, self.fenced, "r", owner, now=now, ttl=ttl)

    def interposed(self, between: Callable[[], object]) -> Any:
        """Let something happen between a takeover's claim and its seal."""
        seal = self.fenced.seal

        def late(resource: str, epoch: int) -> Any:
            between()
            return seal(resource, epoch)

        return mock.patch.object(self.fenced, "seal", late)

    def both(self, resource: str) -> tuple[Any, Any]:
        return self.leases.get(resource), self.fenced.get(resource)

    def mend(self, margin: int = 10) -> list[tuple[Any, ...]]:
        return [tuple(finding) for finding in reconcile(self.leases, self.fenced, margin=margin)]


class TakeOverTest(BothTest):
    def test_no_older_write_is_accepted_once_it_has_returned(self) -> None:
        a = self.leases.claim("r", "A", now=0, ttl=10)
        self.assertEqual(self.take("B", 10), Lease("r", "B", 2, 20))
        self.assertEqual(self.sunk(), [("r", 2, 0, 0, None)])
        self.assertEqual(self.fenced.write("r", a.epoch, "old"), "stale")
        self.assertEqual(self.fenced.write("r", 2, "new"), "written")

    def test_a_refused_claim_seals_nothing(self) -> None:
        self.leases.claim("r", "A", now=0, ttl=10)
        self.assertIsNone(self.take("B", 9))
        self.assertEqual(self.sunk(), [])

    def test_it_goes_on_above_the_fence(self) -> None:
        self.fenced.write("r", 41, "of a lease table that was put back")
        self.assertEqual(self.take("B", 0), Lease("r", "B", 42, 10))
        self.assertEqual(self.sunk()[0][:3], ("r", 42, 41))
        self.assertEqual(self.fenced.write("r", 42, "new"), "written")

    def test_an_invented_epoch_is_got_above_until_the_last(self) -> None:
        a = self.take("A", 0)
        self.assertEqual(self.fenced.write("r", 1_000_000, "invented"), "written")
        self.assertEqual(self.fenced.write("r", a.epoch if a else 0, "true"), "stale")
        self.assertEqual(self.take("B", 10), Lease("r", "B", 1_000_001, 20))
        self.fenced.write("r", TOP, "the last")
        before = self.stored()
        with self.assertRaises(OverflowError):
            self.take("C", 20)
        self.assertEqual(self.stored(), before)
        self.assert_usable(self.leases)

    def test_the_seals_error_goes_on_even_if_giving_back_fails(self) -> None:
        broken = mock.Mock(spec=self.store.FencedSink)
        broken.get.return_value = None
        for error in (sqlite3.OperationalError("seal"), KeyboardInterrupt("seal")):
            broken.seal.side_effect = error
            with mock.patch.object(
                self.store.LeaseTable, "release", side_effect=sqlite3.Error("release")
            ):
                with self.assertRaisesRegex(type(error), "seal"):
                    take_over(self.leases, broken, f"{type(error)}", "B", now=0, ttl=10)
        self.assertEqual([row[3] for row in self.stored()], [10, 10])

    def test_an_interrupted_seal_gives_the_lease_back(self) -> None:
        with mock.patch.object(self.store.FencedSink, "seal", side_effect=KeyboardInterrupt):
            with self.assertRaises(KeyboardInterrupt):
                self.take("B", 5)
        self.assertEqual(self.stored(), [("r", "B", 1, 0, None)])

    def test_one_that_is_overtaken_gives_back_and_is_none(self) -> None:
        with self.interposed(partial(self.sink().seal, "r", 5)):
            self.assertIsNone(self.take("B", 0))
        self.assertEqual(self.stored(), [("r", "B", 1, 0, None)])
        self.assertEqual(self.sunk(), [("r", 5, 0, 0, None)])


class TakeOverFilesTest(BothTest, DatabaseTest):
    """Taking over where the sink's file fails, or the lease table's is put back."""

    def setUp(self) -> None:
        super().setUp()
        self.second = self.folder / "sink.db"
        self.fenced = self.opened(self.second)

    def opened(self, path: Path, **options: Any) -> Any:
        return self.enter(FencedSink(path, **options))

    def sealed(self) -> list[Any]:
        return self.plain(self.second).execute("SELECT * FROM sink").fetchall()

    def test_a_takeover_whose_seal_fails_gives_the_lease_back(self) -> None:
        old = self.leases.claim("r", "A", now=0, ttl=10)
        self.fenced.close()
        self.fenced = self.opened(self.second, timeout=0)
        other = self.plain(self.second)
        pages = other.execute("PRAGMA page_count").fetchone()[0]
        failures: list[tuple[str, Callable[[], object], Callable[[], object]]] = [
            (
                "locked",
                partial(other.execute, "BEGIN IMMEDIATE"),
                partial(other.execute, "ROLLBACK"),
            ),
            ("readonly", self.pragma("query_only = ON"), self.pragma("query_only = OFF")),
            (
                "full",
                self.pragma(f"max_page_count = {pages}"),
                self.pragma("max_page_count = 1000000"),
            ),
        ]
        for epoch, (cause, breaks, mends) in enumerate(failures, 2):
            now = 10 * epoch
            breaks()
            resource = "r" * 20_000 if cause == "full" else "r"
            with self.subTest(cause):
                with self.assertRaisesRegex(sqlite3.OperationalError, cause):
                    take_over(self.leases, self.fenced, resource, "B", now=now, ttl=10)
                self.assertEqual(self.sealed(), [])
                row = self.leases.get(resource)
                self.assertEqual(row, LeaseRow(resource, "B", row.epoch, 0, None))
                self.assertIsNone(self.leases.renew(old, now=9, ttl=10))
                self.assertIs(self.leases.complete(old, "x", now=9), False)
            mends()
        self.assertEqual(self.take("C", 0), Lease("r", "C", 4, 10))

    def pragma(self, setting: str) -> Callable[[], object]:
        return lambda: self.fenced._connection.execute(f"PRAGMA {setting}").fetchall()

    def test_one_epoch_never_has_two_holders(self) -> None:
        for rival in ("C", "B"):  # also where the other has the same name
            with self.subTest(rival):
                self.setUp()
                self.one_epoch(rival)

    def one_epoch(self, rival: str) -> None:
        self.leases.claim("r", "A", now=0, ttl=10)
        with closing(sqlite3.connect(":memory:")) as backup:
            self.plain().backup(backup)

            def put_back_and_lose() -> None:
                backup.backup(self.plain())
                other, sink = self.table(), self.opened(self.second)
                taken = take_over(other, sink, "r", rival, now=10, ttl=10)
                self.assertEqual(taken, Lease("r", rival, 2, 20))
                self.assertEqual(sink.write("r", 2, "the rival's"), "written")

            with self.interposed(put_back_and_lose):
                self.assertIsNone(self.take("B", 10))
        self.assertEqual(self.stored(), [("r", rival, 2, 20, None)])
        self.assertEqual(self.sealed(), [("r", 2, 2, 0, "the rival's")])


class ReconcileTest(BothTest):
    def test_unfinished_work_goes_above_the_higher_of_the_two(self) -> None:
        self.leases.claim("both", "A", now=5, ttl=10)
        self.fenced.write("both", 1, "v")
        self.leases.claim("fence behind", "A", now=0, ttl=10, above=6)
        self.fenced.write("lease behind", 4, "v")
        self.leases.claim("lease behind", "A", now=0, ttl=10)
        self.fenced.seal("no lease", 3)
        self.leases.claim("no fence", "A", now=0, ttl=10)
        self.assertEqual(
            self.mend(),
            [
                ("fence behind", "fence", 0, 17),
                ("lease behind", "lease", 1, 14),
                ("no fence", "fence", 0, 11),
                ("no lease", "lease", 0, 13),
            ],
        )
        for resource, epoch in (("both", 11), ("fence behind", 17), ("lease behind", 14)):
            lease_row, sink_row = self.both(resource)
            self.assertEqual(
                (lease_row.epoch, lease_row.deadline, sink_row.fence), (epoch, 0, epoch)
            )
        self.assertEqual(self.leases.get("no lease"), LeaseRow("no lease", "", 13, 0, None))
        self.assertEqual(self.fenced.get("lease behind"), SinkRow("lease behind", 14, 4, 0, "v"))

    def test_every_lease_handed_out_before_is_over(self) -> None:
        held = self.leases.claim("r", "A", now=0, ttl=10)
        self.mend()
        self.assertIsNone(self.leases.renew(held, now=0, ttl=10))
        self.assertIs(self.leases.complete(held, "x", now=0), False)
        self.assertEqual(self.fenced.write("r", held.epoch, "old"), "stale")
        self.assertEqual(self.leases.claim("r", "B", now=0, ttl=10), Lease("r", "B", 12, 10))
        self.assertEqual(self.fenced.write("r", 12, "new"), "written")

    def test_finished_work_gets_its_fence_and_names_a_lost_value(self) -> None:
        for name, written in (("kept", 1), ("lost", 0), ("older", 0), ("newer", 5)):
            held = self.leases.claim(name, "A", now=0, ttl=10, above=2 if name == "older" else 0)
            if name == "older":
                self.fenced.write(name, 2, "old")
            if written:
                self.fenced.write(name, written, "done")
            self.leases.complete(held, "done", now=1)
        leased = self.stored()
        self.assertEqual(
            self.mend(),
            [
                ("lost", "fence", 0, 1),
                ("lost", "value", 0, 1),
                ("newer", "value", 5, 1),
                ("older", "fence", 2, 3),
                ("older", "value", 2, 3),
            ],
        )
        self.assertEqual(self.stored(), leased)
        self.assertEqual(
            self.sunk(),
            [
                ("kept", 1, 1, 0, "done"),
                ("lost", 1, 0, 0, None),
                ("newer", 5, 5, 0, "done"),
                ("older", 3, 2, 0, "old"),
            ],
        )

    def test_what_cannot_be_raised_is_named_and_left(self) -> None:
        self.fenced.seal("a", TOP - 9)
        self.fenced.seal("b", TOP - 10)
        self.leases.claim("c", "A", now=0, ttl=10, above=TOP - 1)
        self.assertEqual(
            self.mend(),
            [
                ("a", "exhausted", TOP - 9, TOP),
                ("b", "lease", 0, TOP),
                ("c", "exhausted", TOP, TOP),
            ],
        )
        self.assertEqual(self.both("a"), (None, SinkRow("a", TOP - 9, 0, 0, None)))
        self.assertEqual(self.both("c"), (LeaseRow("c", "A", TOP, 10, None), None))
        self.assertEqual(self.leases.get("b").epoch, TOP)

    def test_it_answers_findings_with_a_margin_of_a_thousand(self) -> None:
        self.leases.claim("r", "A", now=0, ttl=10)
        found = reconcile(self.leases, self.fenced)
        self.assertEqual(found, [Finding("r", "fence", 0, 1001)])
        self.assertEqual(reconcile(self.leases, self.fenced), [])
        self.assertEqual(self.leases.get("r").epoch, 2001)

    def test_an_older_sink_refuses_the_old_writer_after_it(self) -> None:
        old = self.leases.claim("r", "A", now=0, ttl=10)
        new = self.leases.claim("r", "B", now=10, ttl=10)
        self.leases.complete(new, "new", now=11)  # the sink that held "new" was put back to empty
        self.assertEqual(self.mend(), [("r", "fence", 0, 2), ("r", "value", 0, 2)])
        self.assertEqual(self.fenced.write("r", old.epoch, "old"), "stale")
        self.assertEqual(self.fenced.write("r", new.epoch, "new"), "written")

    def test_many_resources_are_mended_in_order(self) -> None:
        names = [f"r{number:03}" for number in range(250)]
        for name in names[::2]:
            self.fenced.seal(name, 5)
        for name in names[1::2]:
            self.leases.claim(name, "A", now=0, ttl=1)
        self.assertEqual([found[0] for found in self.mend()], names)
        self.assertEqual([row.resource for row in self.leases.rows()], names)


class ReconcileFilesTest(BothTest, DatabaseTest):
    """Reconciling after SQLite's own backup was put back."""

    def test_an_older_lease_table_repeats_no_epoch_after_it(self) -> None:
        handed = self.restored_epochs(10)
        self.assertEqual(len(handed), len({*handed}))

    def test_the_same_backup_twice_needs_a_larger_margin(self) -> None:
        handed = self.restored_epochs(10, 10)
        self.assertLess(len({*handed}), len(handed))
        self.setUp()
        handed = self.restored_epochs(10, 30)
        self.assertEqual(len(handed), len({*handed}))

    def restored_epochs(self, *margins: int) -> list[int]:
        """Put one backup of both back before each margin; give the epochs handed out."""
        handed = [self.leases.claim("r", "A", now=0, ttl=10).epoch]
        with closing(sqlite3.connect(":memory:")) as backup:
            self.plain().backup(backup)
            handed.append(self.leases.claim("r", "B", now=10, ttl=10).epoch)
            for margin in margins:
                backup.backup(self.plain())
                self.mend(margin)
                handed += [
                    self.leases.claim("r", f"{n}", now=n * 10, ttl=10).epoch for n in range(5)
                ]
        return handed


CREATE_DOCUMENT, STORE_DOCUMENT = run_experiment.store_document("done")
READ_DOCUMENT = "SELECT resource, value FROM document ORDER BY resource"


class DocumentTest(ContractTest):
    """A test of blocks, with a table of the caller's own."""

    def store_document(self, connection: Any) -> None:
        connection.execute(CREATE_DOCUMENT)
        connection.execute(STORE_DOCUMENT)

    def documents(self, connection: Any) -> list[Any]:
        connection.execute(CREATE_DOCUMENT)
        return [tuple(row) for row in connection.execute(READ_DOCUMENT).fetchall()]


class TransactionTest(DocumentTest):
    needs = "transaction"

    def kept(self) -> list[Any]:
        with self.sink().transaction("reader", 1) as connection:
            return self.documents(connection)

    def test_a_block_and_its_fence_are_kept_together(self) -> None:
        with self.sink().transaction("r", 2) as connection:
            self.store_document(connection)
        self.assertEqual(self.sunk(), [("r", 2, 0, 0, None)])
        self.assertEqual(self.kept(), [(run_experiment.RESOURCE, "done")])

    def test_a_block_that_fails_keeps_neither(self) -> None:
        sink = self.sink()
        sink.write("r", 1, "old")
        for error in (ValueError, KeyboardInterrupt):
            with self.assertRaises(error), sink.transaction("r", 2) as connection:
                self.store_document(connection)
                raise error
        self.assertEqual(self.sunk(), [("r", 1, 1, 0, "old")])
        self.assertEqual(self.kept(), [])
        self.assertEqual(sink.write("r", 2, "new"), "written")

    def test_a_block_below_the_fence_is_not_run(self) -> None:
        sink = self.sink()
        sink.write("r", 3, "v")
        with self.assertRaises(Fenced) as caught, sink.transaction("r", 2):
            self.fail("the block was run")
        found = caught.exception
        self.assertEqual((found.resource, found.epoch, found.fence), ("r", 2, 3))
        self.assertEqual(self.sunk(), [("r", 3, 3, 0, "v")])
        self.assert_usable(sink)

    def test_a_term_of_blocks_alone_can_still_write(self) -> None:
        sink = self.sink()
        sink.write("r", 1, "old", seq=4)
        for _ in range(2):
            with sink.transaction("r", 2):
                pass
        self.assertEqual(self.sunk(), [("r", 2, 1, 4, "old")])
        self.assertEqual(sink.write("r", 1, "old", seq=5), "stale")
        self.assertEqual(sink.write("r", 2, "new"), "written")

    def test_any_other_call_inside_a_block_is_refused(self) -> None:
        sink = self.sink()
        for name in "ab":
            sink.write(name, 1, name)
        rows = sink.rows()
        self.assertEqual(next(rows).resource, "a")
        with sink.transaction("r", 1) as connection:
            for call in (
                lambda: sink.write("s", 1, "v"),
                lambda: sink.seal("s", 1),
                lambda: sink.get("s"),
                lambda: next(rows),
                lambda: next(sink.rows()),
                lambda: sink.transaction("s", 1).__enter__(),
                sink.close,
            ):
                self.assertRaises(RuntimeError, call)
            self.store_document(connection)
        self.assertEqual([row[0] for row in self.sunk()], ["a", "b", "r"])
        self.assertEqual(len(self.kept()), 1)
        self.assert_usable(sink)


class GuardedTest(DocumentTest):
    needs = "guard"

    def setUp(self) -> None:
        super().setUp()
        self.leases = self.table()
        self.held = self.leases.claim("r", "A", now=0, ttl=10)

    def kept(self) -> list[Any]:
        reader = self.leases.claim("reader", "reader", now=0, ttl=TOP)
        with self.leases.guard(reader, now=0) as connection:
            return self.documents(connection)

    def test_a_block_under_a_held_lease_is_kept(self) -> None:
        with self.leases.guard(self.held, now=9) as connection:
            self.store_document(connection)
        self.assertEqual(self.stored(), [("r", "A", 1, 10, None)])
        self.assertEqual(self.kept(), [(run_experiment.RESOURCE, "done")])

    def test_a_block_that_fails_keeps_nothing(self) -> None:
        with self.assertRaises(ValueError), self.leases.guard(self.held, now=9) as connection:
            self.store_document(connection)
            raise ValueError
        self.assertEqual(self.kept(), [])

    def test_without_the_lease_no_block_is_run(self) -> None:
        newer = self.leases.claim("s", "B", now=0, ttl=10, above=6)
        self.leases.complete(newer, "done", now=1)
        cases = [(self.held, 10, 1), (self.held._replace(owner="B"), 0, 1)]
        cases += [(self.held._replace(epoch=2), 0, 1), (self.held._replace(resource="t"), 0, 0)]
        for held, now, current in [*cases, (newer, 1, 7)]:
            with self.assertRaises(LeaseLost) as caught, self.leases.guard(held, now=now):
                self.fail("the block was run")
            found = caught.exception
            evidence = (found.resource, found.epoch, found.current)
            self.assertEqual(evidence, (held.resource, held.epoch, current))
        self.assert_usable(self.leases)

    def test_any_other_call_inside_a_block_is_refused(self) -> None:
        with self.leases.guard(self.held, now=0):
            for call in (
                lambda: self.leases.renew(self.held, now=0, ttl=20),
                lambda: self.leases.get("r"),
                lambda: next(self.leases.rows()),
                self.leases.close,
            ):
                self.assertRaises(RuntimeError, call)
        self.assert_usable(self.leases)


class ReadTest(ContractTest):
    def test_what_is_not_there_is_none(self) -> None:
        self.assertIsNone(self.table().get("r"))
        self.assertIsNone(self.sink().get("r"))
        self.assertEqual([*self.table().rows(), *self.sink().rows()], [])

    def test_get_answers_the_row_as_it_is(self) -> None:
        table, sink = self.table(), self.sink()
        table.complete(table.claim("r", "A", now=0, ttl=10), "x", now=1)
        sink.write("r", 4, "v")
        self.assertEqual(table.get("r"), LeaseRow("r", "A", 1, 10, "x"))
        self.assertEqual(sink.get("r"), SinkRow("r", 4, 4, 0, "v"))

    def test_all_rows_come_in_order_over_many_pages(self) -> None:
        table, sink = self.table(), self.sink()
        names = [f"r{number:03}" for number in range(250)]
        for name in random.Random(1).sample(names, len(names)):
            table.claim(name, "A", now=0, ttl=1)
            sink.write(name, 1, name)
        self.assertEqual(list(table.rows()), [LeaseRow(n, "A", 1, 1, None) for n in names])
        self.assertEqual(list(sink.rows()), [SinkRow(n, 1, 1, 0, n) for n in names])

    def test_values_are_tuples_that_can_be_sent(self) -> None:
        for value in (lease(), LeaseRow("r", "A", 1, 2, None), SinkRow("r", 1, 1, 0, "v")):
            self.assertEqual(pickle.loads(pickle.dumps(value)), value)
        self.assertEqual(Lease._fields, ("resource", "owner", "epoch", "deadline"))
        self.assertEqual(LeaseRow._fields, ("resource", "owner", "epoch", "deadline", "result"))
        self.assertEqual(SinkRow._fields, ("resource", "fence", "epoch", "seq", "value"))


NOT_INTS: list[Any] = [True, False, 10.0, "10", b"\x0a", None, float("nan"), float("inf"), (1,)]
NOT_NAMES: list[Any] = [1, None, b"r", True, ["r"], Path("r")]
BAD_NAMES = ["", "\0", "r\0", "\ud800", "a\udfffb"]


class ArgumentsTest(ContractTest):
    def calls(self) -> Iterator[tuple[str, Callable[[Any], object], str]]:
        """Give every public call with one argument left open, its name and its kind."""
        table, sink = self.table(), self.sink()
        held = lease()
        yield "resource", lambda x: table.claim(x, "A", now=0, ttl=1), "name"
        yield "owner", lambda x: table.claim("n", x, now=0, ttl=1), "name"
        yield "now", lambda x: table.claim("n", "A", now=x, ttl=1), "from 0"
        yield "ttl", lambda x: table.claim("n", "A", now=0, ttl=x), "from 1"
        yield "above", lambda x: table.claim("n", "A", now=0, ttl=1, above=x), "from 0"
        yield "resource", lambda x: table.advance(x, 1), "name"
        yield "epoch", lambda x: table.advance("n", x), "from 1"
        if hasattr(table, "guard"):
            yield "now", lambda x: table.guard(held, now=x), "from 0"
        yield "seq", lambda x: sink.write("n", 1, "v", seq=x), "from 0"
        yield "resource", lambda x: sink.seal(x, 1), "name"
        yield "epoch", lambda x: sink.seal("n", x), "from 1"
        yield "margin", lambda x: reconcile(table, sink, margin=x), "from 1"
        yield "now", lambda x: table.renew(held, now=x, ttl=1), "from 0"
        yield "ttl", lambda x: table.renew(held, now=0, ttl=x), "from 1"
        yield "result", lambda x: table.complete(held, x, now=0), "text"
        yield "now", lambda x: table.complete(held, "x", now=x), "from 0"
        yield "now", lambda x: table.release(held, now=x), "from 0"
        yield "resource", table.get, "name"
        yield "resource", lambda x: sink.write(x, 1, "v"), "name"
        yield "epoch", lambda x: sink.write("n", x, "v"), "from 1"
        yield "value", lambda x: sink.write("n", 1, x), "text"
        if hasattr(sink, "transaction"):
            yield "resource", lambda x: sink.transaction(x, 1), "name"
            yield "epoch", lambda x: sink.transaction("n", x), "from 1"
        yield "resource", sink.get, "name"
        for field in ("resource", "owner"):
            yield (
                f"lease.{field}",
                partial(self.release_with, table, field),
                "name",
            )
        yield "lease.epoch", lambda x: table.renew(held._replace(epoch=x), now=0, ttl=1), "from 1"
        yield (
            "lease.deadline",
            lambda x: table.complete(held._replace(deadline=x), "x", now=0),
            "from 0",
        )

    @staticmethod
    def release_with(table: LeaseTable, field: str, value: Any) -> bool:
        return table.release(lease()._replace(**{field: value}), now=0)

    def test_c06_only_plain_ints_and_proper_strings_pass(self) -> None:
        asked, calls = 0, list(self.calls())
        for argument, call, kind in calls:
            wrong = {"name": (NOT_NAMES, BAD_NAMES), "text": (NOT_NAMES, BAD_NAMES[1:])}
            low = {"from 0": [-1, -TOP], "from 1": [0, -1]}.get(kind, [])
            types, values = wrong.get(kind, (NOT_INTS, [*low, 2**63, 2**80]))
            for error, cases in ((TypeError, types), (ValueError, values)):
                for case in cases:
                    with self.subTest(argument=argument, case=case):
                        self.assertRaisesRegex(error, argument, call, case)
                        asked += 1
        kinds = [kind for _, _, kind in calls]
        self.assertGreaterEqual(kinds.count("name"), 9)
        self.assertGreaterEqual(len(kinds), 25)
        self.assertEqual(asked, sum({"name": 11, "text": 10}.get(kind, 13) for kind in kinds))
        self.assertEqual(self.stored() + self.sunk(), [])

    def test_a_wrong_number_is_named_with_its_value(self) -> None:
        with self.assertRaisesRegex(ValueError, r"ttl .*-7"):
            self.table().claim("r", "A", now=0, ttl=-7)
        with self.assertRaisesRegex(ValueError, rf"epoch .*{2**63}"):
            self.sink().write("r", 2**63, "v")

    def test_c07_a_deadline_fits_or_nothing_is_written(self) -> None:
        table = self.table()
        self.assertEqual(table.claim("m", "A", now=TOP - 5, ttl=5), Lease("m", "A", 1, TOP))
        for now, ttl in ((TOP, 1), (TOP - 5, 6), (1, TOP)):
            with self.assertRaisesRegex(ValueError, r"now \+ ttl"):
                table.claim("n", "A", now=now, ttl=ttl)
            with self.assertRaisesRegex(ValueError, r"now \+ ttl"):
                table.renew(lease("A", 1, "m"), now=now, ttl=ttl)
        self.assertEqual(self.stored(), [("m", "A", 1, TOP, None)])

    def test_c07_the_last_epoch_is_never_raised(self) -> None:
        table = self.table()
        table.claim("m", "A", now=0, ttl=10)
        table.release(lease("A", 1, "m"), now=0)
        table.claim("m", "A", now=0, ttl=10, above=TOP - 1)
        self.assertIsNone(table.claim("m", "B", now=9, ttl=10))
        with self.assertRaisesRegex(OverflowError, "'m'"):
            table.claim("m", "B", now=10, ttl=10)
        self.assertEqual(self.stored(), [("m", "A", TOP, 10, None)])
        self.assert_usable(table)

    def test_the_last_epoch_can_still_be_written(self) -> None:
        sink = self.sink()
        self.assertEqual(sink.write("r", TOP, "v"), "written")
        self.assertEqual(sink.seal("r", TOP), "replay")
        self.assertEqual(self.sunk(), [("r", TOP, TOP, 0, "v")])

    def test_a_lease_must_be_a_lease(self) -> None:
        table = self.table()
        table.claim("r", "A", now=0, ttl=10)
        row: Any
        for row in (
            ("r", "A", 1, 10),
            LeaseRow("r", "A", 1, 10, None),
            None,
            "r",
            ["r", "A", 1, 10],
        ):
            for call in (
                lambda x: table.renew(x, now=0, ttl=1),
                lambda x: table.complete(x, "x", now=0),
                lambda x: table.release(x, now=0),
                *([lambda x: table.guard(x, now=0)] if hasattr(table, "guard") else []),
            ):
                self.assertRaisesRegex(TypeError, "lease must be a Lease", call, row)
        self.assertEqual(self.stored(), [("r", "A", 1, 10, None)])

    def test_ticks_and_names_of_the_calls_are_keywords(self) -> None:
        with self.assertRaises(TypeError):
            self.table().claim("r", "A", 0, 1)
        with self.assertRaises(TypeError):
            self.store.LeaseTable(self.places[0], 1)

    def test_a_timeout_is_finite_and_not_negative(self) -> None:
        kinds = (self.store.LeaseTable, self.store.FencedSink)
        for kind, place in zip(kinds, self.places, strict=True):
            for wrong in (True, "1", None, b"1"):
                with self.assertRaisesRegex(TypeError, "timeout"):
                    kind(place, timeout=wrong)
            for value in (-1, -0.1, float("nan"), float("inf"), float("-inf")):
                with self.assertRaisesRegex(ValueError, "timeout"):
                    kind(place, timeout=value)
            for value in (0, 0.0, 3, 10**400):
                kind(place, timeout=value).close()

    def test_errors_share_a_base_and_carry_their_evidence(self) -> None:
        error = pickle.loads(pickle.dumps(Fenced("r", 1, 2)))
        self.assertIsInstance(error, LeasesError)
        self.assertEqual((error.resource, error.epoch, error.fence), ("r", 1, 2))
        self.assertRegex(str(error), r"'r'.*1.*2")
        lost = pickle.loads(pickle.dumps(LeaseLost("r", 1, 2)))
        self.assertIsInstance(lost, LeasesError)
        self.assertEqual((lost.resource, lost.epoch, lost.current), ("r", 1, 2))
        self.assertRegex(str(lost), r"'r'.*1.*2")


class BlockTest(DatabaseTest):
    """`transaction`: a block's SQL and the fence stay together or go together."""

    def setUp(self) -> None:
        super().setUp()
        self.business = self.sink()
        self.plain().execute("CREATE TABLE work (id INTEGER PRIMARY KEY, text TEXT NOT NULL)")

    def work(self) -> list[Any]:
        return self.stored("SELECT id, text FROM work ORDER BY id")

    def insert(self, connection: sqlite3.Connection, number: int = 1) -> None:
        connection.execute("INSERT INTO work VALUES (?, 'done')", (number,))

    def test_a_block_raises_the_fence_and_keeps_its_sql(self) -> None:
        with self.business.transaction("r", 2) as connection:
            self.insert(connection)
            self.assertEqual(self.work(), [])
        self.assertEqual(self.work(), [(1, "done")])
        self.assertEqual(self.sunk(), [("r", 2, 0, 0, None)])

    def test_a_block_below_the_fence_is_not_run(self) -> None:
        self.business.write("r", 3, "v")
        for epoch in (1, 2):
            with self.assertRaises(Fenced) as caught, self.business.transaction("r", epoch):
                self.fail("the block was run")
            found = caught.exception
            self.assertEqual((found.resource, found.epoch, found.fence), ("r", epoch, 3))
        self.assertEqual(self.sunk(), [("r", 3, 3, 0, "v")])
        self.assert_usable(self.business)

    def test_several_blocks_of_one_term_are_admitted(self) -> None:
        for number in (1, 2, 3):
            with self.business.transaction("r", 2) as connection:
                self.insert(connection, number)
        self.assertEqual(len(self.work()), 3)
        self.assertEqual(self.sunk(), [("r", 2, 0, 0, None)])

    def test_a_term_of_blocks_alone_can_still_write(self) -> None:
        self.business.write("r", 1, "old")
        with self.business.transaction("r", 2):
            pass
        self.assertEqual(self.sunk(), [("r", 2, 1, 0, "old")])
        self.assertEqual(self.business.write("r", 1, "old"), "stale")
        self.assertEqual(self.business.write("r", 2, "old"), "written")
        self.assertEqual(self.business.write("r", 2, "other"), "conflict")
        self.assertEqual(self.sunk(), [("r", 2, 2, 0, "old")])

    def test_a_block_after_a_write_keeps_the_value(self) -> None:
        self.business.write("r", 2, "v")
        for epoch in (2, 3):
            with self.business.transaction("r", epoch):
                pass
            self.assertEqual(self.sunk(), [("r", epoch, 2, 0, "v")])

    def test_any_exception_rolls_back_the_fence_and_the_sql(self) -> None:
        class Odd(BaseException):
            pass

        self.business.write("r", 1, "v")
        for error in (ValueError, KeyboardInterrupt, SystemExit, GeneratorExit, StopIteration, Odd):
            with self.subTest(error=error), self.assertRaises(error):
                with self.business.transaction("r", 2) as connection:
                    self.insert(connection)
                    raise error
            self.assertEqual(self.work(), [])
            self.assertEqual(self.sunk()[0], ("r", 1, 1, 0, "v"))
            self.assert_usable()
        self.assert_usable(self.business)

    def test_a_failing_statement_of_the_block_rolls_back_all(self) -> None:
        with (
            self.assertRaises(sqlite3.IntegrityError),
            self.business.transaction("r", 2) as connection,
        ):
            self.insert(connection)
            connection.execute("INSERT INTO work VALUES (2, NULL)")
        self.assertEqual(self.work() + self.sunk(), [])
        self.assert_usable(self.business)

    def test_a_statement_that_failed_may_be_survived(self) -> None:
        with self.business.transaction("r", 2) as connection:
            self.insert(connection)
            with self.assertRaises(sqlite3.IntegrityError):
                self.insert(connection)
            self.insert(connection, 2)
        self.assertEqual(self.work(), [(1, "done"), (2, "done")])

    def test_a_constraint_that_fails_at_the_commit_keeps_nothing(self) -> None:
        deferred = "INTEGER REFERENCES work DEFERRABLE INITIALLY DEFERRED"
        self.plain().execute(f"CREATE TABLE part (work {deferred})")
        connection: Any = self.business._connection
        connection.execute("PRAGMA foreign_keys = ON")
        with self.assertRaisesRegex(sqlite3.IntegrityError, "FOREIGN KEY.*leases.db"):
            with self.business.transaction("r", 2) as connection:
                connection.execute("INSERT INTO part VALUES (7)")
        self.assertEqual(self.sunk() + self.stored("SELECT * FROM part"), [])
        self.assert_usable(self.business)

    ENDINGS: ClassVar[dict[str, Callable[[Any], object]]] = {
        "commit()": lambda c: c.commit(),
        "rollback()": lambda c: c.rollback(),
        "executescript()": lambda c: c.executescript("SELECT 1;"),
        "with connection": lambda c: c.__exit__(None, None, None),
        "isolation_level = None": lambda c: setattr(c, "isolation_level", None),
        "isolation_level = DEFERRED": lambda c: setattr(c, "isolation_level", "DEFERRED"),
        "COMMIT": lambda c: c.execute("COMMIT"),
        "commented": lambda c: c.execute("/* a */ -- b\n commit transaction"),
        "END": lambda c: c.execute("END"),
        "ROLLBACK": lambda c: c.execute("ROLLBACK"),
        "BEGIN": lambda c: c.execute("BEGIN"),
        "SAVEPOINT": lambda c: c.execute("SAVEPOINT s"),
        "RELEASE": lambda c: c.execute("RELEASE s"),
        "cursor": lambda c: c.cursor().execute("COMMIT"),
    }
    if sys.version_info >= (3, 12):
        ENDINGS["autocommit = True"] = lambda c: setattr(c, "autocommit", True)
        ENDINGS["autocommit = False"] = lambda c: setattr(c, "autocommit", False)

    def test_a_block_cannot_end_its_own_transaction(self) -> None:
        for (name, end), survived in itertools.product(self.ENDINGS.items(), (False, True)):
            with self.subTest(name, survived=survived):
                survives = contextlib.suppress(*[sqlite3.Error] * survived)
                with (
                    self.assertRaises(sqlite3.Error),
                    self.business.transaction("r", 2) as connection,
                ):
                    self.insert(connection)
                    with survives:
                        end(connection)
                        self.assertNotIn(
                            "COMMIT", name.upper().split("(")[0].split(), "not refused"
                        )
                    with contextlib.suppress(sqlite3.Error):
                        self.insert(connection, 2)
                self.assertEqual(self.work(), [])
                self.assertEqual(self.sunk(), [])
                self.assert_usable()
        with self.business.transaction("r", 2) as connection:
            self.insert(connection)
        self.assertEqual(self.work(), [(1, "done")])
        self.assert_usable(self.business)

    def test_after_sqlites_own_rollback_nothing_more_is_run(self) -> None:
        self.plain().executescript(
            "CREATE TRIGGER stop BEFORE INSERT ON work WHEN new.id = 9 "
            "BEGIN SELECT RAISE(ROLLBACK, 'no'); END;"
        )
        for fatal in (
            "INSERT OR ROLLBACK INTO work VALUES (1, NULL)",
            "INSERT INTO work VALUES (9, '')",
        ):
            with (
                self.subTest(fatal),
                self.assertRaisesRegex(sqlite3.Error, "nothing of it was kept"),
            ):
                with self.business.transaction("r", 2) as connection:
                    self.insert(connection)
                    connection.execute("UPDATE work SET text = 'more'")
                    with self.assertRaises(sqlite3.IntegrityError):
                        connection.execute(fatal)
                    for sql in (
                        "INSERT INTO work VALUES (3, 'unfenced')",
                        "UPDATE work SET text = 'more'",
                        "WITH w AS (SELECT 4) INSERT INTO work SELECT *, 'unfenced' FROM w",
                        "CREATE TABLE unfenced (x)",
                        "SELECT 1",
                        "BEGIN",
                        "SAVEPOINT s",
                    ):
                        with self.assertRaises(sqlite3.Error):
                            connection.execute(sql)
                    with self.assertRaises(RuntimeError):
                        self.business.write("s", 1, "v")
            self.assertEqual(self.work() + self.sunk(), [])
        self.assert_usable(self.business)

    def test_what_a_block_sets_is_reset_after_it(self) -> None:
        with self.business.transaction("r", 1) as connection:
            connection.row_factory = sqlite3.Row
            connection.text_factory = bytes
        self.business.write("r", 1, "v")
        self.assertEqual(self.business.get("r"), SinkRow("r", 1, 1, 0, "v"))

    def test_a_block_whose_connection_was_closed_keeps_nothing(self) -> None:
        with (
            self.assertRaises(sqlite3.ProgrammingError),
            self.business.transaction("r", 1) as connection,
        ):
            self.insert(connection)
            connection.close()
        self.assertEqual(self.work() + self.sunk(), [])

    def test_a_lent_connection_used_later_opens_nothing_for_long(self) -> None:
        with self.business.transaction("r", 1) as connection:
            pass
        self.insert(connection)
        self.assertEqual(self.business.write("r", 1, "v"), "written")
        self.assertEqual(self.work(), [])

    def test_a_block_that_was_never_left_is_rolled_back(self) -> None:
        block = self.business.transaction("r", 1)
        self.insert(block.__enter__())
        del block
        self.assertEqual(self.work() + self.sunk(), [])
        self.assert_usable(self.business)


class OpeningTest(DatabaseTest):
    def test_odd_characters_are_part_of_the_name(self) -> None:
        for name in ("a b", "a#b", "a?mode=memory", "a%20b", "file:x", "é", ":memory:", "'"):
            path = self.folder / name
            with self.subTest(name), LeaseTable(path) as table:
                table.claim("r", "A", now=0, ttl=1)
                self.assertTrue(path.is_file())
                rows = self.plain(path).execute("SELECT resource FROM lease").fetchall()
                self.assertEqual(rows, [("r",)])

    def test_a_path_is_fixed_when_the_object_is_made(self) -> None:
        before = Path.cwd()
        self.addCleanup(os.chdir, before)
        os.chdir(self.folder)
        with LeaseTable("leases.db") as table:
            os.chdir(before)
            table.claim("r", "A", now=0, ttl=1)
            self.assertEqual(self.stored(), [("r", "A", 1, 1, None)])
            self.assertIn(str(self.path.resolve()), str(self.error_of(table)))

    def error_of(self, table: LeaseTable) -> sqlite3.Error:
        self.plain().execute("DROP TABLE lease")
        with self.assertRaises(sqlite3.OperationalError) as caught:
            table.get("r")
        return caught.exception

    def test_memory_is_private_to_the_object(self) -> None:
        with LeaseTable(":memory:") as one, LeaseTable(":memory:") as other:
            one.claim("r", "A", now=0, ttl=1)
            self.assertIsNone(other.get("r"))

    def test_a_path_called_memory_is_a_file(self) -> None:
        self.addCleanup(os.chdir, Path.cwd())
        os.chdir(self.folder)
        with LeaseTable(Path(":memory:")):
            self.assertTrue((self.folder / ":memory:").is_file())

    def test_what_is_no_path_is_refused(self) -> None:
        wrong: Any
        for wrong in (1, None, b"x", True):
            self.assertRaises(TypeError, LeaseTable, wrong)
        self.assertRaises(ValueError, LeaseTable, "")
        self.assertRaises(ValueError, FencedSink, "")

    def test_a_file_that_cannot_serve_is_named_with_the_cause(self) -> None:
        (self.folder / "text").write_text(
            "this is no database, but it is long enough to be one" * 20
        )
        self.plain(self.folder / "other").executescript(
            "CREATE TABLE lease (x); CREATE TABLE sink (x)"
        )
        (self.folder / "sub").mkdir()
        causes = {"text": "not a database", "other": "columns", "sub": "unable", "none/x": "unable"}
        for kind, (name, cause) in itertools.product((LeaseTable, FencedSink), causes.items()):
            path = self.folder / name
            with self.subTest(name), self.assertRaises(sqlite3.Error) as caught:
                kind(path)
            self.assertIn(cause, str(caught.exception))
            self.assertIn(str(path), str(caught.exception))

    def test_a_table_with_almost_the_right_columns_is_refused(self) -> None:
        columns = ["resource", "owner", "epoch", "deadline", "result"]
        for wrong in (columns[:-1], [*columns, "more"], ["RESOURCE", *columns[1:]]):
            path = self.folder / f"{len(wrong)}{wrong[0]}"
            self.plain(path).execute(f"CREATE TABLE lease ({', '.join(wrong)})")
            with self.subTest(wrong), self.assertRaisesRegex(sqlite3.OperationalError, "columns"):
                LeaseTable(path)

    def test_a_file_that_cannot_be_written_says_so(self) -> None:
        table, sink = self.table(), self.sink()
        granted = table.claim("r", "A", now=0, ttl=10)
        for opened in (table, sink):
            connection: Any = opened._connection
            connection.execute("PRAGMA query_only = ON")  # as a read-only file, also for root
        for call in writing(table, sink, granted):
            self.assertRaisesRegex(sqlite3.OperationalError, "readonly.*leases.db", call)
        self.assertEqual(table.get("r"), LeaseRow("r", "A", 1, 10, None))
        self.assertEqual(self.stored() + self.sunk(), [("r", "A", 1, 10, None)])
        self.assert_usable()

    def test_the_sink_works_without_any_lease_table(self) -> None:
        self.assertEqual(self.sink().write("r", 7, "x"), "written")
        self.assertEqual(
            self.stored("SELECT name FROM sqlite_master WHERE type = 'table'"), [("sink",)]
        )

    def test_no_lock_is_held_between_two_rows(self) -> None:
        table, other = self.table(), self.plain()
        for name in "abc":
            table.claim(name, "A", now=0, ttl=1)
        seen = []
        for row in table.rows():
            other.execute("BEGIN EXCLUSIVE")
            other.execute("COMMIT")
            self.assertIsNotNone(table.claim(f"{row.resource}z", "B", now=0, ttl=1))
            seen.append(row.resource)
            if len(seen) > 20:
                break
        self.assertEqual(seen[:3], ["a", "b", "c"])

    def test_rows_of_a_closed_object_raise(self) -> None:
        table = self.table()
        for name in "ab":
            table.claim(name, "A", now=0, ttl=1)
        rows = table.rows()
        next(rows)
        table.close()
        with self.assertRaises(sqlite3.ProgrammingError):
            next(rows)

    def test_opening_again_keeps_what_is_there(self) -> None:
        self.table().claim("r", "A", now=0, ttl=1)
        for _ in range(3):
            self.table()
            self.sink()
        self.assertEqual(self.stored(), [("r", "A", 1, 1, None)])

    def test_commits_are_durable_and_logged_ahead(self) -> None:
        with self.sink().transaction("r", 1) as connection:
            self.assertEqual(connection.execute("PRAGMA synchronous").fetchone(), (3,))
            self.assertEqual(connection.execute("PRAGMA journal_mode").fetchone(), ("wal",))

    def test_the_schema_is_whole_and_refuses_other_types(self) -> None:
        self.table()
        self.sink()
        plain = self.plain()
        sql = dict(self.stored("SELECT name, sql FROM sqlite_master WHERE type = 'table'"))
        self.assertIn("WITHOUT ROWID", sql["lease"])
        self.assertNotIn("WITHOUT ROWID", sql["sink"])
        for wrong in (
            "INSERT INTO lease VALUES ('r', 'A', 9223372036854775808, 1, NULL)",
            "INSERT INTO lease VALUES ('r', 'A', 'x', 1, NULL)",
            "INSERT INTO lease VALUES ('r', 'A', 0, 1, NULL)",
            "INSERT INTO lease VALUES ('r', 'A', 1, x'0a', NULL)",
            "INSERT INTO lease VALUES (NULL, 'A', 1, 1, NULL)",
            "INSERT INTO sink VALUES ('r', 1.5, 1, 0, 'v')",
            "INSERT INTO sink VALUES ('r', 1, 2, 0, 'v')",
            "INSERT INTO sink VALUES ('r', 1, 1, 0, NULL)",
            "INSERT INTO sink VALUES ('r', 1, 0, 0, 'v')",
        ):
            with self.subTest(wrong), self.assertRaises(sqlite3.IntegrityError):
                plain.execute(wrong)

    def test_closing_twice_is_fine_and_using_after_is_not(self) -> None:
        with LeaseTable(self.path) as table, FencedSink(self.path) as sink:
            pass
        for opened in (table, sink):
            opened.close()
            opened.close()
        for call in (
            lambda: table.claim("r", "A", now=0, ttl=1),
            lambda: table.get("r"),
            lambda: sink.write("r", 1, "v"),
            lambda: sink.transaction("r", 1).__enter__(),
            lambda: next(sink.rows()),
        ):
            self.assertRaises(sqlite3.ProgrammingError, call)


class WaitingTest(DatabaseTest):
    """A busy database is waited for, up to the timeout, and then nothing has changed."""

    def held(self, how: str = "BEGIN IMMEDIATE") -> sqlite3.Connection:
        other = self.plain()
        other.execute(how)
        return other

    def rollback_journal(self) -> Any:
        """Open as on a file system that takes no write-ahead log."""
        return mock.patch.object(leases, "WRITE_AHEAD", "PRAGMA journal_mode = DELETE")

    def test_every_writing_call_waits_and_succeeds(self) -> None:
        table, sink = self.table(), self.sink()
        granted = table.claim("r", "A", now=0, ttl=10)
        for call in writing(table, sink, granted):
            other = self.held()
            with waiting(Time(other.rollback)) as time:
                call()
            self.assertGreaterEqual(time.sleeps, 1)

    def test_a_call_gives_up_at_its_timeout_unchanged(self) -> None:
        table, sink = self.table(timeout=2), self.sink(timeout=2)
        granted = table.claim("r", "A", now=0, ttl=10)
        before = self.stored()
        other = self.held()
        call: Callable[[], object]
        for call in writing(table, sink, granted):
            with waiting(Time()) as time, self.assertRaises(sqlite3.OperationalError) as caught:
                call()
            self.assertRegex(str(caught.exception), "database is locked.*leases.db")
            self.assertTrue(1002 <= time.now <= 1002.1, time.now)
        other.execute("ROLLBACK")
        self.assertEqual(self.stored() + self.sunk(), before)
        self.assert_usable(table, sink)

    def test_without_a_timeout_a_call_fails_at_once(self) -> None:
        table = self.table(timeout=0)
        self.held()
        with waiting(Time()) as time, self.assertRaises(sqlite3.OperationalError):
            table.claim("r", "A", now=0, ttl=1)
        self.assertEqual(time.sleeps, 0)

    def test_c09_opening_waits_while_another_creates(self) -> None:
        for kind in (LeaseTable, FencedSink):
            self.path = self.folder / kind.__name__
            other = self.held()
            with waiting(Time(other.rollback)) as time:
                kind(self.path, timeout=3).close()
            self.assertGreaterEqual(time.sleeps, 1)

    def test_c09_opening_gives_up_at_its_timeout(self) -> None:
        self.held()
        with waiting(Time()) as time, self.assertRaisesRegex(sqlite3.OperationalError, "locked"):
            LeaseTable(self.path, timeout=2)
        self.assertTrue(1002 <= time.now <= 1002.1, time.now)

    def test_reading_waits_on_a_rollback_journal(self) -> None:
        with self.rollback_journal():
            table = self.table()
        table.claim("r", "A", now=0, ttl=10)
        read: Callable[[], object]
        for read in (lambda: table.get("r"), lambda: next(table.rows())):
            other = self.held("BEGIN EXCLUSIVE")
            with waiting(Time(other.rollback)) as time:
                self.assertEqual(read(), LeaseRow("r", "A", 1, 10, None))
            self.assertGreaterEqual(time.sleeps, 1)

    def test_committing_waits_on_a_rollback_journal(self) -> None:
        with self.rollback_journal():
            table, sink = self.table(), self.sink()
        table.claim("r", "A", now=0, ttl=10)

        def block() -> None:
            with sink.transaction("r", 1):
                pass

        call: Callable[[], object]
        for call in (lambda: table.claim("s", "A", now=0, ttl=10), block):
            reader = self.held("BEGIN")
            reader.execute("SELECT * FROM lease").fetchall()
            with waiting(Time(reader.rollback)) as time:
                call()
            self.assertGreaterEqual(time.sleeps, 1)
        self.assertEqual([row[0] for row in self.stored()], ["r", "s"])
        self.assertEqual(self.sunk(), [("r", 1, 0, 0, None)])

    def test_a_commit_that_gives_up_has_changed_nothing(self) -> None:
        with self.rollback_journal():
            table = self.table(timeout=1)
        table.claim("r", "A", now=0, ttl=10)
        reader = self.held("BEGIN")
        reader.execute("SELECT * FROM lease").fetchall()
        with waiting(Time()) as time, self.assertRaises(sqlite3.OperationalError):
            table.claim("s", "A", now=0, ttl=10)
        self.assertTrue(1001 <= time.now <= 1001.1, time.now)
        reader.execute("ROLLBACK")
        self.assertEqual([row[0] for row in self.stored()], ["r"])
        self.assert_usable(table)

    def slept(self, random: int) -> list[float]:
        """Let a call give up while each random byte is the same, and answer its sleeps."""
        table = self.table(timeout=1)
        other = self.held()
        with waiting(Time()) as time, self.assertRaises(sqlite3.OperationalError):
            with mock.patch("os.urandom", lambda count: bytes([random]) * count):
                table.claim("r", "A", now=0, ttl=1)
        other.close()
        slept: list[float] = time.slept
        return slept

    def test_who_has_waited_longest_tries_most_often(self) -> None:
        bounds = self.slept(255)
        self.assertEqual(bounds, sorted(bounds, reverse=True))
        self.assertLess(20 * bounds[50], 1.001 * bounds[0])  # a newcomer steps back this far
        self.assertGreater(bounds[1], bounds[2])  # and comes nearer with each try
        self.assertEqual(len(set(bounds[50:])), 1)  # down to a rest that leaves others the cores
        self.assertTrue(0 < bounds[-1] <= bounds[0] <= 0.02, bounds)

    def test_two_that_began_together_try_apart(self) -> None:
        sides = self.slept(255), self.slept(51), self.slept(0)
        for bound, fifth, none in zip(*sides, strict=False):  # a shorter sleep, more of them
            self.assertAlmostEqual(fifth, bound / 5)
            self.assertEqual(none, 0)

    def test_a_refused_claim_waits_too_rather_than_guess(self) -> None:
        table = self.table(timeout=1)
        table.claim("r", "A", now=0, ttl=10)
        self.held()
        with waiting(Time()), self.assertRaises(sqlite3.OperationalError):
            table.claim("r", "B", now=0, ttl=10)

    def test_other_errors_are_not_waited_for(self) -> None:
        table = self.table()
        self.plain().execute("DROP TABLE lease")
        with waiting(Time()) as time, self.assertRaises(sqlite3.OperationalError):
            table.get("r")
        self.assertEqual(time.sleeps, 0)


class TroubleTest(DatabaseTest):
    """C08: after any error no transaction is open and the object works on."""

    def test_c08_an_aborting_trigger_leaves_nothing_open(self) -> None:
        table, sink, plain = self.table(), self.sink(), self.plain()
        granted = table.claim("r", "A", now=0, ttl=10)
        for how in ("ABORT", "FAIL", "ROLLBACK"):
            for event in ("INSERT ON lease", "UPDATE ON lease", "INSERT ON sink"):
                name = f"{how}_{event.replace(' ', '_')}"
                when = "WHEN new.resource NOT LIKE 'usable%'"
                then = f"BEGIN SELECT RAISE({how}, 'no'); END"
                plain.execute(f"CREATE TRIGGER {name} BEFORE {event} {when} {then}")
            for call in writing(table, sink, granted):
                self.assertRaisesRegex(sqlite3.IntegrityError, "no.*leases.db", call)
                self.assertEqual(self.stored() + self.sunk(), [("r", "A", 1, 10, None)])
                self.assert_usable()
            for (trigger,) in self.stored("SELECT name FROM sqlite_master WHERE type = 'trigger'"):
                plain.execute(f"DROP TRIGGER {trigger}")
        self.assert_usable(table, sink)

    def test_the_fence_and_the_value_stand_or_fall_together(self) -> None:
        sink, plain = self.sink(), self.plain()
        sink.write("r", 1, "old")
        for column in ("value", "fence"):
            plain.execute(
                f"CREATE TRIGGER no BEFORE UPDATE OF {column} ON sink "
                f"WHEN new.{column} IS NOT old.{column} BEGIN SELECT RAISE(FAIL, 'no'); END"
            )
            with self.assertRaises(sqlite3.IntegrityError):
                sink.write("r", 2, "new")
            self.assertEqual(self.sunk(), [("r", 1, 1, 0, "old")])
            plain.execute("DROP TRIGGER no")
        self.assertEqual(sink.write("r", 2, "new"), "written")

    def test_c08_a_busy_database_or_a_bad_name_leaves_nothing_open(self) -> None:
        table, other = self.table(timeout=0), self.plain()
        other.execute("BEGIN IMMEDIATE")
        self.assertRaises(sqlite3.OperationalError, table.claim, "r", "A", now=0, ttl=1)
        other.execute("ROLLBACK")
        self.assertRaises(ValueError, table.claim, "\ud800", "A", now=0, ttl=1)
        self.assert_usable(table)
        self.assertEqual([row[0] for row in self.stored()], ["usable0"])

    def test_an_interrupt_at_any_line_leaves_nothing_open(self) -> None:
        table, sink = self.table(), self.sink()
        granted = table.claim("r", "A", now=0, ttl=10)

        def block() -> None:
            with sink.transaction("r", 1) as connection:
                connection.execute("SELECT 1").fetchall()

        for call in (
            lambda: table.claim("r", "B", now=0, ttl=1),
            lambda: table.renew(granted, now=0, ttl=20),
            lambda: sink.write("r", 1, "v"),
            block,
        ):
            for line in itertools.count(1):
                if not self.interrupted(call, line):
                    break
                self.assert_usable()
            self.assertGreater(line, 10)
        self.assert_usable(table, sink)

    def interrupted(self, call: Callable[[], object], line: int) -> bool:
        """Raise KeyboardInterrupt at the nth line of the library that the call runs."""
        lines = itertools.count(1)

        def trace(frame: Any, event: str, _: object) -> Any:
            if frame.f_code.co_filename != leases.__file__:
                return None
            if event == "line" and next(lines) == line and not self.cleans_up(frame):
                raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            call()
        except (KeyboardInterrupt, sqlite3.DatabaseError):
            pass  # sqlite3 makes an interrupt in an authorizer into "not authorized"
        finally:
            sys.settrace(before)
        return next(lines) > line

    @staticmethod
    def cleans_up(frame: Any) -> bool:
        """Tell whether a line is part of the clean-up itself, which nothing can guard in turn.

        Nor does Python handle a signal between `try:` and the first line that it guards.
        """
        lines = Path(leases.__file__).read_text(encoding="utf-8").splitlines()
        code = lines[frame.f_lineno - 1].strip()
        clean_up = ("_roll_back", "_take_back", "_refuse_fork")
        return frame.f_code.co_name in clean_up or code in (
            "try:",
            "self._inside = False",
            "self._refuse_fork()",
            "kept = _take_back(connection)",
        )

    def test_a_full_disk_leaves_nothing_open(self) -> None:
        sink = self.sink()
        connection: Any = sink._connection
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count = {pages + 2}").fetchall()
        self.assertRaisesRegex(sqlite3.OperationalError, "full", sink.write, "r", 1, "v" * 100_000)
        with (
            self.assertRaisesRegex(sqlite3.OperationalError, "full"),
            sink.transaction("r", 1) as block,
        ):
            block.execute("CREATE TABLE big AS SELECT zeroblob(100000)")
        self.assertEqual(self.sunk(), [])
        self.assert_usable(sink)

    @unittest.skipUnless(hasattr(os, "fork"), "this platform has no fork")
    def test_an_object_does_not_work_in_a_forked_process(self) -> None:
        table, sink = self.table(), self.sink()
        for name in "ab":
            table.claim(name, "A", now=0, ttl=10)
        rows = table.rows()
        next(rows)

        def check() -> None:
            for call in (
                lambda: table.claim("s", "A", now=0, ttl=1),
                lambda: table.get("a"),
                lambda: next(rows),
                lambda: next(table.rows()),
                lambda: sink.transaction("r", 1).__enter__(),
            ):
                self.assertRaisesRegex(RuntimeError, "fork", call)
            table.close()
            sink.close()
            table._connection.execute("SELECT 1")  # still open: it is not this process's to close

        self.assertEqual(self.forked(check), 0)
        with sink.transaction("r", 1):
            self.assertEqual(self.forked(lambda: self.assertRaises(RuntimeError, sink.get, "r")), 0)
        self.assert_usable(table, sink)
        self.assertEqual([row[0] for row in self.stored()], ["a", "b", "usable0"])

    @unittest.skipUnless(hasattr(os, "fork"), "this platform has no fork")
    def test_a_fork_inside_a_block_commits_once(self) -> None:
        sink = self.sink()
        sink.write("r", 1, "v")

        def leave() -> None:
            with self.assertRaisesRegex(RuntimeError, "fork"):
                block.__exit__(None, None, None)

        block = sink.transaction("r", 2)
        block.__enter__()
        self.assertEqual(self.forked(leave), 0)
        self.assertEqual(self.sunk(), [("r", 1, 1, 0, "v")])
        block.__exit__(None, None, None)
        self.assertEqual(self.sunk(), [("r", 2, 1, 0, "v")])

    @staticmethod
    def forked(check: Callable[[], object]) -> int:
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                check()
                os._exit(0)
            os._exit(1)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def test_from_another_thread_sqlite_refuses(self) -> None:
        table, errors = self.table(), []

        def use() -> None:
            for call in (
                lambda: table.claim("r", "A", now=0, ttl=1),
                lambda: table.get("r"),
                table.close,
            ):
                try:
                    call()
                except sqlite3.ProgrammingError as error:
                    errors.append("thread" in str(error))

        thread = threading.Thread(target=use)
        thread.start()
        thread.join(FOREVER)
        self.assertEqual(errors, [True, True, True])
        self.assert_usable(table)


# ---- Many processes. What they run stands here at the top level, where a spawned process finds it.


class Gate:
    """Releases all of a test's processes together."""

    def __init__(self, parties: int) -> None:
        self.barrier = SPAWN.Barrier(parties)

    def wait(self) -> None:
        self.barrier.wait(FOREVER)


def claim_all(name: str, place: str, owner: str, gate: Gate) -> list[int | None]:
    """Claim 200 resources at one tick, together with the others."""
    with run_experiment.load_store(name).LeaseTable(place, timeout=FOREVER) as table:
        gate.wait()
        granted = [table.claim(f"r{n:03}", owner, now=0, ttl=10) for n in range(200)]
        return [lease and lease.epoch for lease in granted]


def take_turns(name: str, place: str, owner: str, gate: Gate) -> list[int]:
    """Claim one resource until it was granted 50 times, giving it back each time."""
    epochs: list[int] = []
    with run_experiment.load_store(name).LeaseTable(place, timeout=FOREVER) as table:
        gate.wait()
        while len(epochs) < 50:
            if granted := table.claim("hot", owner, now=1, ttl=10):
                epochs.append(granted.epoch)
                table.release(granted, now=1)
    return epochs


def raise_the_fence(name: str, place: str, owner: str, gate: Gate) -> list[tuple[int, str, int]]:
    """Write with epoch after epoch, taking turns with the others; tell the fence after each."""
    found = []
    with run_experiment.load_store(name).FencedSink(place, timeout=FOREVER) as sink:
        gate.wait()
        for epoch in range(ord(owner) - 64, 401, 4):
            answer = sink.write("hot", epoch, f"{epoch}")
            found.append((epoch, answer, sink.get("hot").fence))
    return found


def open_together(_: str, folder: str, owner: str, gate: Gate) -> list[str]:
    """Open a fresh file together with the others, 20 times over."""
    for number in range(20):
        gate.wait()
        with LeaseTable(Path(folder, f"fresh{number}"), timeout=FOREVER) as table:
            table.claim(owner, owner, now=0, ttl=1)
        with FencedSink(Path(folder, f"fresh{number}"), timeout=FOREVER) as sink:
            sink.write(owner, 1, owner)
    return ["opened"] * 20


def run_and_tell(pipe: Any, work: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    pipe.send(work(*arguments))


class TogetherTest(ContractTest):
    """A test of several processes that are released together."""

    def together(self, work: Callable[..., Any], owners: list[str], where: str) -> list[Any]:
        """Run the work in a process for each owner, and give back what each of them answered."""
        gate, answers, running = Gate(len(owners)), [], []
        for owner in owners:
            here, there = SPAWN.Pipe(duplex=False)
            arguments = (there, work, (self.name, where, owner, gate))
            process = SPAWN.Process(target=run_and_tell, args=arguments, daemon=True)
            process.start()
            there.close()
            running.append((process, here))
        for process, here in running:
            self.assertTrue(here.poll(FOREVER), "a process did not answer in time")
            answers.append(here.recv())
            process.join(FOREVER)
            self.assertEqual(process.exitcode, 0)
            here.close()
        return answers


class ProcessTest(TogetherTest):
    def test_c10_two_processes_never_both_get_a_resource(self) -> None:
        self.table()
        one, other = self.together(claim_all, ["A", "B"], self.places[0])
        self.assertEqual(
            {*zip(one, other, strict=True)} | {(1, None), (None, 1)}, {(1, None), (None, 1)}
        )
        winners = ["A" if epoch else "B" for epoch in one]
        self.assertEqual([(row[1], row[2]) for row in self.stored()], [(w, 1) for w in winners])

    def test_c13_of_three_processes_of_one_name_one_wins(self) -> None:
        answers = self.together(claim_all, ["w", "w", "w"], self.places[0])
        for epochs in zip(*answers, strict=True):
            self.assertEqual(sorted(epochs, key=str), [1, None, None])

    def test_four_processes_are_granted_each_epoch_once(self) -> None:
        self.table()
        answers = self.together(take_turns, ["A", "B", "C", "D"], self.places[0])
        self.assertEqual(sorted(itertools.chain(*answers)), list(range(1, 201)))
        self.assertEqual([(row[2], row[3]) for row in self.stored()], [(200, 0)])

    def test_four_processes_never_lower_the_fence(self) -> None:
        answers = self.together(raise_the_fence, ["A", "B", "C", "D"], self.places[1])
        for found in answers:
            fences = [fence for _, _, fence in found]
            self.assertEqual(fences, sorted(fences))
            for epoch, answer, fence in found:
                self.assertIn(answer, ("written", "stale"))
                self.assertGreaterEqual(fence, epoch + (answer == "stale"))
        self.assertEqual(self.sunk(), [("hot", 400, 400, 0, "400")])


class FreshFileTest(TogetherTest, DatabaseTest):
    def test_c09_eight_processes_open_a_fresh_file_together(self) -> None:
        answers = self.together(open_together, list("ABCDEFGH"), str(self.folder))
        self.assertEqual(answers, [["opened"] * 20] * 8)
        for number in range(20):
            rows = self.plain(self.folder / f"fresh{number}")
            self.assertEqual(rows.execute("SELECT count(*) FROM lease").fetchone(), (8,))
            self.assertEqual(rows.execute("SELECT count(*) FROM sink").fetchone(), (8,))


class RaceTest(DatabaseTest):
    """C16: a schedule that breaks the naive claim must not break the real one."""

    def test_c16_read_then_write_has_two_winners(self) -> None:
        self.table()
        for number in range(20):
            won, pair = [], (self.plain(), self.plain())
            read = "SELECT count(*) FROM lease WHERE resource = ?"
            free = [c.execute(read, (f"r{number}",)).fetchone() == (0,) for c in pair]
            for owner, connection in zip("AB", pair, strict=True):
                if free.pop(0):
                    row = (f"r{number}", owner, 1, 10)
                    connection.execute("REPLACE INTO lease VALUES (?, ?, ?, ?, NULL)", row)
                    won.append(owner)
            self.assertEqual(won, ["A", "B"])

    def test_c16_the_real_claim_has_one_winner(self) -> None:
        one, other = self.table(), self.table(timeout=0)
        for number in range(20):
            name, won = f"r{number}", []
            rival = partial(other.claim, name, "B", now=0, ttl=10)
            with self.paused_after_reading(one, rival):
                won.append(one.claim(name, "A", now=0, ttl=10))
            won.append(rival())
            self.assertEqual(won, [Lease(name, "A", 1, 10), None])
        self.assertEqual({row[1:3] for row in self.stored()}, {("A", 1)})
        self.assertEqual(len(self.stored()), 20)

    def test_c10_nobody_gets_in_between_the_statements_of_a_call(self) -> None:
        table, sink, rival = self.table(), self.sink(), self.table(timeout=0)
        held = table.claim("r", "A", now=0, ttl=10)
        calls: list[tuple[Any, Callable[[], object]]] = [
            (table, lambda: table.claim("s", "A", now=0, ttl=10)),
            (table, lambda: table.renew(held, now=0, ttl=20)),
            (table, lambda: table.advance("t", 5)),
            (sink, lambda: sink.write("r", 2, "v")),
            (sink, lambda: sink.seal("r", 3)),
            (sink, lambda: sink.transaction("r", 4).__enter__()),
            (table, lambda: table.release(held, now=0)),
        ]
        for opened, call in calls:
            found: list[str] = []

            def intrude(statement: str, found: list[str] = found) -> None:
                try:
                    rival.claim(f"rival {statement}", "R", now=0, ttl=1)
                    found.append("got in")
                except sqlite3.OperationalError:
                    found.append("locked out")

            opened._connection.set_trace_callback(intrude)
            call()
            opened._connection.set_trace_callback(None)
            self.assertEqual(found[0], "got in", "before the transaction it is free")
            self.assertEqual({*found[1:]}, {"locked out"})
            self.assertGreaterEqual(len(found), 3)

    def paused_after_reading(
        self, opened: LeaseTable | FencedSink, intrude: Callable[[], object]
    ) -> Any:
        """Let another connection try to get in after a row was read; it must find it locked."""
        read: Any = opened._row

        def row(resource: str) -> Any:
            found = read(resource)
            with self.assertRaisesRegex(sqlite3.OperationalError, "locked"):
                intrude()
            return found

        return mock.patch.object(opened, "_row", row)


# ---- An independent oracle


class Model:
    """What one resource's row in the lease table must be, in a few plain rules."""

    def __init__(self) -> None:
        self.row: tuple[str, int, int, str | None] | None = None  # owner, epoch, deadline, result

    def call(self, name: str, owner: str, epoch: int, now: int, ttl: int) -> object:
        known, current, deadline, result = self.row or ("", 0, 0, None)
        if name == "claim":  # `epoch` is what it must be above
            if result is not None or now < deadline:
                return None
            self.row = (owner, max(current, epoch) + 1, now + ttl, None)
            return Lease("r", *self.row[:3])
        if name == "advance":
            if result is not None or epoch <= current:
                return False
            self.row = (known, epoch, 0, None)
            return True
        mine = (known, current) == (owner, epoch)
        if name == "complete" and mine and result == owner:
            return True
        if not mine or now >= deadline or result is not None:
            return None if name == "renew" else False
        if name == "renew":
            self.row = (owner, epoch, max(deadline, now + ttl), None)
            return Lease("r", *self.row[:3])
        if name == "complete":
            self.row = (owner, epoch, deadline, owner)
        elif name == "release":
            self.row = (owner, epoch, 0, None)
        return True  # also of a guard's block that was run


class SinkModel:
    """What one resource's row in the sink must be: the fence, and who wrote what last."""

    def __init__(self) -> None:
        self.row: tuple[int, int, int, str | None] | None = None  # fence, epoch, seq, value

    def call(self, name: str, epoch: int, seq: int, value: str) -> object:
        fence, wrote, last, stored = self.row or (0, 0, 0, None)
        if epoch < fence:
            return "fenced" if name == "transaction" else "stale"
        if name != "write":
            self.row = (epoch, wrote, last, stored)
            return "admitted" if name == "transaction" else "sealed" if epoch > fence else "replay"
        if wrote == epoch and seq <= last:
            return "passed" if seq < last else "replay" if stored == value else "conflict"
        self.row = (epoch, epoch, seq, value)
        return "written"


class StepsTest(ContractTest):
    """Make each call on each row that is reached by the calls before, and ask the oracle.

    A call is one transaction and depends on its arguments and its row alone, so each pair of them
    is made once, on a resource of its own.
    """

    def steps(self, model: Any, calls: list[Any], depth: int, opened: Any, make: Any) -> int:
        paths: dict[Any, list[Any]] = {None: []}
        newest, count = [None], 0
        for _ in range(depth):
            reached = []
            for before, call in itertools.product(newest, calls):
                resource, count = f"step {count}", count + 1
                for one in paths[before]:
                    make(resource, *one)
                model.row = before
                expected = model.call(*call)
                if isinstance(expected, Lease):
                    expected = expected._replace(resource=resource)
                answer, row = make(resource, *call), opened.get(resource)
                self.assertEqual((answer, type(answer)), (expected, type(expected)), (call, before))
                left = model.row and (resource, *model.row)
                self.assertEqual(row and tuple(row), left, f"{call} left it at {before}")
                if model.row not in paths:
                    paths[model.row] = [*paths[before], call]
                    reached.append(model.row)
            newest = reached
        return count

    def test_each_call_on_each_row_of_the_lease_table(self) -> None:
        table = self.table()

        def make(resource: str, name: str, owner: str, epoch: int, now: int, ttl: int) -> object:
            if name == "claim":
                return table.claim(resource, owner, now=now, ttl=ttl, above=epoch)
            if name == "advance":
                return table.advance(resource, epoch)
            held = Lease(resource, owner, epoch, 0)
            if name == "renew":
                return table.renew(held, now=now, ttl=ttl)
            if name == "complete":
                return table.complete(held, owner, now=now)
            return table.release(held, now=now)

        names = ("renew", "complete", "release")
        calls = [*itertools.product(["claim"], "AB", [0, 2], (0, 2), [2])]
        calls += itertools.product(names, "AB", (1, 2), (1, 2), [3])
        calls += [("advance", "", epoch, 0, 0) for epoch in (1, 2)]
        count = self.steps(Model(), calls, 3, table, make)
        self.assertEqual((len(calls), count), (34, 918))

    def test_each_call_on_each_row_of_the_sink(self) -> None:
        sink = self.sink()

        def make(resource: str, name: str, epoch: int, seq: int, value: str) -> object:
            if name == "seal":
                return sink.seal(resource, epoch)
            return sink.write(resource, epoch, value, seq=seq)

        calls = [*itertools.product(["write"], (1, 2), (0, 1), "xy")]
        calls += [("seal", epoch, 0, "") for epoch in (1, 2, 3)]
        count = self.steps(SinkModel(), calls, 3, sink, make)
        self.assertEqual((len(calls), count), (11, 264))


class OracleTest(DatabaseTest):
    """Run all sequences of calls up to a depth, and compare each answer and each row."""

    def explore(self, table: str, depth: int, calls: list[Any], real: Any, model: Any) -> int:
        """Go through the tree of sequences, putting the row back after each branch."""
        plain = self.plain()
        plain.execute("PRAGMA synchronous = OFF")
        width = {"lease": 5, "sink": 5}[table]
        put_back = f"REPLACE INTO {table} VALUES ({', '.join('?' * width)})"
        count = 0

        def branch(left: int) -> None:
            nonlocal count
            before = model.row
            for call in calls:
                count += 1
                expected = model.call(*call)
                answer = real(*call)
                row = plain.execute(f"SELECT * FROM {table}").fetchall()
                if answer != expected or type(answer) is not type(expected):
                    self.fail(f"{call} at {before}: {answer}, not {expected}")
                if row != ([("r", *model.row)] if model.row else []):
                    self.fail(f"{call} at {before} left {row}, not {model.row}")
                if left > 1:
                    branch(left - 1)
                if model.row != before:
                    model.row = before
                    if before is None:
                        plain.execute(f"DELETE FROM {table}")
                    else:
                        plain.execute(put_back, ("r", *before))

        branch(depth)
        return count

    def lease_calls(self, ticks: tuple[int, ...], ttl: int, epochs: tuple[int, ...]) -> list[Any]:
        claims = itertools.product(["claim"], "AB", [0], ticks, [ttl])
        names = ["renew", "complete", "release", "guard"]
        return [*claims, *itertools.product(names, "AB", epochs, ticks, [ttl])]

    def lease_table(self) -> Callable[..., object]:
        table = self.table()
        unsynced: Any = table._connection  # the answers are the same, and the disk is spared
        unsynced.execute("PRAGMA synchronous = OFF")

        def real(name: str, owner: str, epoch: int, now: int, ttl: int) -> object:
            if name == "claim":
                return table.claim("r", owner, now=now, ttl=ttl, above=epoch)
            if name == "advance":
                return table.advance("r", epoch)
            held = Lease("r", owner, epoch, 0)
            if name == "guard":
                try:
                    with table.guard(held, now=now):
                        return True
                except LeaseLost:
                    return False
            if name == "renew":
                return table.renew(held, now=now, ttl=ttl)
            return (
                table.complete(held, owner, now=now)
                if name == "complete"
                else table.release(held, now=now)
            )

        return real

    def test_all_short_sequences_of_many_calls_agree(self) -> None:
        calls = [
            call for call in self.lease_calls((0, 1, 2), 2, (1, 2)) if call[:2] != ("guard", "B")
        ]
        calls += [("claim", "A", 3, 2, 2), *(("advance", "", epoch, 0, 0) for epoch in (1, 2, 4))]
        self.assertEqual(len(calls), 52)
        count = self.explore("lease", 3, calls, self.lease_table(), Model())
        self.assertEqual(count, 52 + 52**2 + 52**3)

    def test_all_longer_sequences_of_few_calls_agree(self) -> None:
        calls = [call for call in self.lease_calls((0, 1), 1, (1,)) if call[0] != "guard"]
        self.assertEqual(len(calls), 16)
        count = self.explore("lease", 4, calls, self.lease_table(), Model())
        self.assertEqual(count, 16 + 16**2 + 16**3 + 16**4)

    def test_all_sequences_of_the_sinks_calls_agree(self) -> None:
        sink = self.sink()
        sink._connection.execute("PRAGMA synchronous = OFF")

        def real(name: str, epoch: int, seq: int, value: str) -> object:
            if name == "write":
                return sink.write("r", epoch, value, seq=seq)
            if name == "seal":
                return sink.seal("r", epoch)
            try:
                with sink.transaction("r", epoch):
                    return "admitted"
            except Fenced:
                return "fenced"

        writes = itertools.product(["write"], (1, 2), (0, 1), "xy")
        others = itertools.product(["seal", "transaction"], (1, 2, 3), [0], [""])
        calls = [*writes, *others]
        self.assertEqual(len(calls), 14)
        count = self.explore("sink", 4, calls, real, SinkModel())
        self.assertEqual(count, 14 + 14**2 + 14**3 + 14**4)


# ---- Killed at any moment


# The killed process imports nothing but the library: starting takes longer than working.
WORK_UNTIL_KILLED = """
import itertools, json, sys
here, path, seed = sys.argv[1:]
sys.path.insert(0, here)
from leases import FencedSink, LeaseTable
def tell(*answer):
    print(json.dumps(answer), flush=True)
with LeaseTable(path, timeout=60) as table, FencedSink(path, timeout=60) as sink:
    sys.stdin.readline()  # until the one before has been killed
    for number in itertools.count():
        for name in ("hot", f"job {seed} {number}"):
            granted, value = table.claim(name, f"worker {seed}", now=1, ttl=10), f"{seed} {number}"
            tell("claimed", name, granted.epoch)
            tell(sink.write(name, granted.epoch, value), name, granted.epoch, value)
            if name == "hot":
                table.release(granted, now=1)
            else:
                tell(table.complete(granted, value, now=1), name, value)
"""


class KillTest(DatabaseTest):
    def test_no_answer_is_lost_by_fifty_kills(self) -> None:
        random_moments, epochs = random.Random(20), {"hot": 0}
        self.table(), self.sink()
        following = self.start(0)
        for seed in range(50):
            process = following
            following = self.start(seed + 1)
            self.plain().execute("UPDATE lease SET deadline = 0 WHERE resource = 'hot'")
            process.stdin.write("go\n")
            process.stdin.flush()
            reports = [self.hear(process) for _ in range(random_moments.randint(1, 40))]
            process.kill()
            reports += map(json.loads, process.stdout.readlines())
            self.end(process)
            self.assertEqual(process.returncode, -signal.SIGKILL if os.name == "posix" else 1)
            self.check(reports, epochs)
        following.kill()
        self.end(following)

    def start(self, seed: int) -> Any:
        command = [sys.executable, "-c", WORK_UNTIL_KILLED, str(HERE), str(self.path), str(seed)]
        streams: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, **streams)

    def hear(self, process: Any) -> Any:
        limit = threading.Timer(FOREVER, process.kill)
        limit.start()
        line = process.stdout.readline()
        limit.cancel()
        self.assertTrue(line, "the worker failed, or said nothing in time")
        return json.loads(line)

    def end(self, process: Any) -> None:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        process.stdout.close()
        process.wait(FOREVER)

    def check(self, reports: list[Any], epochs: dict[str, int]) -> None:
        """Hold what a killed process had reported against the tables."""
        self.assertEqual(self.stored("PRAGMA integrity_check"), [("ok",)])
        leased = {row[0]: row for row in self.stored()}
        sunk = {row[0]: row for row in self.sunk()}
        for name, epoch in epochs.items():
            self.assertGreaterEqual(leased[name][2] if name in leased else 0, epoch)
        for answer, name, *rest in reports:
            if answer == "claimed":
                self.assertGreaterEqual(leased[name][2], rest[0])
            elif answer == "written":
                self.assertGreaterEqual(sunk[name][1:3], (rest[0], rest[0]))
                if sunk[name][1] == rest[0]:
                    self.assertEqual(sunk[name][4], rest[1])
            else:
                self.assertIs(answer, True)
                self.assertEqual(leased[name][4], rest[0])
        epochs.update({name: row[2] for name, row in leased.items()})


# ---- The experiment, through its command line


RESULTS = HERE / "results.json"


def leaves(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Give the path of each leaf of a parsed document; an empty list or object is one too."""
    if isinstance(node, (dict, list)) and node:
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield from leaves(value, (*path, key))
    else:
        yield path


def spell(path: tuple[Any, ...]) -> str:
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path)[1:]


def others(leaf: Any) -> list[Any]:
    """Give values that differ from a leaf, some of them equal to it for Python."""
    if isinstance(leaf, bool) or leaf is None:
        return [not leaf, int(leaf or 0), float(leaf or 0), str(leaf), "", [], {}]
    if isinstance(leaf, (dict, list)):
        return [[leaf], {"more": 1}, None, 0, "", False]
    if isinstance(leaf, int):
        return [leaf + 1, -leaf - 1, float(leaf), str(leaf), bool(leaf), None]
    return [f"{leaf}x", leaf.upper() + "_", None, 0, True, [leaf]]


class ComparingTest(unittest.TestCase):
    """--check compares the whole document as parsed, types included."""

    def setUp(self) -> None:
        self.archived = json.loads(RESULTS.read_text(encoding="utf-8"))

    def sections(self) -> Iterator[tuple[str, Any]]:
        """Give each scenario's arms and each cell by the path that leads to it."""
        for name, scenario in self.archived["scenarios"].items():
            for arm, result in run_experiment.arms_of(name, scenario).items():
                yield f"scenarios.{name}" if arm == name else f"scenarios.{name}.{arm}", result
        tables = [("guarantees", self.archived["guarantees"])]
        tables += [(f"restores.{name}", part) for name, part in self.archived["restores"].items()]
        for table, rows in tables:
            for (row, cells), name in itertools.product(rows.items(), run_experiment.IDS):
                yield f"{table}.{row}.{name}", cells[name]

    def at(self, document: Any, path: tuple[Any, ...]) -> tuple[Any, Any]:
        for key in path[:-1]:
            document = document[key]
        return document, path[-1]

    def test_a_change_of_any_leaf_is_found_and_named(self) -> None:
        changed, seen = 0, []
        for where, section in self.sections():
            tampered = copy.deepcopy(section)
            for path in leaves(section):
                parent, key = self.at(tampered, path)
                true = parent[key]
                for other in others(true):
                    parent[key] = other
                    found = run_experiment.first_difference(tampered, section)
                    self.assertTrue(found and found.startswith(spell(path)), (path, other, found))
                    changed += 1
                parent[key] = true
                seen.append(f"{where}{spell(path) if path[0] == 0 else '.' + spell(path)}")
        self.assertGreater(changed, 20_000)
        self.assertEqual(seen, [spell(path) for path in leaves(self.archived)])

    def test_a_change_anywhere_is_judged_different(self) -> None:
        paths = list(leaves(self.archived))
        for path in paths[:: len(paths) // 10]:
            tampered = copy.deepcopy(self.archived)
            parent, key = self.at(tampered, path)
            parent[key] = others(parent[key])[0]
            status, told = self.verdict(tampered)
            self.assertEqual(status, 1)
            self.assertIn(spell(path), told.splitlines()[-1])
        for wrong in ({}, {"scenarios": None}, {**self.archived, "more": 1}):
            self.assertEqual(self.verdict(wrong)[0], 1)

    def test_a_leaf_that_is_missing_or_new_is_found(self) -> None:
        for _, section in self.sections():
            shorter = copy.deepcopy(section)
            for path in leaves(section):
                parent, key = self.at(shorter, path)
                before = copy.copy(parent)
                del parent[key]
                for one, other in ((shorter, section), (section, shorter)):
                    self.assertIsNotNone(run_experiment.first_difference(one, other), path)
                parent.clear()
                parent.update(before) if isinstance(parent, dict) else parent.extend(before)
            self.assertEqual(shorter, section)

    def test_the_same_values_in_other_bytes_are_reproduced(self) -> None:
        status, told = self.verdict(self.archived)
        self.assertEqual((status, len(told.splitlines())), (0, 1))
        status, told = self.verdict(self.archived, json.dumps(self.archived))
        self.assertEqual(status, 0)
        self.assertIn("not the same bytes", told)

    def test_what_is_written_reads_the_same_and_no_line_is_long(self) -> None:
        written = run_experiment.text(self.archived) + "\n"
        self.assertEqual(written, RESULTS.read_text(encoding="utf-8"))
        self.assertEqual(json.loads(written), self.archived)
        self.assertLess(len(written.splitlines()), 2500)

    def test_the_order_of_keys_is_no_difference(self) -> None:
        turned = dict(reversed(self.archived["scenarios"].items()))
        self.assertEqual(self.verdict({**self.archived, "scenarios": turned})[0], 0)

    def verdict(self, archive: Any, written: str | None = None) -> tuple[int, str]:
        """Compare an archive with a run that gave the true results."""
        options = argparse.Namespace(check=Path("archive"), tables=True, left_out={})
        with contextlib.redirect_stdout(io.StringIO()) as told:
            pair = (archive, written or run_experiment.text(archive) + "\n")
            return run_experiment.judge(pair, self.archived, options), told.getvalue()


class ExperimentTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="leases-test-")
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def run_it(self, *arguments: object, python: Any = (), **options: Any) -> Any:
        """Run the experiment as a user does; bounded, like everything here."""
        script = options.pop("script", HERE / "run_experiment.py")
        command = [sys.executable, *python, *([script] if script else []), *map(str, arguments)]
        options = {"capture_output": True, "text": True, "timeout": FOREVER, **options}
        return subprocess.run(command, **options)

    def assert_refused(self, done: Any, *words: str) -> None:
        """It could not run: exit status 2, and one line that says why."""
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)
        for word in words:
            self.assertIn(word, done.stderr)
        self.assertNotIn("REPRODUCED", done.stdout)

    def test_the_archive_is_reproduced_byte_for_byte(self) -> None:
        output = self.folder / "reproduced.json"
        done = self.run_it("--check", "results.json", "--output", output, cwd=HERE)
        self.assertEqual((done.returncode, done.stderr), (0, ""), done.stdout)
        self.assertIn("REPRODUCED", done.stdout.splitlines()[-1])
        self.assertEqual(output.read_bytes(), RESULTS.read_bytes())
        self.assertIn("lease table says new, document says old", done.stdout)
        self.assertNotIn("\x1b", done.stdout)
        self.assertEqual([path.name for path in self.folder.iterdir()], ["reproduced.json"])

    @unittest.skipUnless(hasattr(signal, "SIGSTOP"), "this platform has no SIGSTOP")
    def test_stopping_by_signals_gives_the_same_results(self) -> None:
        names = list(run_experiment.SCENARIOS)
        done = self.run_it(*names, "--pause", "sigstop", "--check", RESULTS, "--quiet")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertEqual(len(done.stdout.strip().splitlines()), 2)

    def test_named_scenarios_are_compared_alone(self) -> None:
        archived = json.loads(RESULTS.read_text(encoding="utf-8"))
        archived["scenarios"]["window"]["events"].clear()
        (self.folder / "tampered.json").write_text(json.dumps(archived), encoding="utf-8")
        for names, status in (("unfenced", 0), ("window", 1), ("two_files window unfenced", 1)):
            done = self.run_it(*names.split(), "--check", self.folder / "tampered.json")
            self.assertEqual((done.returncode, done.stderr), (status, ""))
        self.assertIn("scenarios.window.events[0]: is not in the archive", done.stdout)
        self.assertIn("--- ", done.stdout)

    def test_a_difference_is_shown_and_the_output_still_written(self) -> None:
        tampered, output = self.folder / "tampered.json", self.folder / "out.json"
        tampered.write_text(RESULTS.read_text(encoding="utf-8").replace("stale", "written", 1))
        found = json.loads(RESULTS.read_text(encoding="utf-8"))
        with mock.patch.object(run_experiment, "run", return_value=found):
            with contextlib.redirect_stdout(io.StringIO()) as told:
                status = run_experiment.main(["--check", str(tampered), "--output", str(output)])
        self.assertEqual(status, 1)
        self.assertRegex(told.getvalue(), r'(?m)^-.*"answer": "written"')
        self.assertRegex(told.getvalue(), r'(?m)^\+.*"answer": "stale"')
        verdict = told.getvalue().splitlines()[-1]
        self.assertIn('scenarios.fenced.events[4].answer: "written" became "stale"', verdict)
        self.assertEqual(output.read_bytes(), RESULTS.read_bytes())
        output.write_text("an older file is replaced")
        with mock.patch.object(run_experiment, "run", return_value=found):
            with contextlib.redirect_stdout(io.StringIO()):
                self.assertEqual(run_experiment.main(["--output", str(output)]), 0)
        self.assertEqual(output.read_bytes(), RESULTS.read_bytes())

    def test_an_unusable_archive_is_refused(self) -> None:
        archives = {"missing": None, "empty": b"", "cut": RESULTS.read_bytes()[:-9], "list": b"[]"}
        archives |= {"binary": b"\xff\x00", "deep": b"[" * 100_000, "number": b"1"}
        for name, content in archives.items():
            path = self.folder / name
            if content is not None:
                path.write_bytes(content)
            with self.subTest(name):
                self.assert_refused(self.run_it("unfenced", "--check", path), name)
        self.assert_refused(self.run_it("unfenced", "--check", self.folder), str(self.folder))

    def test_an_unusable_output_is_refused(self) -> None:
        same = self.folder / "same.json"
        same.write_bytes(RESULTS.read_bytes())
        link = self.folder / "link.json"
        link.hardlink_to(same)
        for output in (same, self.folder / "." / "same.json", link):
            self.assert_refused(self.run_it("--check", same, "--output", output), "--output")
        self.assertEqual(same.read_bytes(), RESULTS.read_bytes())
        wrong = {self.folder / "none" / "x.json": "none", self.folder: "regular"}
        if os.name == "posix":
            wrong[Path(os.devnull)] = "regular"
        for output, word in wrong.items():
            self.assert_refused(self.run_it("--output", output), word)
        self.assertFalse(os.path.isfile(os.devnull))

    def test_wrong_options_are_refused_in_one_line(self) -> None:
        for arguments, word in (
            (["--nonsense"], "--nonsense"),
            (["nobody"], "nobody"),
            (["--pause", "sleep"], "--pause"),
            (["--check"], "--check"),
            (["--che", str(RESULTS)], "--che"),
            (["unfenced", "--output", "x.json"], "--output"),
            (["--workers", "4"], "--workers"),
            (["--workers", "3", "--check", str(RESULTS)], "--workers"),
            (["--workers", "3", "unfenced"], "--workers"),
        ):
            with self.subTest(arguments):
                self.assert_refused(self.run_it(*arguments, cwd=self.folder), word)
        self.assertEqual(list(self.folder.iterdir()), [])

    def test_c20_from_standard_input_it_names_the_cause(self) -> None:
        source = (HERE / "run_experiment.py").read_text(encoding="utf-8")
        done = self.run_it("-", script=None, input=source, cwd=HERE)
        self.assert_refused(done, "from its file")
        self.assertEqual(done.stdout, "")

    def test_c20_from_elsewhere_by_name_and_optimized_it_runs(self) -> None:
        odd = self.folder / "a b#c \u00e9"
        odd.mkdir()
        for name in ("leases.py", "run_experiment.py"):
            shutil.copy(HERE / name, odd)
        common = ("unfenced", "--check", RESULTS, "--quiet")
        copied = {"script": odd / "run_experiment.py"}
        for options in (
            {"cwd": self.folder},
            {"cwd": odd, "python": ["-m", "run_experiment"], "script": None},
            {"python": ["-O"]},
            {**copied, "cwd": self.folder},
            {**copied, "env": {**os.environ, "TMPDIR": str(odd), "LC_ALL": "C"}},
        ):
            with self.subTest(options):
                done = self.run_it(*common, **options)
                self.assertEqual((done.returncode, done.stderr), (0, ""))
                self.assertIn("REPRODUCED", done.stdout)

    def test_optimized_it_judges_the_same(self) -> None:
        tampered = self.folder / "tampered.json"
        tampered.write_text(
            RESULTS.read_text(encoding="utf-8").replace("true", "1"), encoding="utf-8"
        )
        done = self.run_it("fenced", "--check", tampered, python=["-O"])
        self.assertEqual(done.returncode, 1)
        self.assertIn("answer: 1 became true", done.stdout)

    def test_a_reader_that_goes_away_is_no_traceback(self) -> None:
        script = (
            f"{sys.executable!r} {str(HERE / 'run_experiment.py')!r} fenced renewal | head -n 2"
        )
        done = subprocess.run(script, shell=True, capture_output=True, text=True, timeout=FOREVER)
        self.assertEqual((done.returncode, done.stderr), (0, ""))

    TROUBLE = """
import signal, sys, run_experiment as experiment
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
def hang(stage):
    stage.worker("A", "old", "fenced").run(0, until="write")
    print(stage.unfenced.parent.parent, flush=True)
    sys.stdin.read()
def die(stage):
    a = stage.worker("A", "old", "fenced")
    a.run(0, until="write")
    a.process.kill()
    a.run(1)
def wait(stage):
    experiment.LIMIT = 0.05
    stage.worker("A", "old", "fenced").hear("write")
def fail(stage):
    stage.worker("A", "old", "fenced", (experiment.complete,)).run(0)
def again(stage):
    for _ in range(2):
        stage.worker("A", "old", "fenced").run(0, until="write")
def leave(stage):
    a = stage.worker("A", "old", "fenced")
    a.run(0)
    a.process.kill()
    a.process.join()
experiment.SCENARIOS = {"hang": hang, "die": die, "wait": wait, "fail": fail}
experiment.SCENARIOS.update(again=again, leave=leave)
sys.exit(experiment.main(sys.argv[1:]))
"""

    def trouble(self, *arguments: str) -> Any:
        """Start the experiment with scenarios that go wrong."""
        environment = {**os.environ, "PYTHONPATH": str(HERE), "TMPDIR": str(self.folder)}
        streams: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        command = [sys.executable, "-c", self.TROUBLE, *arguments]
        return subprocess.Popen(command, env=environment, text=True, **streams)

    @unittest.skipUnless(os.name == "posix", "these signals are POSIX's")
    def test_interrupted_or_killed_it_leaves_no_child(self) -> None:
        for how, ending in itertools.product(("gate", "sigstop"), (signal.SIGINT, signal.SIGKILL)):
            with self.subTest(how, ending=ending), self.trouble("hang", "--pause", how) as parent:
                folder = Path(parent.stdout.readline().strip())
                self.assertTrue(folder.is_relative_to(self.folder) and folder.exists(), folder)
                parent.send_signal(ending)
                # Its children have inherited these pipes, which end when the last of them has.
                _, errors = parent.communicate(timeout=FOREVER)
                if ending == signal.SIGINT:
                    told = (130, "run_experiment.py: interrupted\n", False)
                else:
                    told = (-signal.SIGKILL, "", True)
                self.assertEqual((parent.returncode, errors, folder.exists()), told)

    def test_a_child_that_dies_or_fails_or_hangs_fails_the_run(self) -> None:
        for scenario, words in {
            "die": "A died with exit code -9 before it could",
            "wait": "waited 0.05 s for A to write",
            "again": "A was given a job before its last had ended",
            "leave": "A ended with exit code -9 after its work",
            "fail": "A did not end its work, but failed: TypeError: lease must be a Lease",
        }.items():
            with self.subTest(scenario), self.trouble(scenario, "--quiet") as parent:
                out, errors = parent.communicate(timeout=FOREVER)
                self.assertEqual(parent.returncode, 2, errors)
                self.assertIn(words, errors)
                self.assertEqual((len(errors.splitlines()), out), (1, ""))
        self.assertEqual(list(self.folder.iterdir()), [])


# ---- The search


class SearchTest(unittest.TestCase):
    """What the search answers, and that it finds a bug wherever one is planted."""

    TABLES: ClassVar = {  # split, overwrite, window, late, twice, stuck
        "unfenced": "bbbbHH",
        "check_then_write": "bbbbHH",
        "fenced": "HHbbHH",
        "sealed": "HHHbHH",
        "guarded": "HHHbHH",
        "fenced, lease": "bHbbbb",
        "fenced, sink": "bbbbHH",
        "fenced, both": "bbbbbb",
        "sealed, lease": "bHHbHH",
        "sealed, sink": "bbbbHH",
        "sealed, both": "bbbbbH",
    }

    def setUp(self) -> None:
        self.addCleanup(self.forget)
        self.forget()

    def forget(self) -> None:
        """What a step or a guarantee has answered is remembered: not over a planted bug."""
        for remembers in (run_experiment.attempt, run_experiment.answered, run_experiment.judged):
            remembers.cache_clear()

    def test_the_archived_tables_are_those_of_the_contract(self) -> None:
        archived = json.loads(RESULTS.read_text(encoding="utf-8"))
        tables = run_experiment.guarantee_table(archived)[1:]
        restored = run_experiment.restore_table(archived)[1:]
        found = {row[0]: "".join(row[1:7]) for row in (*tables, *restored)}
        self.assertEqual(found, self.TABLES)
        self.assertEqual({row[7] for row in restored}, {"as if nothing had been put back"})

    def test_each_broken_cell_has_a_schedule_and_the_others_none(self) -> None:
        archived = json.loads(RESULTS.read_text(encoding="utf-8"))
        rows = [*archived["guarantees"].values()]
        rows += [cells for cases in archived["restores"].values() for cells in cases.values()]
        self.assertEqual(len(rows), 17)
        for cells in rows:
            self.assertEqual(list(cells), list(run_experiment.IDS))
            for cell in cells.values():
                broken = cell["verdict"] == "broken"
                self.assertEqual(broken, 0 < cell["broken"] <= cell["schedules"])
                self.assertEqual(broken, bool(cell["shortest"]))

    def letters(self, *row: Any) -> tuple[str, Any]:
        self.forget()
        cells = run_experiment.explore(run_experiment.Row(*row))[0]
        return "".join(run_experiment.letters(cells)), cells

    def assert_found(self, broken: str, *row: Any) -> str:
        """The search of this row breaks this guarantee; answer its schedule as it is printed."""
        held = self.TABLES[row[0]] if len(row) == 1 or row[2] else self.TABLES[", ".join(row[:2])]
        letters, cells = self.letters(*row)
        at = run_experiment.IDS.index(broken)
        self.assertEqual((held[at], letters[at]), ("H", "b"), f"{broken}: {letters}")
        with contextlib.redirect_stdout(io.StringIO()) as told:
            run_experiment.print_table(run_experiment.lanes(cells[broken]["shortest"]))
        self.assertGreater(len(told.getvalue().splitlines()), 2)
        return told.getvalue()

    def test_a_seal_that_looks_like_a_write_is_found(self) -> None:
        sink = re.sub(r"CHECK \(.*\)", "", leases.CREATE_SINK)
        seal = """
        INSERT INTO sink (resource, fence, epoch, seq)
        SELECT r, e, e, 0 FROM (SELECT ? AS r, ? AS e) WHERE true
        ON CONFLICT (resource) DO UPDATE SET fence = excluded.fence, epoch = excluded.fence
        """
        with mock.patch.object(FencedSink, "_create", sink):
            with mock.patch.object(leases, "RAISE_FENCE", seal):
                self.assertIn("conflict", self.assert_found("stuck", "sealed"))

    def test_a_fence_that_refuses_its_own_epoch_is_found(self) -> None:
        def strict(row: Any, epoch: int, seq: int, value: str) -> str:
            return "stale" if row and epoch <= row.fence else "written"

        with mock.patch.object(leases, "_outcome", strict):
            self.assertIn("stale", self.assert_found("stuck", "sealed"))

    def test_a_fence_that_lets_lower_epochs_pass_is_found(self) -> None:
        def naive(row: Any, epoch: int, seq: int, value: str) -> str:
            return "written" if row is None or epoch != row.epoch else "replay"

        with mock.patch.object(leases, "_outcome", naive):
            self.assert_found("overwrite", "fenced")

    def planted(self, name: str, *changes: tuple[str, str]) -> Any:
        """Plant changes in the source of one of the library's functions."""
        source = inspect.getsource(getattr(leases, name))
        for right, wrong in changes:
            self.assertIn(right, source)
            source = source.replace(right, wrong)
        names = dict(vars(leases))
        exec(compile("from __future__ import annotations\n" + source, name, "exec"), names)
        return mock.patch.object(run_experiment, name, names[name])

    def test_a_takeover_without_its_seal_is_found(self) -> None:
        seal = "outcome = sink.seal(resource, lease.epoch)"
        with self.planted("take_over", (seal, 'sink.get(resource); outcome = "sealed"')):
            self.assert_found("window", "sealed")

    def test_a_takeover_without_above_is_found(self) -> None:
        with self.planted("take_over", ("above=0 if row is None else row.fence", "above=0")):
            self.assertIn("seal epoch", self.assert_found("stuck", "sealed", "lease", False))

    def test_a_takeover_content_with_replay_is_found(self) -> None:
        with self.planted("take_over", ('outcome == "sealed"', 'outcome in ("sealed", "replay")')):
            self.assertIn("replay", self.assert_found("twice", "sealed", "lease", False))

    def test_a_takeover_that_returns_before_its_seal_is_found(self) -> None:
        early = ("outcome = sink.seal(resource, lease.epoch)", "return lease")
        with self.planted("take_over", early):
            self.assert_found("window", "sealed")

    def test_a_reconcile_with_a_margin_of_one_is_found(self) -> None:
        with self.planted("reconcile", ("max(epoch, fence) + margin", "max(epoch, fence) + 1")):
            self.assertIn("put_back", self.assert_found("stuck", "fenced", "lease", True))

    def test_a_reconcile_that_raises_one_side_is_found(self) -> None:
        with self.planted("reconcile", ("leases.advance(resource, target)", "pass")):
            self.assert_found("stuck", "fenced", "lease", True)
        with self.planted("reconcile", ("sink.seal(resource, target)", "pass")):
            self.assert_found("overwrite", "fenced", "sink", True)

    def test_a_guard_that_does_not_look_at_the_epoch_is_found(self) -> None:
        blind = leases.IS_HELD.replace("AND owner = ? AND epoch = ?", "AND ? <> '' AND ?")
        with mock.patch.object(leases, "IS_HELD", blind):
            self.assert_found("window", "guarded")

    def test_where_nothing_stale_was_tried_the_answer_is_unknown(self) -> None:
        class Refusing(LeaseTable):
            def claim(self, *_: Any, **__: Any) -> None:
                return None

        with mock.patch.object(leases, "LeaseTable", Refusing):
            letters, _ = self.letters("fenced")
        self.assertEqual(letters, "?????b")

    def test_the_schedules_are_counted_exactly(self) -> None:
        """Count a small graph of states again, by walking every schedule of it."""
        row = run_experiment.Row("fenced")
        with mock.patch.object(run_experiment, "LAST", 1):
            cells, states, _ = run_experiment.explore(row)
            with closing(run_experiment.World(row, ":memory:", ":memory:")) as world:
                search = run_experiment.Search(row, world)
                walked = [self.walk(search, state) for state in search.beginnings()]
        self.assertEqual(cells["window"]["schedules"], sum(one for one, _ in walked))
        self.assertEqual(cells["window"]["broken"], sum(broken for _, broken in walked))
        self.assertGreater(cells["window"]["schedules"], states)

    def walk(self, search: Any, state: Any) -> tuple[int, int]:
        ways = [self.walk(search, after) for _, after in search.moves(state)]
        if not ways:
            return 1, int("window" in state.past.broken)
        return sum(one for one, _ in ways), sum(broken for _, broken in ways)


# ---- Broken stores, each caught


class FirstWins(FencedSink):
    """Accepts whatever has another epoch than the last, as a well-known demo does."""

    def write(self, resource: str, epoch: int, value: str, *, seq: int = 0) -> Any:
        row = self.get(resource)
        wrong = row is not None and row.epoch != epoch and epoch < row.fence
        if wrong:
            self._transact(
                partial(self._execute, leases.STORE, (resource, epoch, epoch, seq, value))
            )
        return "written" if wrong else super().write(resource, epoch, value, seq=seq)


class StrictlyHigher(FencedSink):
    """Refuses its own fence's epoch: nothing can be written after a seal."""

    def write(self, resource: str, epoch: int, value: str, *, seq: int = 0) -> Any:
        row = self.get(resource)
        stale = row is not None and epoch <= row.fence
        return "stale" if stale else super().write(resource, epoch, value, seq=seq)


class TwoTransactions(FencedSink):
    """Checks the fence in one transaction and writes in the next.

    Put to `raise_the_fence`, one process is paused between the two until the last epoch is there,
    whose writer has not begun before that pause.
    """

    def write(self, resource: str, epoch: int, value: str, *, seq: int = 0) -> Any:
        paused = Path(f"{self._path}.paused")
        if epoch % 4 == 0:
            any(paused.exists() for _ in range(10**7))
        outcome = leases._outcome(self.get(resource), epoch, seq, value)
        if epoch % 4 and outcome == "written":
            with contextlib.suppress(FileExistsError):
                paused.touch(exist_ok=False)
                any(row.fence == 400 for row in map(self.get, [resource] * 10**7) if row)
        if outcome == "written":
            store = (resource, epoch, epoch, seq, value)
            self._transact(partial(self._execute, leases.STORE, store))
        return outcome


class SealLeavesNoRow(FencedSink):
    """Answers rightly where nothing was written, and keeps nothing."""

    def seal(self, resource: str, epoch: int) -> Any:
        return "sealed" if self.get(resource) is None else super().seal(resource, epoch)


class ForgetsTheEpoch(LeaseTable):
    """Deletes the row on release, so that the epoch starts again."""

    def release(self, lease: Lease, *, now: int) -> bool:
        released = super().release(lease, now=now)
        if released:
            gone = "DELETE FROM lease WHERE resource = ?"
            self._transact(partial(self._execute, gone, (lease.resource,)))
        return released


class OwnerOnlyHeartbeat(LeaseTable):
    """Renews for the owner's name, whatever its epoch."""

    def renew(self, lease: Lease, *, now: int, ttl: int) -> Lease | None:
        row = self.get(lease.resource)
        mine = row is not None and row.owner == lease.owner
        return super().renew(
            lease._replace(epoch=row.epoch) if row and mine else lease, now=now, ttl=ttl
        )


class RevivesExpired(LeaseTable):
    """Renews a lease after its deadline, if nobody has taken it."""

    def renew(self, lease: Lease, *, now: int, ttl: int) -> Lease | None:
        row = self.get(lease.resource)
        early = min(now, row.deadline - 1) if row and row.deadline else now
        return super().renew(lease, now=early, ttl=ttl + now - early)


class ReleaseAtNow(LeaseTable):
    """Ends a released lease now rather than at tick 0."""

    def release(self, lease: Lease, *, now: int) -> bool:
        released = super().release(lease, now=now)
        if released:
            late = "UPDATE lease SET deadline = ? WHERE resource = ?"
            self._transact(partial(self._execute, late, (now, lease.resource)))
        return released


class BrokenStoreTest(unittest.TestCase):
    """The contract catches each broken store: one test by its name, and the oracle's steps."""

    CAUGHT: ClassVar[dict[Any, str]] = {
        FirstWins: "SinkTest.test_only_a_written_value_changes_the_row",
        StrictlyHigher: "SealTest.test_a_seal_does_not_look_like_a_write",
        SealLeavesNoRow: "SealTest.test_only_the_call_that_raised_the_fence_says_sealed",
        ForgetsTheEpoch: "ClaimTest.test_c18_the_epoch_goes_on_over_release_and_restart",
        OwnerOnlyHeartbeat: "RenewTest.test_a_predecessor_of_the_same_name_is_refused",
        RevivesExpired: "RenewTest.test_c15_an_expired_lease_is_never_revived",
        ReleaseAtNow: "ReleaseTest.test_a_released_lease_is_free_at_any_tick",
    }

    def failing(self, broken: Any, names: list[str]) -> set[str]:
        """Put these tests of the contract to a store with this class in it; name what fails."""
        kinds = {"LeaseTable": LeaseTable, "FencedSink": FencedSink}
        kinds["LeaseTable" if issubclass(broken, LeaseTable) else "FencedSink"] = broken
        result = unittest.TestResult()
        for name in names:
            case, _, test = name.partition(".")
            bound = type(case, (globals()[case],), {"store": types.SimpleNamespace(**kinds)})
            bound(test).run(result)
        self.assertEqual(result.testsRun, len(names))
        return {test.id().split(".", 1)[1] for test, _ in (*result.failures, *result.errors)}

    def test_each_broken_store_is_caught_by_its_test(self) -> None:
        for broken, name in self.CAUGHT.items():
            right = LeaseTable if issubclass(broken, LeaseTable) else FencedSink
            table = "lease_table" if right is LeaseTable else "sink"
            wanted = [name, f"StepsTest.test_each_call_on_each_row_of_the_{table}"]
            with self.subTest(broken.__name__):
                self.assertEqual(self.failing(broken, wanted), {*wanted})
                self.assertEqual(self.failing(right, [name]), set())

    def module(self, broken: str) -> str:
        """Write a store with this class in it to a file that any process can import."""
        folder = tempfile.TemporaryDirectory(prefix="leases-test-")
        self.addCleanup(folder.cleanup)
        kind = "FencedSink" if issubclass(globals()[broken], FencedSink) else "LeaseTable"
        path = Path(folder.name, "broken.py")
        path.write_text(
            f"import sys\n\nsys.path.insert(0, {str(HERE)!r})\n"
            "from test_leases import FencedSink, LeaseTable\n"
            f"from test_leases import {broken} as {kind}\n",
            encoding="utf-8",
        )
        return str(path)

    def test_a_check_and_a_write_in_two_transactions_are_caught(self) -> None:
        """No order of whole calls finds this: a second process has to come in between."""
        name = self.module("TwoTransactions")
        store = run_experiment.load_store(name)
        for bound in ({"store": store, "name": name}, {}):
            case = type("Contending", (ProcessTest,), bound)
            result = unittest.TestResult()
            case("test_four_processes_never_lower_the_fence").run(result)
            self.assertEqual(len(result.failures), len(bound) // 2, result.errors)
            self.assertEqual(result.errors, [])

    def test_a_store_that_cannot_be_opened_is_named_in_one_line(self) -> None:
        for script in ("test_leases.py", "run_experiment.py"):
            command = [sys.executable, str(HERE / script), "--store", "no/such/store.py"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=FOREVER)
            self.assertEqual((done.returncode, len(done.stderr.splitlines())), (2, 1), done.stderr)
            self.assertIn("no/such/store.py", done.stderr)

    def test_the_experiment_catches_broken_stores_too(self) -> None:
        for broken, scenario in (
            ("FirstWins", "fenced"),
            ("StrictlyHigher", "sealed"),
            ("RevivesExpired", "renewal"),
        ):
            command = [sys.executable, str(HERE / "run_experiment.py"), scenario, "--quiet"]
            command += ["--store", self.module(broken), "--check", str(RESULTS)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=FOREVER)
            with self.subTest(broken):
                self.assertEqual(done.returncode, 1, done.stderr)
                self.assertIn(f"first at scenarios.{scenario}", done.stdout)


# ---- The README


def generated() -> dict[str, str]:
    """Make the parts of the README that stand between `begin` and `end` marks."""
    document = json.loads(RESULTS.read_text(encoding="utf-8"))
    scenarios = document["scenarios"]
    return {
        "guarantees": markdown(run_experiment.guarantee_table(document)),
        "restores": markdown(run_experiment.restore_table(document)),
        "scenarios": scenario_table(scenarios),
        "guide": reading_guide(),
        **{name: diagram(scenarios[name]) for name in ("unfenced", "fenced")},
    }


def markdown(table: list[list[str]]) -> str:
    head, *rows = table
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))


def scenario_table(scenarios: Any) -> str:
    table = [["scenario", "what it shows", "lease table / document"]]
    for name, scenario in scenarios.items():
        arms = run_experiment.arms_of(name, scenario)
        if len(arms) > 2:
            lost = sum(map(run_experiment.lost, arms.values()))
            told = "A is paused before each of its calls in turn, and inside a transaction."
            table.append([f"`{name}`", told, f"they differ in {lost} of {len(arms)}"])
            continue
        for arm, result in arms.items():
            played = run_experiment.arms_of(name, run_experiment.SCENARIOS[name])[arm]
            told = getattr(played, "func", played).__doc__
            title = f"`{name}`" if arm == name else f"`{name}`, {arm}"
            says, holds = run_experiment.told_and_kept(result)
            table.append([title, told, f"{says or '-'} / {holds or '-'}"])
    return markdown(table)


def diagram(result: Any) -> str:
    """Draw a scenario's events as a Mermaid sequence diagram."""
    lines = ["```mermaid", "sequenceDiagram", *map("    participant {}".format, "AB")]
    lines += ["    participant L as lease table", "    participant D as document"]
    for event in result["events"]:
        receiver = "D" if event["call"] == "write" else "L"
        asked, _, told = run_experiment.phrase(event).partition(": ")
        lines.append(f"    {event['actor']}->>{receiver}: tick {event['tick']}: {asked}")
        lines.append(f"    {receiver}-->>{event['actor']}: {told}")
    lines.append(f"    Note over A,D: {run_experiment.verdict(result).replace(';', ',')}")
    return "\n".join([*lines, "```"])


def reading_guide() -> str:
    """Count the lines that aren't blank, in fifties, at a reader's sixty-five a minute."""
    what = {
        "leases.py": "the library: statements, lease table, sink",
        "run_experiment.py": "options, workers, scenarios, processes, what is shown",
        "test_leases.py": "a class for each subject; names are sentences",
    }
    lines = ["| file | lines | minutes | what |", "| --- | --- | --- | --- |"]
    for name, told in what.items():
        lines_in = (HERE / name).read_text(encoding="utf-8").splitlines()
        count = round(sum(map(bool, lines_in)) / 50) * 50
        lines.append(f"| `{name}` | {count} | {round(count / 65)} | {told} |")
    return "\n".join(lines)


class ReadmeTest(DatabaseTest):
    def setUp(self) -> None:
        super().setUp()
        self.readme = (HERE / "README.md").read_text(encoding="utf-8")
        self.addCleanup(os.chdir, Path.cwd())
        os.chdir(self.folder)
        self.path = self.folder / "jobs.db"

    def code(self) -> dict[str, Any]:
        """Run all of the README's Python, in order, as one module."""
        names: dict[str, Any] = {}
        for block in re.findall(r"```python\n(.*?)```", self.readme, re.DOTALL):
            exec(compile(block, "README.md", "exec"), names)
        return names

    def test_what_is_generated_is_what_stands_there(self) -> None:
        for name, part in generated().items():
            marked = f"<!-- begin {name} -->\n{part}\n<!-- end {name} -->"
            self.assertTrue(marked in self.readme, f"README.md should have\n{marked}")

    def test_it_is_short_and_names_every_scenario(self) -> None:
        figures = r"```.*?```|<!-- begin speed -->.*?<!-- end speed -->"
        prose = re.sub(figures, "", self.readme, flags=re.DOTALL)
        self.assertLess(sum(any(map(str.isalnum, word)) for word in prose.split()), 1500)
        first_screen = self.readme[: self.readme.index("## ")]
        for name in (*run_experiment.STRATEGIES, *run_experiment.IDS):
            self.assertIn(name, first_screen)
        for name in run_experiment.SCENARIOS:
            self.assertIn(f"`{name}`", self.readme[self.readme.index("中文") :])

    def test_its_links_to_this_project_lead_somewhere(self) -> None:
        for name in re.findall(r"`(\w+\.(?:py|json))`", self.readme):
            self.assertTrue((HERE / name).is_file(), name)

    def test_a_store_is_put_to_the_contract_in_a_suite_of_its_own(self) -> None:
        names = self.code()
        with contextlib.redirect_stdout(io.StringIO()) as told:
            suite = names["load_tests"](None, unittest.TestSuite(), None)
        self.assertEqual(suite.countTestCases(), contract(leases, "").countTestCases())
        self.assertEqual(told.getvalue(), "")
        result = unittest.TestResult()
        unittest.defaultTestLoader.loadTestsFromTestCase(names["MyClaimTest"]).run(result)
        self.assertTrue(result.wasSuccessful() and result.testsRun > 5, result)

    def test_the_prototype_runs_a_job_once(self) -> None:
        run_once = self.code()["run_once"]
        self.assertEqual(run_once("report/1", "A", lambda lease: "text"), "done")
        self.assertEqual(run_once("report/1", "B", lambda lease: "other"), "taken or done")
        self.assertEqual(self.stored()[0][4], "text")
        self.assertEqual(self.sunk(), [("report/1", 1, 1, 0, "text")])

    def test_the_prototype_that_lost_says_so(self) -> None:
        names = self.code()
        names["now"] = iter([0, 30_000, 30_001, 30_002]).__next__

        def overtaken(lease: Lease) -> str:
            self.assertEqual(names["run_once"]("r", "B", lambda lease: "new"), "done")
            return "old"

        self.assertEqual(names["run_once"]("r", "A", overtaken), "lost")
        self.assertEqual(self.sunk(), [("r", 2, 2, 0, "new")])

    class Beats:
        """Stands for the heartbeat's `stop`: each wait is a beat, and may do something."""

        def __init__(self, *beats: Callable[[], object]) -> None:
            self.beats, self.ended = list(beats), False

        def wait(self, seconds: float) -> bool:
            self.ended = not self.beats
            if not self.ended:
                self.beats.pop(0)()
            return self.ended

        def is_set(self) -> bool:
            return self.ended

    def beaten(self, *beats: Callable[[], object]) -> tuple[bool, list[Any]]:
        """Beat at these moments from tick 0 on, ttl 10; answer whether it was lost, and the row."""
        names, self.lost, self.tick = self.code(), threading.Event(), 0
        names["now"] = lambda: self.tick
        claimed = self.table().claim("r", "A", now=0, ttl=10)
        names["beat"](claimed, 10, 3, self.Beats(*beats), self.lost)
        return self.lost.is_set(), self.stored()

    def at(self, tick: int, *also: Callable[[], object]) -> Callable[[], None]:
        def moment() -> None:
            self.tick = tick
            for act in also:
                act()

        return moment

    def test_the_heartbeat_keeps_the_lease_until_it_is_stopped(self) -> None:
        found = self.beaten(self.at(9), self.at(18), self.at(27))
        self.assertEqual(found, (False, [("r", "A", 1, 37, None)]))

    def test_the_heartbeat_takes_a_busy_database_for_no_loss(self) -> None:
        self.table()
        other = self.plain()
        busy, free = partial(other.execute, "BEGIN IMMEDIATE"), partial(other.execute, "ROLLBACK")
        with waiting(Time()):
            found = self.beaten(self.at(3, busy), self.at(6), self.at(9, free))
        self.assertEqual(found, (False, [("r", "A", 1, 19, None)]))

    def test_the_heartbeat_tells_of_a_deadline_that_has_passed(self) -> None:
        self.table()
        busy = partial(self.plain().execute, "BEGIN IMMEDIATE")
        never = partial(self.fail, "went on after the deadline")
        with waiting(Time()):
            lost, rows = self.beaten(self.at(3, busy), self.at(6), self.at(10), never)
        self.assertEqual((lost, rows), (True, [("r", "A", 1, 10, None)]))

    def test_the_heartbeat_tells_of_a_lease_that_was_taken(self) -> None:
        table = self.table()
        take = partial(table.claim, "r", "B", now=20, ttl=90)
        lost, rows = self.beaten(self.at(3), self.at(20, take), partial(self.fail, "went on"))
        self.assertEqual((lost, rows), (True, [("r", "B", 2, 110, None)]))

    def test_the_heartbeat_that_fails_tells_of_it(self) -> None:
        with self.assertRaises(ValueError):
            self.beaten(self.at(3), partial(int, "a bug"))
        self.assertTrue(self.lost.is_set())

    def test_the_heartbeat_is_stopped_with_its_block(self) -> None:
        names = self.code()
        claimed = self.table().claim("r", "A", now=names["now"](), ttl=30_000)
        before = threading.active_count()
        with names["heartbeat"](claimed) as lost:
            self.assertEqual(threading.active_count(), before + 1)
        self.assertEqual((threading.active_count(), lost.is_set()), (before, False))

    def test_any_free_run_is_claimed_among_many(self) -> None:
        names, table = self.code(), self.table()
        names["now"] = lambda: 5
        runs = [f"run/{number}" for number in range(4)]
        table.complete(table.claim("run/0", "A", now=0, ttl=10), "", now=1)
        table.claim("run/1", "A", now=0, ttl=10)
        table.claim("run/2", "A", now=0, ttl=5)
        claim_any = partial(names["claim_any"], table, runs, "B")
        self.assertEqual(
            [claim_any(), claim_any(), claim_any()],
            [
                Lease("run/2", "B", 2, 30_005),
                Lease("run/3", "B", 1, 30_005),
                None,
            ],
        )

    def test_claiming_any_goes_on_where_another_was_faster(self) -> None:
        names, table = self.code(), self.table()
        ticks = iter([5])

        def now() -> int:
            for tick in ticks:
                return tick
            table.claim("run/0", "faster", now=5, ttl=10)
            return 5

        names["now"] = now
        granted = names["claim_any"](table, ["run/0", "run/1"], "B")
        self.assertEqual(granted.resource, "run/1")

    def test_an_operation_happens_once_whoever_retries_it(self) -> None:
        pay, sink = self.code()["pay"], self.sink()
        for owner in (lease("A", 1), lease("A", 1), lease("B", 2)):
            pay(sink, owner, "invoice 7", 100)
        with self.assertRaises(Fenced):
            pay(sink, lease("A", 1), "invoice 8", 100)
        self.assertEqual(self.stored("SELECT * FROM payment"), [("invoice 7", 100)])

    def test_a_files_pointer_never_goes_back(self) -> None:
        publish, sink = self.code()["publish"], self.sink()
        answers = [publish(sink, lease("A", epoch), self.folder, f"{epoch}") for epoch in (1, 2, 1)]
        self.assertEqual(answers, ["written", "written", "stale"])
        self.assertEqual((self.folder / sink.get("r").value).read_text(encoding="utf-8"), "2")


# ---- The contract, for any store


CONTRACT: tuple[type[ContractTest], ...] = (
    *(ClaimTest, RenewTest, CompleteTest, ReleaseTest, AdvanceTest),
    *(SinkTest, SequenceTest, SealTest, TransactionTest, GuardedTest),
    *(TakeOverTest, ReconcileTest, ReadTest, ArgumentsTest, StepsTest, ProcessTest),
)


def contract(store: Any, name: str) -> unittest.TestSuite:
    """Give the tests of what any store owes, put to this one; name those that it can't take.

    `name` is the store's import name or its file's path, for the processes that are spawned.
    """
    suite = unittest.TestSuite()
    for case in CONTRACT:
        if case.needs and not hasattr(store.FencedSink, case.needs) | hasattr(
            store.LeaseTable, case.needs
        ):
            print(f"left out: {case.__name__}, since the store has no {case.needs}")
            continue
        bound = type(case.__name__, (case,), {"store": store, "name": name})
        suite.addTests(unittest.defaultTestLoader.loadTestsFromTestCase(bound))
    return suite


STORE = ""  # the value of --store


def load_tests(loader: Any, tests: unittest.TestSuite, pattern: Any) -> unittest.TestSuite:
    """Follow unittest's protocol: all tests, or with --store those of the contract."""
    if not STORE:
        return tests
    suite = contract(run_experiment.load_store(STORE), STORE)
    count, every = suite.countTestCases(), tests.countTestCases()
    print(
        f"{count} of {every} tests put to {STORE}; the others are about SQLite and the experiment"
    )
    return suite


def main() -> None:
    """Take --store MODULE, and leave the other options to unittest."""
    global STORE
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--store", default="")
    options, rest = parser.parse_known_args()
    STORE = options.store
    try:
        with run_experiment.fresh(run_experiment.load_store(STORE)):
            pass
    except Exception as error:  # it can't be imported, or no server answers
        sys.exit(fail(f"test_leases.py: {STORE}: {' '.join(str(error).split())}"))
    unittest.main(argv=[sys.argv[0], *rest])


def fail(line: str) -> int:
    print(line, file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
