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
import unittest
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import leases
import run_experiment
from leases import Fenced, FencedSink, Lease, LeaseRow, LeasesError, LeaseTable, SinkRow

HERE = Path(__file__).resolve().parent
TOP = 2**63 - 1
FOREVER = 60  # seconds: a limit that a test that works never comes near
SPAWN = multiprocessing.get_context("spawn")


class DatabaseTest(unittest.TestCase):
    """A test with a folder, and with objects that are closed after it."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="leases-test-")
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.path = self.folder / "leases.db"

    def table(self, **options: Any) -> Any:
        opened = LeaseTable(self.path, **options)
        self.addCleanup(opened.close)
        return opened

    def sink(self, **options: Any) -> Any:
        opened = FencedSink(self.path, **options)
        self.addCleanup(opened.close)
        return opened

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
        self.now, self.sleeps, self.during = 1000.0, 0, during

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + 0.001  # no sleep is shorter on a real machine
        self.sleeps += 1
        self.during()


def waiting(time: Time) -> Any:
    return mock.patch.object(leases, "time", time)


def lease(owner: str = "A", epoch: int = 1, resource: str = "r") -> Lease:
    return Lease(resource, owner, epoch, 10)


class ClaimTest(DatabaseTest):
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
            "r" * 5000,
        ]
        for name in names:
            self.assertEqual(table.claim(name, name, now=0, ttl=1).epoch, 1)
        self.assertEqual([row.resource for row in table.rows()], sorted(names, key=str.encode))
        self.assertEqual([row[0] for row in self.stored()], sorted(names, key=str.encode))


class RenewTest(DatabaseTest):
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


class CompleteTest(DatabaseTest):
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
        table, other = self.table(), self.plain()
        read = "SELECT epoch, deadline, result FROM lease"
        granted = table.claim("r", "A", now=0, ttl=10)
        self.assertEqual(other.execute(read).fetchall(), [(1, 10, None)])
        self.assertEqual(table.renew(granted, now=1, ttl=10), Lease("r", "A", 1, 11))
        self.assertEqual(other.execute(read).fetchall(), [(1, 11, None)])
        self.assertIs(table.complete(granted, "x", now=1), True)
        self.assertEqual(other.execute(read).fetchall(), [(1, 11, "x")])


class ReleaseTest(DatabaseTest):
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


class SinkTest(DatabaseTest):
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

    def test_the_sink_works_without_any_lease_table(self) -> None:
        self.assertEqual(self.sink().write("r", 7, "x"), "written")
        self.assertEqual(
            self.stored("SELECT name FROM sqlite_master WHERE type = 'table'"), [("sink",)]
        )

    def test_a_large_value_comes_back_as_it_was(self) -> None:
        sink, value = self.sink(), "é\U0001f600\r\n" * 100_000
        self.assertEqual(sink.write("r", 1, value), "written")
        self.assertEqual(sink.write("r", 1, value), "replay")
        self.assertEqual(self.sunk(), [("r", 1, 1, 0, value)])


class ReadTest(DatabaseTest):
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

    def test_values_are_tuples_that_can_be_sent(self) -> None:
        for value in (lease(), LeaseRow("r", "A", 1, 2, None), SinkRow("r", 1, 1, 0, "v")):
            self.assertEqual(pickle.loads(pickle.dumps(value)), value)
        self.assertEqual(Lease._fields, ("resource", "owner", "epoch", "deadline"))
        self.assertEqual(LeaseRow._fields, ("resource", "owner", "epoch", "deadline", "result"))
        self.assertEqual(SinkRow._fields, ("resource", "fence", "epoch", "seq", "value"))


NOT_INTS: list[Any] = [True, False, 10.0, "10", b"\x0a", None, float("nan"), float("inf"), (1,)]
NOT_NAMES: list[Any] = [1, None, b"r", True, ["r"], Path("r")]
BAD_NAMES = ["", "\0", "r\0", "\ud800", "a\udfffb"]


class ArgumentsTest(DatabaseTest):
    def calls(self) -> Iterator[tuple[str, Callable[[Any], object], str]]:
        """Give every public call with one argument left open, its name and its kind."""
        table, sink = self.table(), self.sink()
        held = lease()
        yield "resource", lambda x: table.claim(x, "A", now=0, ttl=1), "name"
        yield "owner", lambda x: table.claim("n", x, now=0, ttl=1), "name"
        yield "now", lambda x: table.claim("n", "A", now=x, ttl=1), "from 0"
        yield "ttl", lambda x: table.claim("n", "A", now=0, ttl=x), "from 1"
        yield "now", lambda x: table.renew(held, now=x, ttl=1), "from 0"
        yield "ttl", lambda x: table.renew(held, now=0, ttl=x), "from 1"
        yield "result", lambda x: table.complete(held, x, now=0), "text"
        yield "now", lambda x: table.complete(held, "x", now=x), "from 0"
        yield "now", lambda x: table.release(held, now=x), "from 0"
        yield "resource", table.get, "name"
        yield "resource", lambda x: sink.write(x, 1, "v"), "name"
        yield "epoch", lambda x: sink.write("n", x, "v"), "from 1"
        yield "value", lambda x: sink.write("n", 1, x), "text"
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
        asked = 0
        for argument, call, kind in self.calls():
            wrong = {"name": (NOT_NAMES, BAD_NAMES), "text": (NOT_NAMES, BAD_NAMES[1:])}
            low = {"from 0": [-1, -TOP], "from 1": [0, -1]}.get(kind, [])
            types, values = wrong.get(kind, (NOT_INTS, [*low, 2**63, 2**80]))
            for error, cases in ((TypeError, types), (ValueError, values)):
                for case in cases:
                    with self.subTest(argument=argument, case=case):
                        self.assertRaisesRegex(error, argument, call, case)
                        asked += 1
        self.assertEqual(asked, 8 * 11 + 2 * 10 + 10 * 13)
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
        self.plain().execute("UPDATE lease SET epoch = ?", (TOP,))
        self.assertIsNone(table.claim("m", "B", now=9, ttl=10))
        with self.assertRaisesRegex(OverflowError, "'m'"):
            table.claim("m", "B", now=10, ttl=10)
        self.assertEqual(
            self.stored("SELECT typeof(epoch), epoch, owner FROM lease"), [("integer", TOP, "A")]
        )
        self.assert_usable(table)

    def test_the_last_epoch_can_still_be_written(self) -> None:
        sink = self.sink()
        self.assertEqual(sink.write("r", TOP, "v"), "written")
        with sink.transaction("r", TOP):
            pass
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
            ):
                self.assertRaisesRegex(TypeError, "lease must be a Lease", call, row)
        self.assertEqual(self.stored(), [("r", "A", 1, 10, None)])

    def test_ticks_and_names_of_the_calls_are_keywords(self) -> None:
        with self.assertRaises(TypeError):
            self.table().claim("r", "A", 0, 1)
        with self.assertRaises(TypeError):
            LeaseTable(self.path, 1)  # type: ignore[call-arg]

    def test_a_timeout_is_finite_and_not_negative(self) -> None:
        for kind in (LeaseTable, FencedSink):
            for wrong in (True, "1", None, b"1"):
                with self.assertRaisesRegex(TypeError, "timeout"):
                    kind(self.path, timeout=wrong)  # type: ignore[arg-type]
            for value in (-1, -0.1, float("nan"), float("inf"), float("-inf")):
                with self.assertRaisesRegex(ValueError, "timeout"):
                    kind(self.path, timeout=value)
            for value in (0, 0.0, 3, 10**400):
                kind(self.path, timeout=value).close()

    def test_errors_share_a_base_and_carry_their_evidence(self) -> None:
        error = pickle.loads(pickle.dumps(Fenced("r", 1, 2)))
        self.assertIsInstance(error, LeasesError)
        self.assertEqual((error.resource, error.epoch, error.fence), ("r", 1, 2))
        self.assertRegex(str(error), r"'r'.*1.*2")


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

    def test_any_other_call_inside_a_block_is_refused(self) -> None:
        sink = self.business
        for name in "ab":
            sink.write(name, 1, name)
        rows = sink.rows()
        self.assertEqual(next(rows).resource, "a")
        with sink.transaction("r", 1) as connection:
            for call in (
                lambda: sink.write("s", 1, "v"),
                lambda: sink.get("s"),
                lambda: next(rows),
                lambda: next(sink.rows()),
                lambda: sink.transaction("s", 1).__enter__(),
                sink.close,
            ):
                self.assertRaises(RuntimeError, call)
            self.insert(connection)
        self.assertEqual(self.work(), [(1, "done")])
        self.assert_usable(sink)

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
        for call in (
            lambda: table.claim("s", "A", now=0, ttl=1),
            lambda: table.renew(granted, now=0, ttl=20),
            lambda: table.complete(granted, "x", now=0),
            lambda: table.release(granted, now=0),
            lambda: sink.write("r", 1, "v"),
            lambda: sink.transaction("r", 1).__enter__(),
        ):
            self.assertRaisesRegex(sqlite3.OperationalError, "readonly.*leases.db", call)
        self.assertEqual(table.get("r"), LeaseRow("r", "A", 1, 10, None))
        self.assertEqual(self.stored() + self.sunk(), [("r", "A", 1, 10, None)])
        self.assert_usable()

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
        calls: list[Callable[[], object]] = [
            lambda: table.claim("s", "A", now=0, ttl=1),
            lambda: table.renew(granted, now=0, ttl=20),
            lambda: table.complete(granted, "x", now=0),
            lambda: table.release(granted, now=0),
            lambda: sink.write("r", 1, "v"),
            lambda: sink.transaction("r", 1).__enter__(),
        ]
        for call in calls:
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
        for call in (
            lambda: table.claim("s", "A", now=0, ttl=1),
            lambda: table.renew(granted, now=0, ttl=20),
            lambda: table.complete(granted, "x", now=0),
            lambda: table.release(granted, now=0),
            lambda: sink.write("r", 1, "v"),
            lambda: sink.transaction("r", 1).__enter__(),
        ):
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
            for call in (
                lambda: table.claim("s", "A", now=0, ttl=1),
                lambda: table.renew(granted, now=0, ttl=20),
                lambda: table.complete(granted, "x", now=0),
                lambda: table.release(granted, now=0),
                lambda: sink.write("r", 1, "v"),
                lambda: sink.transaction("r", 1).__enter__(),
            ):
                self.assertRaisesRegex(sqlite3.IntegrityError, "no.*leases.db", call)
                self.assertEqual(self.stored() + self.sunk(), [("r", "A", 1, 10, None)])
                self.assert_usable()
            for (trigger,) in self.stored("SELECT name FROM sqlite_master WHERE type = 'trigger'"):
                plain.execute(f"DROP TRIGGER {trigger}")
        self.assert_usable(table, sink)

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


def claim_all(path: Path, owner: str, gate: Gate) -> list[int | None]:
    """Claim 200 resources at one tick, together with the others."""
    with LeaseTable(path, timeout=FOREVER) as table:
        gate.wait()
        granted = [table.claim(f"r{n:03}", owner, now=0, ttl=10) for n in range(200)]
        return [lease and lease.epoch for lease in granted]


def take_turns(path: Path, owner: str, gate: Gate) -> list[int]:
    """Claim one resource until it was granted 50 times, giving it back each time."""
    epochs: list[int] = []
    with LeaseTable(path, timeout=FOREVER) as table:
        gate.wait()
        while len(epochs) < 50:
            if granted := table.claim("hot", owner, now=1, ttl=10):
                epochs.append(granted.epoch)
                table.release(granted, now=1)
    return epochs


def open_together(folder: Path, owner: str, gate: Gate) -> list[str]:
    """Open a fresh file together with the others, 20 times over."""
    for number in range(20):
        gate.wait()
        with LeaseTable(folder / f"fresh{number}", timeout=FOREVER) as table:
            table.claim(owner, owner, now=0, ttl=1)
        with FencedSink(folder / f"fresh{number}", timeout=FOREVER) as sink:
            sink.write(owner, 1, owner)
    return ["opened"] * 20


def run_and_tell(pipe: Any, work: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    pipe.send(work(*arguments))


class ProcessTest(DatabaseTest):
    def together(self, work: Callable[..., Any], owners: list[str], where: Path) -> list[Any]:
        """Run the work in a process for each owner, and give back what each of them answered."""
        gate, answers, running = Gate(len(owners)), [], []
        for owner in owners:
            here, there = SPAWN.Pipe(duplex=False)
            arguments = (there, work, (where, owner, gate))
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

    def test_c10_two_processes_never_both_get_a_resource(self) -> None:
        self.table()
        one, other = self.together(claim_all, ["A", "B"], self.path)
        self.assertEqual(
            {*zip(one, other, strict=True)} | {(1, None), (None, 1)}, {(1, None), (None, 1)}
        )
        winners = ["A" if epoch else "B" for epoch in one]
        self.assertEqual([(row[1], row[2]) for row in self.stored()], [(w, 1) for w in winners])

    def test_c13_of_three_processes_of_one_name_one_wins(self) -> None:
        answers = self.together(claim_all, ["w", "w", "w"], self.path)
        for epochs in zip(*answers, strict=True):
            self.assertEqual(sorted(epochs, key=str), [1, None, None])

    def test_four_processes_are_granted_each_epoch_once(self) -> None:
        self.table()
        answers = self.together(take_turns, ["A", "B", "C", "D"], self.path)
        self.assertEqual(sorted(itertools.chain(*answers)), list(range(1, 201)))
        self.assertEqual([(row[2], row[3]) for row in self.stored()], [(200, 0)])

    def test_c09_eight_processes_open_a_fresh_file_together(self) -> None:
        answers = self.together(open_together, list("ABCDEFGH"), self.folder)
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

    def test_c10_a_write_between_the_sinks_read_and_its_own_is_impossible(self) -> None:
        one, other = self.sink(), self.sink(timeout=0)
        one.write("r", 1, "old")
        with self.paused_after_reading(one, lambda: other.write("r", 3, "newest")):
            self.assertEqual(one.write("r", 2, "new"), "written")
        self.assertEqual(other.write("r", 3, "newest"), "written")
        self.assertEqual(self.sunk(), [("r", 3, 3, 0, "newest")])

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
        if name == "claim":
            if self.row and (self.row[3] is not None or now < self.row[2]):
                return None
            self.row = (owner, self.row[1] + 1 if self.row else 1, now + ttl, None)
            return Lease("r", *self.row[:3])
        mine = self.row is not None and self.row[:2] == (owner, epoch)
        deadline, result = self.row[2:] if self.row else (0, None)
        if name == "complete" and mine and result == owner:
            return True
        if not mine or now >= deadline or result is not None:
            return None if name == "renew" else False
        if name == "renew":
            self.row = (owner, epoch, max(deadline, now + ttl), None)
            return Lease("r", *self.row[:3])
        self.row = (owner, epoch, 0 if name == "release" else deadline, None)
        if name == "complete":
            self.row = (owner, epoch, deadline, owner)
        return True


class SinkModel:
    """What one resource's row in the sink must be: the fence, and who wrote what last."""

    def __init__(self) -> None:
        self.row: tuple[int, int, int, str | None] | None = None  # fence, epoch, seq, value

    def call(self, name: str, epoch: int, value: str) -> object:
        fence, wrote, _, stored = self.row or (0, 0, 0, None)
        if epoch < fence:
            return "stale" if name == "write" else "fenced"
        if name == "transaction":
            self.row = (epoch, wrote, 0, stored)
            return "admitted"
        if wrote == epoch:
            return "replay" if stored == value else "conflict"
        self.row = (epoch, epoch, 0, value)
        return "written"


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
        others = itertools.product(["renew", "complete", "release"], "AB", epochs, ticks, [ttl])
        return [*claims, *others]

    def lease_table(self) -> Callable[..., object]:
        table = self.table()
        unsynced: Any = table._connection  # the answers are the same, and the disk is spared
        unsynced.execute("PRAGMA synchronous = OFF")

        def real(name: str, owner: str, epoch: int, now: int, ttl: int) -> object:
            if name == "claim":
                return table.claim("r", owner, now=now, ttl=ttl)
            held = Lease("r", owner, epoch, 0)
            if name == "renew":
                return table.renew(held, now=now, ttl=ttl)
            return (
                table.complete(held, owner, now=now)
                if name == "complete"
                else table.release(held, now=now)
            )

        return real

    def test_all_short_sequences_of_many_calls_agree(self) -> None:
        calls = self.lease_calls((0, 1, 2), 2, (1, 2))
        self.assertEqual(len(calls), 42)
        count = self.explore("lease", 3, calls, self.lease_table(), Model())
        self.assertEqual(count, 42 + 42**2 + 42**3)

    def test_all_longer_sequences_of_few_calls_agree(self) -> None:
        calls = self.lease_calls((0, 1), 1, (1,))
        self.assertEqual(len(calls), 16)
        count = self.explore("lease", 4, calls, self.lease_table(), Model())
        self.assertEqual(count, 16 + 16**2 + 16**3 + 16**4)

    def test_all_sequences_of_the_sinks_calls_agree(self) -> None:
        sink = self.sink()
        unsynced: Any = sink._connection
        unsynced.execute("PRAGMA synchronous = OFF")

        def real(name: str, epoch: int, value: str) -> object:
            if name == "write":
                return sink.write("r", epoch, value)
            try:
                with sink.transaction("r", epoch):
                    return "admitted"
            except Fenced:
                return "fenced"

        writes = itertools.product(["write"], (1, 2, 3), "xy")
        calls = [*writes, *(("transaction", epoch, "") for epoch in (1, 2, 3))]
        count = self.explore("sink", 4, calls, real, SinkModel())
        self.assertEqual(count, 9 + 9**2 + 9**3 + 9**4)


# ---- Killed at any moment


def work_until_killed(path: Path, seed: int, pipe: Any) -> None:
    """Claim, write and complete for ever, reporting each answer as soon as it is there."""
    with LeaseTable(path, timeout=FOREVER) as table, FencedSink(path, timeout=FOREVER) as sink:
        for number in itertools.count():
            for name in ("hot", f"job {seed} {number}"):
                granted = table.claim(name, f"worker {seed}", now=1, ttl=10)
                if granted is None:
                    raise SystemExit(f"{name} was not granted")
                pipe.send(("claimed", name, granted.epoch))
                value = f"{seed} {number}"
                pipe.send((sink.write(name, granted.epoch, value), name, granted.epoch, value))
                if name == "hot":
                    table.release(granted, now=1)
                else:
                    pipe.send((table.complete(granted, value, now=1), name, value))


class KillTest(DatabaseTest):
    def test_no_answer_is_lost_by_fifty_kills(self) -> None:
        random_moments, epochs = random.Random(20), {"hot": 0}
        self.table(), self.sink()
        for seed in range(50):
            self.plain().execute("UPDATE lease SET deadline = 0 WHERE resource = 'hot'")
            here, there = SPAWN.Pipe(duplex=False)
            process = SPAWN.Process(
                target=work_until_killed, args=(self.path, seed, there), daemon=True
            )
            process.start()
            there.close()
            reports = [self.hear(here) for _ in range(random_moments.randint(1, 40))]
            process.kill()
            with contextlib.suppress(EOFError):
                while True:
                    reports.append(self.hear(here))
            process.join(FOREVER)
            self.assertEqual(process.exitcode, -signal.SIGKILL if os.name == "posix" else 1)
            self.check(reports, epochs)

    def hear(self, pipe: Any) -> Any:
        self.assertTrue(pipe.poll(FOREVER), "the worker said nothing")
        return pipe.recv()

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

    def at(self, document: Any, path: tuple[Any, ...]) -> tuple[Any, Any]:
        for key in path[:-1]:
            document = document[key]
        return document, path[-1]

    def test_a_change_of_any_leaf_is_found_and_named(self) -> None:
        changed, tampered = 0, copy.deepcopy(self.archived)
        for path in leaves(self.archived):
            parent, key = self.at(tampered, path)
            true = parent[key]
            for other in others(true):
                parent[key] = other
                found = run_experiment.first_difference(tampered, self.archived)
                self.assertTrue(found and found.startswith(spell(path)), (path, other, found))
                if changed % 50 == 0:  # what the verdict prints takes most of the time
                    self.assertEqual(self.verdict(tampered), 1)
                changed += 1
            parent[key] = true
        self.assertEqual(tampered, self.archived)
        self.assertGreater(changed, 3000)

    def test_a_leaf_that_is_missing_or_new_is_found(self) -> None:
        shorter = copy.deepcopy(self.archived)
        for path in leaves(self.archived):
            parent, key = self.at(shorter, path)
            before = copy.copy(parent)
            del parent[key]
            for one, other in ((shorter, self.archived), (self.archived, shorter)):
                self.assertIsNotNone(run_experiment.first_difference(one, other), path)
            parent.clear()
            parent.update(before) if isinstance(parent, dict) else parent.extend(before)
        self.assertEqual(shorter, self.archived)

    def test_the_order_of_keys_is_no_difference(self) -> None:
        turned = dict(reversed(self.archived["scenarios"].items()))
        self.assertEqual(self.verdict({"scenarios": turned}), 0)

    def verdict(self, archive: Any) -> int:
        """Compare an archive with a run that gave the true results."""
        options = argparse.Namespace(check=Path("archive"))
        with contextlib.redirect_stdout(io.StringIO()):
            pair = (archive, run_experiment.text(archive))
            return run_experiment.judge(pair, self.archived, options)


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
        done = self.run_it("--pause", "sigstop", "--check", RESULTS, "--quiet")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertEqual(len(done.stdout.strip().splitlines()), 2)

    def test_named_scenarios_are_compared_alone(self) -> None:
        archived = json.loads(RESULTS.read_text(encoding="utf-8"))
        archived["scenarios"]["window"]["events"].clear()
        (self.folder / "tampered.json").write_text(json.dumps(archived), encoding="utf-8")
        for names, status in (("unfenced", 0), ("window", 1), ("two_files window unfenced", 1)):
            done = self.run_it(*names.split(), "--check", self.folder / "tampered.json")
            self.assertEqual((done.returncode, done.stderr), (status, ""))
        self.assertIn("scenarios.window.events: 0 items became 7", done.stdout)
        self.assertIn("--- ", done.stdout)

    def test_a_difference_is_shown_and_the_output_still_written(self) -> None:
        tampered = self.folder / "tampered.json"
        tampered.write_text(RESULTS.read_text(encoding="utf-8").replace("stale", "written", 1))
        output = self.folder / "out.json"
        done = self.run_it("--check", tampered, "--output", output)
        self.assertEqual((done.returncode, done.stderr), (1, ""))
        self.assertRegex(done.stdout, r'(?m)^-.*"written"$')
        self.assertRegex(done.stdout, r'(?m)^\+.*"stale"$')
        self.assertIn("DIFFERENT", done.stdout.splitlines()[-1])
        self.assertIn("scenarios.fenced.events[4].answer", done.stdout.splitlines()[-1])
        self.assertEqual(output.read_bytes(), RESULTS.read_bytes())

    def test_the_same_values_in_other_bytes_are_reproduced(self) -> None:
        other = self.folder / "other.json"
        other.write_text(json.dumps(json.loads(RESULTS.read_text(encoding="utf-8"))))
        done = self.run_it("--check", other, "--quiet")
        self.assertEqual(done.returncode, 0)
        self.assertIn("not the same bytes", done.stdout)

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
        self.assert_refused(self.run_it("--output", self.folder / "none" / "x.json"), "none")
        self.assert_refused(self.run_it("--output", self.folder), "regular")
        if os.path.exists(os.devnull) and os.name == "posix":
            self.assert_refused(self.run_it("--output", os.devnull), "regular")
            self.assertFalse(os.path.isfile(os.devnull))

    def test_wrong_options_are_refused_in_one_line(self) -> None:
        for arguments, word in (
            (["--nonsense"], "--nonsense"),
            (["nobody"], "nobody"),
            (["--pause", "sleep"], "--pause"),
            (["--check"], "--check"),
            (["--che", str(RESULTS)], "--che"),
            (["unfenced", "--output", "x.json"], "--output"),
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
        tampered.write_text(RESULTS.read_text(encoding="utf-8").replace("true", "1"))
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
import sys, run_experiment as experiment
def hang(stage):
    stage.worker("A", "old", experiment.PLAIN).run(0, until="write")
    print(stage.leases.parent.parent, flush=True)
    sys.stdin.read()
def die(stage):
    a = stage.worker("A", "old", experiment.PLAIN)
    a.run(0, until="write")
    a.process.kill()
    a.run(1)
def wait(stage):
    experiment.LIMIT = 0.05
    stage.worker("A", "old", experiment.PLAIN).hear("write")
def fail(stage):
    stage.worker("A", "old", ("clock", "complete")).run(0)
experiment.SCENARIOS = {"hang": hang, "die": die, "wait": wait, "fail": fail}
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
            "fail": "A did not end its work, but failed: TypeError: lease must be a Lease",
        }.items():
            with self.subTest(scenario), self.trouble(scenario) as parent:
                out, errors = parent.communicate(timeout=FOREVER)
                self.assertEqual(parent.returncode, 2, errors)
                self.assertIn(words, errors)
                self.assertEqual((len(errors.splitlines()), out), (1, ""))
        self.assertEqual(list(self.folder.iterdir()), [])


# ---- The README


def generated() -> dict[str, str]:
    """Make the parts of the README that stand between `begin` and `end` marks."""
    scenarios = json.loads(RESULTS.read_text(encoding="utf-8"))["scenarios"]
    parts = {"results": results_table(scenarios), "guide": reading_guide()}
    return parts | {name: diagram(scenarios[name]) for name in ("unfenced", "fenced")}


def results_table(scenarios: Any) -> str:
    head, *rows = run_experiment.matrix(scenarios)
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))


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
    """Count the lines, in fifties, at a reader's sixty a minute."""
    what = {
        "leases.py": "the library: statements, lease table, sink",
        "run_experiment.py": "options, workers, scenarios, processes, what is shown",
        "test_leases.py": "a class for each subject; names are sentences",
    }
    lines = ["| file | lines | minutes | what |", "| --- | --- | --- | --- |"]
    for name, told in what.items():
        count = round(len((HERE / name).read_text(encoding="utf-8").splitlines()) / 50) * 50
        lines.append(f"| `{name}` | {count} | {round(count / 60)} | {told} |")
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
        self.assertLess(len(re.sub(r"```.*?```", "", self.readme, flags=re.DOTALL).split()), 1500)
        first_screen = self.readme[: self.readme.index("## ")]
        for name in run_experiment.SCENARIOS:
            self.assertIn(name, first_screen)
            self.assertIn(f"`{name}`", self.readme[self.readme.index("中文") :])

    def test_its_links_to_this_project_lead_somewhere(self) -> None:
        for name in re.findall(r"`(\w+\.(?:py|json))`", self.readme):
            self.assertTrue((HERE / name).is_file(), name)

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


if __name__ == "__main__":
    unittest.main()
