"""Let real processes pause, take over and wake, and reproduce what they left in the tables.

    python3 run_experiment.py                        run and show every scenario
    python3 run_experiment.py unfenced fenced        run and show these two
    python3 run_experiment.py --check results.json   run everything and compare it with the archive
    python3 run_experiment.py --store MODULE ...     run it on another store than leases.py

In the scenarios worker A claims a resource and is paused, B takes over, A goes on. Each worker is
a process of its own with connections of its own, and is paused by a gate before one of its calls,
or by a signal (`--pause sigstop`). No clock and no sleep decides about an order: a process goes on
when the one before it has said that it is paused or has ended.

The tables say which strategy gives which guarantee. Every interleaving of two workers' calls and
the clock's ticks is run on the real leases.py, without a restore and with one, and each guarantee
is judged after every call, since a worker may never go on.

Exit status: 0 reproduced (or nothing was to be compared), 1 different, 2 could not run.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.util
import io
import itertools
import json
import multiprocessing
import os
import platform
import signal
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from functools import cache, partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

import leases as sqlite_store
from leases import Fenced, FencedSink, Lease, LeaseLost, LeaseTable, SinkRow, reconcile, take_over

LIMIT = 15.0  # seconds that anything is waited for
RESOURCE = "report"
POSIX = os.name == "posix"
Document = dict[str, Any]  # results.json, or a part of it, as parsed
Scenario = Callable[["Stage"], None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for, show it, archive it, compare it; answer with the exit status."""
    options = parse(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace", line_buffering=True)  # names may be odd
    try:
        archived, began = load(options.check), time.perf_counter()
        options.left_out = left_out(options.store)
        if options.output:
            place(options.output)
        document = run(options)
        if options.output:
            save(document, options.output)
        print(
            f"\n{', '.join(document)} in {time.perf_counter() - began:.1f} s, "
            f"Python {platform.python_version()}, SQLite {sqlite3.sqlite_version}, {sys.platform}"
        )
        return judge(archived, document, options)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
    except Exception as error:
        if not (options.store or isinstance(error, (ExperimentError, OSError, sqlite3.Error))):
            raise  # a bug, unless another store has raised it
        print(f"run_experiment.py: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("run_experiment.py: interrupted", file=sys.stderr)
        return 130


class ExperimentError(Exception):
    """The experiment could not be run: a child died, a wait took too long, a file is unusable."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong with the options in one line."""

    def error(self, message: str) -> NoReturn:
        """Exit with 2 and the message alone."""
        self.exit(2, f"run_experiment.py: {message} (see --help)\n")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    summary, _, rest = (__doc__ or "").partition("\n")
    parser = Parser(
        prog="run_experiment.py",
        description=summary,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("scenario", nargs="*", metavar="SCENARIO", help=f"one of {', '.join(SCENARIOS)}")
    add("--check", metavar="FILE", type=Path, help="compare with this archive")
    add("--output", metavar="FILE", type=Path, help="archive the results in this file")
    add("--pause", choices=("gate", "sigstop"), default="gate", help="how a worker is paused")
    add("--workers", type=int, choices=(2, 3), default=2, help="how many the tables are for")
    add("--store", metavar="MODULE", default="", help="a store, by import name or by path")
    add("--quiet", action="store_true", help="show only the verdict")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.scenario if name not in SCENARIOS]:
        parser.error(f"no scenario {unknown[0]!r}; there are {', '.join(SCENARIOS)}")
    if options.output and options.scenario:
        parser.error("--output archives every scenario, so name none beside it")
    if options.output and options.check and same_file(options.output, options.check):
        parser.error("--output may not be the file that --check compares with")
    if options.pause == "sigstop" and not hasattr(signal, "SIGSTOP"):
        parser.error("--pause sigstop needs POSIX signals")
    if options.workers == 3 and (options.scenario or options.check or options.output):
        parser.error("--workers 3 is for the tables alone, and is not archived")
    if not os.path.isfile(globals().get("__file__", "")):
        parser.error("run it from its file: the processes that it spawns import that file again")
    options.tables = not options.scenario
    wanted = options.scenario or SCENARIOS if options.workers == 2 else ()
    options.scenario = [name for name in SCENARIOS if name in wanted]
    return options


def same_file(one: Path, other: Path) -> bool:
    """Tell whether two names are one file, also by a link."""
    return one.resolve() == other.resolve() or (
        one.exists() and other.exists() and one.samefile(other)
    )


# ---- The store that is put to the test


@cache
def load_store(name: str) -> ModuleType:
    """Import a store, by its import name or by the path of its file; the nameless is leases.py.

    A store is a module that offers

    - `LeaseTable(location, *, timeout=5.0)` and `FencedSink(location, *, timeout=5.0)`, with the
      methods, answers and rows of those in leases.py, and its errors: TypeError, ValueError,
      OverflowError, LeaseLost, Fenced, and RuntimeError inside a block. What its database raises
      is its own, and is recorded as "error" where a block meets it. Without a connection to hand
      out it has no `guard` or no `transaction`; what needs them is then left out, by name.
    - in a block, a connection with `execute(sql)`, whose cursor has `description` and `fetchall`;
    - `fresh()`, a context manager that gives two empty locations, for the lease table and for the
      sink: strings that its classes open, in spawned processes too, apart from those of other
      runs, and gone afterwards. Without it, two paths in a temporary folder are given.
    """
    if not name:
        return sqlite_store
    if not name.endswith(".py"):
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(Path(name).stem, name)
    if spec is None or spec.loader is None:
        raise ExperimentError(f"can't import {name}")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def fresh(store: ModuleType) -> Iterator[tuple[str, str]]:
    """Give two empty locations, for the lease table and for the sink."""
    if hasattr(store, "fresh"):
        with store.fresh() as locations:
            yield locations
    else:
        with tempfile.TemporaryDirectory(prefix="leases-") as folder:
            yield str(Path(folder, "leases.db")), str(Path(folder, "sink.db"))


def left_out(name: str) -> dict[str, str]:
    """Name what a store can't play, by its path in the archive, each with the reason."""
    store, out = load_store(name), {}
    if name:
        out["scenarios.restored"] = "it puts an SQLite file back"
    if not hasattr(store.FencedSink, "transaction"):
        no = "the sink has no transaction"
        out |= dict.fromkeys([f"scenarios.every_pause.{arm}" for arm in INSIDE], no)
        out["scenarios.rollback"] = no
    if not hasattr(store.LeaseTable, "guard"):
        no = "the lease table has no guard"
        arms = [f"scenarios.every_pause.guarded before {call}" for call in PAUSES["guarded"]]
        out |= dict.fromkeys([*arms, "guarantees.guarded"], no)
    return out


def reasons(out: dict[str, str]) -> list[str]:
    """Name what was left out, grouped by its reason."""
    groups: dict[str, list[str]] = {}
    for path, reason in out.items():
        groups.setdefault(reason, []).append(path)
    return [f"{', '.join(paths)} (since {reason})" for reason, paths in groups.items()]


def without(document: Document, paths: Iterable[str]) -> Document:
    """Give a document without what stands at these paths."""
    for path in paths:
        step, _, rest = path.partition(".")
        if isinstance(document, dict) and step in document:
            kept = {key: child for key, child in document.items() if key != step}
            document = {**kept, step: without(document[step], [rest])} if rest else kept
    return document


# ---- Archiving and comparing


def text(node: object, margin: int = 0) -> str:
    """Write a document as results.json has it: whatever fits in a line stands in one."""
    line = json.dumps(node)
    if len(line) + margin <= 200 or not isinstance(node, (dict, list)) or not node:
        return line
    left, right = "{}" if isinstance(node, dict) else "[]"
    named = node.items() if isinstance(node, dict) else ((None, child) for child in node)
    parts = [
        (f"{json.dumps(name)}: " if name is not None else "") + text(child, margin + 1)
        for name, child in named
    ]
    space = "\n" + " " * (margin + 1)
    return f"{left}{space}{f',{space}'.join(parts)}{space[:-1]}{right}"


def load(path: Path | None) -> tuple[Document, str] | None:
    """Read an archive: as parsed, and as it stands in the file."""
    if path is None:
        return None
    try:
        written = path.read_bytes().decode()
        document = json.loads(written)
    except (OSError, ValueError, RecursionError) as error:
        raise ExperimentError(f"can't read {path}: {error}") from None
    if not isinstance(document, dict):
        raise ExperimentError(f"can't compare with {path}: it holds no JSON object")
    return document, written


def place(path: Path) -> Path:
    """Say early where an archive can't be written; answer where it goes."""
    target = path.resolve()
    if target.exists() and not target.is_file():
        raise ExperimentError(f"can't write {path}: it is no regular file")
    if not os.access(target.parent, os.W_OK):
        raise ExperimentError(f"can't write {path}: its folder is missing or not to be written")
    return target


def save(document: Document, path: Path) -> None:
    """Archive a document in one step, so that no reader ever finds half of it."""
    target = place(path)
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        with part.open("x", encoding="ascii", newline="\n") as file:
            file.write(text(document) + "\n")
            file.flush()
            os.fsync(file.fileno())
        part.replace(target)
    except OSError as error:
        raise ExperimentError(f"can't write {path}: {error.strerror}") from None
    finally:
        part.unlink(missing_ok=True)


def judge(
    archived: tuple[Document, str] | None, document: Document, options: argparse.Namespace
) -> int:
    """Compare what was run with the archive and print the verdict."""
    if archived is None:
        print("nothing was compared (--check FILE compares)")
        return 0
    expected, written = archived
    if not options.tables:
        scenarios = expected.get("scenarios")
        if isinstance(scenarios, dict):
            scenarios = {key: scenarios[key] for key in document["scenarios"] if key in scenarios}
        expected = {"scenarios": scenarios}
    expected = without(expected, options.left_out)
    if difference := first_difference(expected, document):
        old, new = (f"{text(side)}\n".splitlines(keepends=True) for side in (expected, document))
        sys.stdout.writelines(difflib.unified_diff(old, new, str(options.check), "this run"))
        print(colored(f"DIFFERENT from {options.check}, first at {difference}", RED))
        return 1
    part = "all of it" if options.tables else ", ".join(document["scenarios"])
    if options.left_out:
        part += f", but for {'; '.join(reasons(options.left_out))}"
    print(colored(f"REPRODUCED: {options.check} ({part})", GREEN))
    if options.tables and not options.left_out and written != text(document) + "\n":
        print("the same values, though not the same bytes")
    return 0


def first_difference(expected: object, found: object, path: str = "") -> str | None:
    """Name the first leaf in which two parsed documents differ, types included, or None."""
    old, new = parts(expected), parts(found)
    if type(expected) is not type(found) or (not old and not new and expected != found):
        return f"{path.lstrip('.') or 'the top'}: {brief(expected)} became {brief(found)}"
    for step in {**old, **new}:
        if step not in old or step not in new:
            what = "is not in the archive" if step in new else "is missing now"
            return f"{(path + step).lstrip('.')}: {what}"
        if difference := first_difference(old[step], new[step], path + step):
            return difference
    return None


def parts(node: object) -> Document:
    """Give what an object or a list holds, by the step that leads to it."""
    if isinstance(node, dict):
        return {f".{key}": child for key, child in node.items()}
    return {
        f"[{place}]": child for place, child in enumerate(node if isinstance(node, list) else ())
    }


def brief(leaf: object) -> str:
    """Write a value in at most a few words."""
    written = json.dumps(leaf)
    return written if len(written) <= 60 else f"{written[:57]}..."


# ---- The workers: small programs of steps over the library's calls, the same wherever they run


class Memory(NamedTuple):
    """What a worker keeps in mind from one step to the next."""

    owner: str
    value: str
    ttl: int = 10
    now: int = 0  # the clock as last read
    lease: Any = None


def claim(memory: Memory, leases: Any, sink: Any) -> Memory:
    """Claim the resource; without a lease the worker ends."""
    return memory._replace(
        lease=leases.claim(RESOURCE, memory.owner, now=memory.now, ttl=memory.ttl)
    )


def taking_over(memory: Memory, leases: Any, sink: Any) -> Memory:
    """Claim the resource and seal the sink."""
    return memory._replace(
        lease=take_over(leases, sink, RESOURCE, memory.owner, now=memory.now, ttl=memory.ttl)
    )


def renew(memory: Memory, leases: Any, sink: Any) -> Memory:
    """Renew the lease; careless, the worker goes on with the old one if that is refused."""
    lease = leases.renew(memory.lease, now=memory.now, ttl=memory.ttl)
    return memory._replace(lease=lease or memory.lease)


def check(memory: Memory, leases: Any, sink: Any) -> Memory:
    """Ask the lease table whether the lease is still valid, and end if it is not."""
    row = leases.get(RESOURCE)
    valid = row.epoch == memory.lease.epoch and memory.now < row.deadline
    return memory if valid else memory._replace(lease=None)


def write(memory: Memory, leases: Any, sink: Any) -> Memory:
    """Send the value to the sink; careless, the worker goes on if that is refused."""
    sink.write(RESOURCE, memory.lease.epoch, memory.value)
    return memory


def guarded(memory: Memory, leases: Any, sink: Any) -> Memory:
    """Write the value beside the lease table, in a transaction that checks the lease."""
    leases.guard(memory.lease, store_document(memory.value), now=memory.now)
    return memory


def fenced_block(memory: Memory, leases: Any, sink: Any) -> Memory:
    """Write the value beside the sink's fence, in one transaction with it."""
    sink.transaction(RESOURCE, memory.lease.epoch, store_document(memory.value))
    return memory


def crash(memory: Memory, leases: Any, sink: Any) -> Memory:
    """Do the same, and fail before the commit."""
    statements = store_document(memory.value)
    sink.transaction(RESOURCE, memory.lease.epoch, statements, fails=True)
    return memory


def find(memory: Memory, leases: Any, sink: Any) -> Memory:
    """Read the fence, and the document as the fence's own epoch sees it."""
    sink.transaction(RESOURCE, sink.get(RESOURCE).fence, ("SELECT value FROM document",))
    return memory


def invent(memory: Memory, leases: Any, sink: Any) -> Memory:
    """Write with an epoch that nobody was granted."""
    sink.write(RESOURCE, 1_000_000, memory.value)
    return memory


def complete(memory: Memory, leases: Any, sink: Any) -> Memory:
    """Record the value as the work's result."""
    leases.complete(memory.lease, memory.value, now=memory.now)
    return memory


def release(memory: Memory, leases: Any, sink: Any) -> Memory:
    """Give the lease back."""
    leases.release(memory.lease, now=memory.now)
    return memory


def store_document(value: str) -> tuple[str, ...]:
    """Give the statements that write a value into a table of the worker's own."""
    return (
        "CREATE TABLE IF NOT EXISTS document (resource TEXT PRIMARY KEY, value TEXT)",
        f"INSERT INTO document VALUES ('{RESOURCE}', '{value}') "
        "ON CONFLICT (resource) DO UPDATE SET value = excluded.value",
    )


Step = Callable[[Memory, Any, Any], Memory]
CLOCK = "clock"  # reading the clock is a step of its own: `now` is what the worker last read
Program = tuple["Step | str", ...]
STRATEGIES: dict[str, Program] = {
    "unfenced": (CLOCK, claim, write, CLOCK, complete),
    "check_then_write": (CLOCK, claim, CLOCK, check, write, CLOCK, complete),
    "fenced": (CLOCK, claim, write, CLOCK, complete),
    "sealed": (CLOCK, taking_over, write, CLOCK, complete),
    "guarded": (CLOCK, claim, CLOCK, guarded, CLOCK, complete),
}
UNFENCED = ("unfenced", "check_then_write")
POSITIONAL = {
    "claim": ("resource", "owner"),
    "renew": ("lease",),
    "complete": ("lease", "result"),
    "release": ("lease",),
    "guard": ("lease", "sql"),
    "advance": ("resource", "epoch"),
    "get": ("resource",),
    "write": ("resource", "epoch", "value"),
    "seal": ("resource", "epoch"),
    "transaction": ("resource", "epoch", "sql"),
    "rows": (),
}


class Calls:
    """Stands for a lease table or a sink: hands each call on by its name and its arguments."""

    def __init__(self, make: Callable[[str, Document], Any]) -> None:
        self._make = make

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*positional: Any, **named: Any) -> Any:
            """Make this call."""
            given = zip(POSITIONAL[name], positional, strict=False)
            return self._make(name, {**dict(given), **named})

        return call


class Crash(Exception):
    """A worker's own failure inside a block."""


def perform(
    store: Any, name: str, arguments: Document, admitted: Callable[[Any], object] = lambda _: None
) -> Any:
    """Make a call. A block runs its statements, tells what it has read, and says how it ended."""
    if "sql" not in arguments:
        return getattr(store, name)(**arguments)
    known = {key: value for key, value in arguments.items() if key not in ("sql", "fails")}
    try:
        with getattr(store, name)(**known) as connection:
            cursors = [connection.execute(statement) for statement in arguments["sql"]]
            read = [row for cursor in cursors if cursor.description for row in cursor.fetchall()]
            admitted(read)
            if arguments.get("fails"):
                raise Crash
    except Crash:
        return "rolled back"
    except (Fenced, LeaseLost) as refused:
        return "fenced" if isinstance(refused, Fenced) else "lost"
    except (TypeError, ValueError, AttributeError, RuntimeError):
        raise
    except Exception:
        return "error"  # whatever a store's database raises
    return "committed"


class UnfencedSink:
    """A sink that takes whatever arrives last. It is here to be shown to fail."""

    def __init__(self, database: str | Path) -> None:
        self.connection = sqlite3.connect(database, isolation_level=None)
        self.connection.execute(
            "CREATE TABLE IF NOT EXISTS sink (resource TEXT PRIMARY KEY, epoch INTEGER, value TEXT)"
        )

    def write(self, resource: str, epoch: int, value: str) -> str:
        """Store the value."""
        self.connection.execute("REPLACE INTO sink VALUES (?, ?, ?)", (resource, epoch, value))
        return "written"

    def get(self, resource: str) -> SinkRow | None:
        """Read what was stored; there is no fence."""
        read = "SELECT resource, 0, epoch, 0, value FROM sink WHERE resource = ?"
        row = self.connection.execute(read, (resource,)).fetchone()
        return row and SinkRow._make(row)

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()


# ---- The scenarios: who goes on when, and how far; nothing here says what is answered


def overtaken(stage: Stage, strategy: str, call: str = "write") -> None:
    """Pause A before its write, or another call, let B do all of the work, let A go on."""
    a, b = stage.worker("A", "old", strategy), stage.worker("B", "new", strategy)
    a.run(0, until=call)
    b.run(10)
    a.run(11)


def unfenced(stage: Stage) -> None:
    """Nobody checks: the document goes back while the lease table says that all is well."""
    overtaken(stage, "unfenced")


def fenced(stage: Stage) -> None:
    """The same schedule with a sink that checks."""
    overtaken(stage, "fenced")


def check_then_write(stage: Stage) -> None:
    """A asks the lease table just before its write, and is paused just after the answer."""
    overtaken(stage, "check_then_write")


def window(stage: Stage, takes: Step = claim) -> None:
    """The fence learns of B's epoch only by B's first write: until then A's is accepted."""
    a = stage.worker("A", "old", "fenced", (CLOCK, takes, write, write, CLOCK, complete))
    b = stage.worker("B", "new", "fenced", (CLOCK, takes, write, CLOCK, complete))
    a.run(0, until="write")
    b.run(10, until="write")
    a.run(11, until="write")
    b.run(11)
    a.run(11)


def sealed(stage: Stage) -> None:
    """The same schedule with take_over: the fence knows of B before B has written anything."""
    window(stage, taking_over)


def rolled_back(stage: Stage) -> None:
    """The fence and the document are one transaction: after an exception neither has stayed."""
    stage.worker("A", "old", "fenced", (CLOCK, claim, fenced_block)).run(0)
    stage.worker("B", "new", "fenced", (CLOCK, claim, crash)).run(10)
    retried(stage)


def killed(stage: Stage) -> None:
    """The same when the process is killed just before the commit."""
    stage.worker("A", "old", "fenced", (CLOCK, claim, fenced_block)).run(0)
    stage.worker("B", "new", "fenced", (CLOCK, claim, fenced_block)).run(10, until="commit")
    stage.kill("B", 10)
    retried(stage)


def retried(stage: Stage) -> None:
    """Let another process look at what B left, and send B's write again."""
    b = Lease(RESOURCE, "B", 2, 20)
    stage.worker("C", "new", "fenced", (find, fenced_block), lease=b).run(11)


def renewal(stage: Stage) -> None:
    """A renewal moves the deadline, not the epoch; at the deadline the lease is over."""
    renewing = (CLOCK, claim, CLOCK, renew, CLOCK, renew, complete)
    a = stage.worker("A", "old", "fenced", (*renewing, CLOCK, renew, write, complete))
    a.run(0, until=CLOCK)
    a.run(5, until=CLOCK)
    stage.worker("B", "new", "fenced", (CLOCK, claim)).run(10)
    a.run(15, until=CLOCK)
    stage.worker("B", "new", "fenced", (CLOCK, claim)).run(15)
    stage.worker("C", "newer", "fenced", owner="A").run(25)
    a.run(26)


def two_files(stage: Stage) -> None:
    """The fenced schedule again, the sink in a file of its own: it needs no lease table."""
    overtaken(stage, "fenced")


def paused_inside(stage: Stage, *, kill: bool) -> None:
    """Pause A inside a transaction: B finds the sink busy, changes nothing, and tries again."""
    a = stage.worker("A", "old", "fenced", (CLOCK, claim, fenced_block))
    b = stage.worker("B", "new", "fenced", (CLOCK, claim, fenced_block, fenced_block), timeout=0.1)
    a.run(0, until="commit")
    b.run(10, until="transaction")
    b.run(10, until="transaction")
    if kill:
        stage.kill("A", 11)
    else:
        a.run(11)
    b.run(11)


def restored(stage: Stage, *, mend: bool) -> None:
    """Put a backup of the sink back under a stopped worker, with reconcile and without."""
    a, b = stage.worker("A", "old", "fenced"), stage.worker("B", "new", "fenced")
    a.run(0, until="write")
    with closing(sqlite3.connect(":memory:")) as backup:
        stage.copy("backup", 5, backup)
        b.run(10)
        stage.copy("put_back", 11, backup)
    if mend:
        with LeaseTable(stage.leases) as leases, FencedSink(stage.fenced) as sink:
            found = [finding._asdict() for finding in reconcile(leases, sink)]
        stage.events.append(Event(11, "operator", "reconcile", {}, found))
    a.run(12)


def invented(stage: Stage) -> None:
    """An epoch is no password: a million shuts the holder out, and take_over gets above it."""
    a, b = stage.worker("A", "old", "fenced"), stage.worker("B", "new", "sealed")
    a.run(0, until="write")
    stage.worker("C", "invented", "fenced", (invent,), lease=Lease(RESOURCE, "C", 1, 10)).run(5)
    a.run(6, until=CLOCK)
    b.run(10)
    a.run(11)


INSIDE = ("inside a transaction that goes on", "inside a transaction that is killed")
PAUSES = {
    "unfenced": ("claim", "write", "complete"),
    "check_then_write": ("claim", "get", "write", "complete"),
    "fenced": ("claim", "write", "complete"),
    "sealed": ("get", "claim", "seal", "write", "complete"),
    "guarded": ("claim", "guard", "complete"),
}
SCENARIOS: dict[str, Scenario | dict[str, Scenario]] = {
    "unfenced": unfenced,
    "fenced": fenced,
    "check_then_write": check_then_write,
    "window": window,
    "rollback": {"exception": rolled_back, "killed": killed},
    "renewal": renewal,
    "two_files": two_files,
    "sealed": sealed,
    "every_pause": {
        **{
            f"{strategy} before {call}": partial(overtaken, strategy=strategy, call=call)
            for strategy, calls in PAUSES.items()
            for call in calls
        },
        **{arm: partial(paused_inside, kill="killed" in arm) for arm in INSIDE},
    },
    "restored": {
        "as it is": partial(restored, mend=False),
        "reconciled": partial(restored, mend=True),
    },
    "invented": invented,
}
APART = ("two_files", "every_pause", "restored")  # the sink is in a file of its own


def run(options: argparse.Namespace) -> Document:
    """Run the scenarios one after the other, then the search, showing each as soon as it ends."""
    document: Document = {}
    with ExitStack() as ending:
        folder = ending.enter_context(tempfile.TemporaryDirectory(prefix="leases-"))
        actors = Troupe(options.pause, ending)
        if options.scenario:
            document["scenarios"] = {}
        for number, name in enumerate(options.scenario, 1):
            progress(f"{number} of {len(options.scenario)}: {name}", options)
            arms: Document = {}
            for arm, scenario in arms_of(name, SCENARIOS[name]).items():
                if not {f"scenarios.{name}", f"scenarios.{name}.{arm}"} & {*options.left_out}:
                    own = Path(folder, f"{number} {len(arms)}")
                    with fresh(load_store(options.store)) as (leases, sink):
                        sink = sink if name in APART or options.store else leases
                        stage = Stage(own, actors, options.store, leases, sink)
                        arms[arm] = stage.play(scenario)
            progress("", options)
            if arms:
                document["scenarios"][name] = arms.get(name, arms)
            if arms and not options.quiet:
                show(name, document["scenarios"][name])
        if options.tables:
            document |= search(actors, options)
    for line in reasons(options.left_out):
        print(f"left out: {line}")
    return document


# ---- The stage: processes, the gate that pauses them, and what they report


class Event(NamedTuple):
    """One call of a worker: what it asked and what it was told."""

    tick: int
    actor: str
    call: str
    arguments: Any
    answer: Any


class Job(NamedTuple):
    """A worker's program, what it has in mind, and where its lease table and its sink are."""

    actor: str
    program: Program
    memory: Memory
    leases: str
    sink: str
    store: str
    fenced: bool
    timeout: float


class Stage:
    """One scenario's lease table and sink, and the record of what happens on them."""

    def __init__(
        self, folder: Path, actors: dict[str, Actor], store: str, leases: str, sink: str
    ) -> None:
        folder.mkdir()
        self.unfenced = folder / "unfenced.db"
        self.actors, self.name, self.store = actors, store, load_store(store)
        self.leases, self.fenced = leases, sink
        self.events: list[Event] = []

    def worker(
        self,
        actor: str,
        value: str,
        strategy: str,
        program: Program = (),
        timeout: float = 5.0,
        **known: Any,
    ) -> Actor:
        """Give an actor its work, and what it knows beforehand; it begins with its first `run`."""
        memory = Memory(value=value, **{"owner": actor, **known})
        fenced = strategy not in UNFENCED
        sink = self.fenced if fenced else str(self.unfenced)
        program = program or STRATEGIES[strategy]
        job = Job(actor, program, memory, self.leases, sink, self.name, fenced, timeout)
        self.actors[actor].begin(job, self.events)
        return self.actors[actor]

    def kill(self, actor: str, tick: int) -> None:
        """Kill an actor's process where it stands; its next job begins in a new one."""
        process = self.actors.pop(actor).process
        process.kill()
        process.join(LIMIT)
        self.events.append(Event(tick, actor, "kill", {}, "killed"))

    def copy(self, what: str, tick: int, backup: sqlite3.Connection) -> None:
        """Back the sink's file up, or put the backup back, by SQLite's own backup call."""
        with closing(sqlite3.connect(self.fenced)) as sink:
            source, target = (sink, backup) if what == "backup" else (backup, sink)
            source.backup(target)
        self.events.append(Event(tick, "operator", what, {"of": "sink"}, None))

    def play(self, scenario: Scenario) -> Document:
        """Run a scenario; answer with its events and what the tables hold at its end."""
        scenario(self)
        result = {
            "events": [event._asdict() for event in self.events],
            "lease": self.rows(self.leases, "lease"),
            "sink": self.rows(self.unfenced if self.unfenced.exists() else self.fenced, "sink"),
        }
        writers = {event.call for event in self.events if "sql" in event.arguments}
        if writers:
            where = self.leases if writers == {"guard"} else self.fenced
            result["document"] = self.rows(where, "document")
        return result

    def rows(self, location: str | Path, table: str) -> list[Document]:
        """Read a table at the end: SQLite's by a plain connection, a store's by fresh objects."""
        if not self.name or location == self.unfenced:
            return plain_rows(location, table)
        opens = self.store.LeaseTable if location == self.leases else self.store.FencedSink
        with opens(location) as opened:
            if table != "document":
                return [row._asdict() for row in opened.rows()]
            found: list[Any] = []
            asked: Document = {"sql": ("SELECT resource, value FROM document ORDER BY resource",)}
            if location == self.leases:
                reader = opened.claim("reader", "reader", now=0, ttl=1)
                perform(opened, "guard", {**asked, "lease": reader, "now": 0}, found.extend)
            else:
                perform(
                    opened, "transaction", {**asked, "resource": "reader", "epoch": 1}, found.extend
                )
            return [{"resource": resource, "value": value} for resource, value in found]


class Actor:
    """A spawned process that does one job after the other, and goes on only when told to."""

    def __init__(self, name: str, how: str) -> None:
        self.name, self.how, self.idle, self.stopped = name, how, True, False
        context = multiprocessing.get_context("spawn")
        self.pipe, end = context.Pipe()
        self.process = context.Process(target=child, args=(end,), daemon=True)
        # The child inherits the blocked signal: Ctrl-C ends the parent, and the parent the child.
        # The tracker that multiprocessing starts beside the first child would unblock it.
        resource_tracker.ensure_running()
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}) if POSIX else set()
        try:
            self.process.start()
        finally:
            if POSIX:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        end.close()

    def begin(self, job: Job, events: list[Event]) -> None:
        """Take a job, and the record to report to."""
        if not self.idle:
            raise ExperimentError(f"{self.name} was given a job before its last had ended")
        self.events, self.idle = events, False
        self.send(job)

    def run(self, tick: int, until: str | None = None) -> None:
        """Go on at this tick; return when paused before the next call `until`, or at the end."""
        self.send((tick, until))
        if self.stopped:
            self.stopped = False
            os.kill(self.process.pid or 0, signal.SIGCONT)
        expected = f"pause before {until}" if until else "end its work"
        while (message := self.hear(expected)) != expected:
            if not isinstance(message, Event):
                raise ExperimentError(f"{self.name} did not {expected}, but {message}")
            self.events.append(message)
        self.idle = until is None
        if until and self.how == "sigstop":
            self.stop()

    def send(self, message: object) -> None:
        """Put a message into the process's pipe."""
        with self.living("take its orders"):
            self.pipe.send(message)

    def hear(self, expected: str) -> Any:
        """Wait for the process's next message."""
        if not self.pipe.poll(LIMIT):
            raise ExperimentError(f"waited {LIMIT:g} s for {self.name} to {expected}")
        with self.living(expected):
            return self.pipe.recv()

    @contextmanager
    def living(self, expected: str) -> Iterator[None]:
        """Turn a broken pipe into the news that the process has died."""
        try:
            yield
        except (EOFError, OSError):
            self.process.join(LIMIT)
            ended = f"{self.name} died with exit code {self.process.exitcode}"
            raise ExperimentError(f"{ended} before it could {expected}") from None

    def stop(self) -> None:
        """Stop the process by a signal, and see it stopped."""
        pid, until = self.process.pid or 0, time.monotonic() + LIMIT
        os.kill(pid, signal.SIGSTOP)
        self.stopped = True
        while not os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED | os.WNOHANG)[1]):
            if time.monotonic() > until:
                raise ExperimentError(f"waited {LIMIT:g} s for {self.name} to stop")
            time.sleep(0.001)

    def end(self, error: type[BaseException] | None, *_: object) -> None:
        """End the process, and look at how it ended."""
        kill = error is not None or not self.idle
        if kill:
            self.process.kill()
        self.pipe.close()
        self.process.join(LIMIT)
        code = self.process.exitcode
        if code is None or (code and not kill):
            raise ExperimentError(f"{self.name} ended with exit code {code} after its work")


class Troupe(dict[str, Actor]):
    """The actors by name, spawned when first asked for; the stack ends them."""

    def __init__(self, how: str, stack: ExitStack) -> None:
        super().__init__()
        self.how, self.stack = how, stack

    def __missing__(self, name: str) -> Actor:
        self[name] = Actor(name, self.how)
        self.stack.push(self[name].end)
        return self[name]


def child(pipe: Connection) -> None:
    """Do one job after the other until the parent closes the pipe, or dies."""
    if POSIX:
        os.setpgrp()  # the kernel ends a stopped process of such a group when its parent has died
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent is gone
        while True:
            job = pipe.recv()
            try:
                pipe.send(work(job, pipe) if isinstance(job, Job) else explore(job, pipe.send))
            except (EOFError, BrokenPipeError, ConnectionResetError):
                raise
            except Exception as error:
                pipe.send(f"failed: {type(error).__name__}: {error}")


def work(job: Job, pipe: Connection) -> str:
    """Do a worker's steps, each call through the gate."""
    gate, store, patience = Gate(pipe, job.actor), load_store(job.store), {"timeout": job.timeout}
    opened = store.FencedSink(job.sink, **patience) if job.fenced else UnfencedSink(job.sink)
    with store.LeaseTable(job.leases, **patience) as table, closing(opened):
        leases, sink = (Calls(partial(gate.call, store)) for store in (table, opened))
        memory = job.memory
        for step in job.program:
            if callable(step):
                memory = step(memory, leases, sink)
                if memory.lease is None:
                    break
            else:
                gate.reach(step)
                memory = memory._replace(now=gate.tick)
    return "end its work"


class Gate:
    """Where a worker is paused, before the call that the parent has named, and what it reports."""

    def __init__(self, pipe: Connection, actor: str) -> None:
        self.pipe, self.actor = pipe, actor
        self.wait()

    def wait(self) -> None:
        """Wait to be told the tick, and before which call to pause next."""
        self.tick, self.until = self.pipe.recv()
        self.resumed = True

    def reach(self, call: str) -> None:
        """Pause if this is the call; one that the worker was paused before goes through."""
        if call == self.until and not self.resumed:
            self.pipe.send(f"pause before {call}")
            self.wait()
        self.resumed = False

    def call(self, store: Any, name: str, arguments: Document) -> Any:
        """Make a call and report it; a block is reported as it is admitted and as it ends."""
        self.reach(name)
        reported: tuple[str, Document] = (name, arguments)

        def admitted(read: object) -> None:
            """Report a block that has run its statements, and pause before its commit."""
            nonlocal reported
            self.report(*reported, read or "admitted")
            reported = ("rollback" if arguments.get("fails") else "commit", {})
            self.reach("commit")

        answer = perform(store, name, arguments, admitted)
        self.report(*reported, answer)
        return answer

    def report(self, name: str, arguments: Document, answer: object) -> None:
        """Tell the parent what was asked and answered."""
        self.pipe.send(Event(self.tick, self.actor, name, plain(arguments), plain(answer)))


def plain(value: Any) -> Any:
    """Make of a call's argument or answer what JSON can hold."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {key: plain(child) for key, child in value.items()}
    return [plain(child) for child in value] if isinstance(value, (list, tuple)) else value


def plain_rows(path: str | Path, table: str) -> list[Document]:
    """Read an SQLite table through a connection of its own; one that was never made is empty."""
    with closing(sqlite3.connect(path)) as connection:
        known = "SELECT count(*) FROM sqlite_master WHERE name = ?"
        if connection.execute(known, (table,)).fetchone() == (0,):
            return []
        connection.row_factory = sqlite3.Row
        return [dict(row) for row in connection.execute(f"SELECT * FROM {table} ORDER BY resource")]


# ---- The guarantees, each a predicate over what a call has just done


class Past(NamedTuple):
    """What the guarantees need to know of the calls before."""

    announced: tuple[int, ...] = ()  # the epochs whose takeover was announced to a worker
    accepted: int = 0  # the highest epoch of an accepted write
    named: bool = False  # reconcile has named the resource as "value"
    broken: tuple[str, ...] = ()


class Moment(NamedTuple):
    """What a call has just done; `epoch` is that of a write that was accepted, else 0."""

    past: Past
    tick: int
    result: str | None
    value: str | None
    epoch: int = 0
    deadline: int = 0
    announced: int = 0


def split(now: Moment) -> bool:
    """The lease table holds one worker's result, the sink another's value, and nobody was told."""
    both = now.result is not None and now.value is not None
    return both and now.result != now.value and not now.past.named


def overwrite(now: Moment) -> bool:
    """An accepted write has a lower epoch than one accepted before it."""
    return 0 < now.epoch < now.past.accepted


def beaten(now: Moment) -> bool:
    """An accepted write has a lower epoch than a takeover announced before it."""
    return 0 < now.epoch < max(now.past.announced, default=0)


def late(now: Moment) -> bool:
    """An accepted write came at or after its own lease's deadline."""
    return now.epoch > 0 and now.deadline <= now.tick


def twice(now: Moment) -> bool:
    """One epoch was announced to two workers."""
    return now.announced in now.past.announced


def stuck(world: World, leases: Half, sink: Half, strategy: str) -> list[Event]:
    """A fresh worker alone, past every deadline, can't claim, write and complete at its first try.

    Answers its calls, if it is stuck in a state of unfinished work with these rows.
    """
    halves, events = {"leases": leases, "sink": sink}, list[Event]()
    world.live(Memory("C", "c"), STRATEGIES[strategy], halves, 100, events)
    return [] if result_of(halves) == value_of(halves) == "c" else events


GUARANTEES = {
    "split": split,
    "overwrite": overwrite,
    "window": beaten,
    "late": late,
    "twice": twice,
}
IDS = (*GUARANTEES, "stuck")


@cache
def judged(now: Moment) -> Past:
    """Note what a moment has broken, and what the next ones need to know of it."""
    past = now.past
    broken = (name for name, rule in GUARANTEES.items() if name in past.broken or rule(now))
    announced = sorted({*past.announced, now.announced} - {0})
    return Past(tuple(announced), max(past.accepted, now.epoch), past.named, tuple(broken))


# ---- The search: every interleaving of the workers' calls and the clock's ticks


Half = tuple[Any, "str | None"]  # a store's row, and the document beside it
Halves = dict[str, Half]
LAST, SHORT = 3, 2  # the ticks are 0 to 3, a ttl is 2
CASES = ("lease", "sink", "both")


class Row(NamedTuple):
    """A row of the tables: a strategy, and what of it is put back, with reconcile or without."""

    strategy: str
    case: str = ""
    mended: bool = False
    workers: int = 2
    store: str = ""


class Call(NamedTuple):
    """A call that can be compared with others and made again."""

    store: str
    name: str
    arguments: tuple[tuple[str, Any], ...]


class World:
    """The real stores: each distinct call on each distinct row is made once, and remembered.

    A call is one transaction and depends on nothing but its arguments and its row. A row is never
    written: it is reached, on a resource of its own, by the calls that led to it.
    """

    def __init__(self, row: Row, leases: str, sink: str) -> None:
        store, strategy = load_store(row.store), row.strategy
        fenced = strategy not in UNFENCED
        opened = store.FencedSink(sink) if fenced else UnfencedSink(":memory:")
        self.stores: dict[str, Any] = {"leases": store.LeaseTable(leases), "sink": opened}
        self.reader = None
        if strategy == "guarded":  # the document is read as it is written: under a lease
            self.reader = self.stores["leases"].claim("reader", "reader", now=0, ttl=1)
            self.read_document(*store_document("")[:1])
        self.start = {store: self.read(store, "nothing") for store in self.stores}
        self.paths: dict[Any, list[Call]] = {(*start,): [] for start in self.start.items()}
        self.ready: dict[tuple[str, Half], str] = {}  # a resource that has this row just now
        self.known: dict[tuple[Half, Call], tuple[Any, Half]] = {}

    def close(self) -> None:
        """Close the stores."""
        for store in self.stores.values():
            store.close()

    def read_document(self, sql: str) -> list[Any]:
        """Run a statement beside the lease table; answer the rows that it reads."""
        found: list[Any] = []
        block = {"lease": self.reader, "sql": (sql,), "now": 0}
        perform(self.stores["leases"], "guard", block, found.extend)
        return found

    def read(self, store: str, resource: str) -> Half:
        """Read a resource's row, and the document that is beside it in the same database."""
        row = renamed(self.stores[store].get(resource), resource, RESOURCE)
        if store == "sink" or not self.reader:
            return row, None
        found = self.read_document(f"SELECT value FROM document WHERE resource = '{resource}'")
        return row, found[0][0] if found else None

    def make(self, half: Half, call: Call) -> tuple[Any, Half]:
        """Answer a call on a row, and give the row that it leaves."""
        if (half, call) not in self.known:
            resource = self.ready.pop((call.store, half), "")
            path = [] if resource else self.paths[call.store, half]
            resource = resource or f"{RESOURCE} {len(self.known)}"
            for one in (*path, call):
                arguments = renamed(dict(one.arguments), RESOURCE, resource)
                answer = perform(self.stores[call.store], one.name, arguments)
            left = self.read(call.store, resource)
            self.known[half, call] = renamed(answer, resource, RESOURCE), left
            self.ready[call.store, left] = resource
            self.paths.setdefault((call.store, left), [*self.paths[call.store, half], call])
        return self.known[half, call]

    def alone(self, actor: str, halves: Halves, tick: int, events: list[Event]) -> list[Calls]:
        """Give a lease table and a sink whose calls are made at once, on halves that change."""

        def make(store: str, name: str, arguments: Document) -> Any:
            """Make a call on the row as it is now."""
            if name == "rows":
                return filter(None, halves[store][:1])
            call = Call(store, name, tuple(arguments.items()))
            answer, halves[store] = self.make(halves[store], call)
            events.append(Event(tick, actor, name, arguments, answer))
            return answer

        return [Calls(partial(make, store)) for store in halves]

    def live(
        self, memory: Memory, program: Program, halves: Halves, tick: int, events: list[Event]
    ) -> None:
        """Run a worker alone to its end, at one tick."""
        leases, sink = self.alone(memory.owner, halves, tick, events)
        memory = memory._replace(now=tick)
        for step in program:
            if callable(step):
                memory = step(memory, leases, sink)
                if not memory.lease:
                    break


def renamed(value: Any, old: str, new: str) -> Any:
    """Put another resource into a call's arguments or its answer."""
    if isinstance(value, str):
        return value.replace(old, new)
    if isinstance(value, dict):
        return {key: renamed(child, old, new) for key, child in value.items()}
    if hasattr(value, "_replace"):
        return value._replace(resource=new)
    return tuple(renamed(child, old, new) for child in value) if type(value) is tuple else value


def result_of(halves: Halves) -> str | None:
    """Read the result that is on record."""
    row = halves["leases"][0]
    return row.result if row else None


def value_of(halves: Halves) -> str | None:
    """Read the document's value, wherever the strategy keeps it."""
    row, document = halves["sink"][0], halves["leases"][1]
    return row.value if row else document


class Worker(NamedTuple):
    """A worker between two of its calls; `age` only grows, and orders the states."""

    memory: Memory
    program: Program = ()  # what is left of it
    answers: tuple[Any, ...] = ()  # those of the step that it is in
    age: int = 0


class Unanswered(BaseException):
    """Stops a step at its first call without an answer; a handler for errors doesn't keep it."""


@cache
def attempt(worker: Worker) -> tuple[Call | None, Memory]:
    """Run a worker's step anew on its answers; give its first call without one, or its end."""
    answers, unanswered = list(worker.answers), list[Call]()

    def make(store: str, name: str, arguments: Document) -> Any:
        """Answer from what is recorded, or stop."""
        if answers:
            return answers.pop(0)
        unanswered.append(Call(store, name, tuple(arguments.items())))
        raise Unanswered

    step: Any = worker.program[0]
    try:
        memory = step(worker.memory, *(Calls(partial(make, store)) for store in ("leases", "sink")))
    except Unanswered:
        return unanswered[0], worker.memory  # what a handler asks for on the way does not count
    return None, memory


@cache
def answered(worker: Worker, answer: Any) -> tuple[Worker, int]:
    """Go on with an answer; give the worker, and the epoch that it has been announced, or 0.

    What is of no use any more is forgotten, so that equal states merge.
    """
    worker = worker._replace(answers=(*worker.answers, answer), age=worker.age + 1)
    call, memory = attempt(worker)
    if call:
        return worker, 0
    announced = memory.lease.epoch if memory.lease and not worker.memory.lease else 0
    left = worker.program[1:]
    if not left or not memory.lease:
        return Worker(Memory(memory.owner, memory.value), age=1000), announced
    return Worker(memory._replace(now=0), left, (), worker.age // 10 * 10 + 10), announced


class State(NamedTuple):
    """All that can matter for what comes."""

    tick: int
    leases: Half
    sink: Half
    workers: tuple[Worker, ...]
    past: Past
    saved: tuple[Half | None, ...] = (None, None)  # the backups of lease table and sink
    restored: bool = False

    def age(self) -> int:
        """Grows with every move, so that the graph of states has no cycles."""
        age = self.tick + (9 if self.restored else 2 - self.saved.count(None))
        for worker in self.workers:
            age += worker.age
        return age


class Node(NamedTuple):
    """The shortest way to a state."""

    length: int = 0
    before: Node | None = None
    event: Event | None = None


class Search:
    """The search of one row of the tables."""

    def __init__(self, row: Row, world: World) -> None:
        self.row, self.world = row, world
        self.stale = False  # a stale write was attempted
        self.states = 0
        self.counts = {name: [0, 0] for name in IDS}  # schedules (for stuck: states); the broken
        self.shortest: dict[str, tuple[Node, list[Event]]] = {}
        self.stuck = cache(partial(stuck, world, strategy=row.strategy))

    def beginnings(self) -> Iterator[State]:
        """Give the states to begin in: each worker renews or does not, or there is a past.

        Before a restore, a predecessor has claimed, written and released, and nobody renews.
        """
        program, halves, past = STRATEGIES[self.row.strategy], dict(self.world.start), Past()
        programs = [program, (*program[:2], CLOCK, renew, *program[2:])]
        if self.row.case:
            predecessor = Memory("P", "p", SHORT)
            self.world.live(predecessor, (*program[:3], release), halves, 0, [])
            past, programs = Past(announced=(1,), accepted=1), [program]
        for chosen in itertools.product(programs, repeat=self.row.workers):
            memories = (Memory(name, name.lower(), SHORT) for name in "ABC")
            workers = tuple(map(Worker, memories, chosen))
            yield State(0, halves["leases"], halves["sink"], workers, past)

    def moves(self, state: State) -> Iterator[tuple[Event | None, State]]:
        """Give everything that can happen next."""
        if state.tick < LAST:
            yield None, state._replace(tick=state.tick + 1)
        for place, worker in enumerate(state.workers):
            if not worker.program:
                continue
            if worker.program[0] == CLOCK:
                memory = worker.memory._replace(now=state.tick)
                read = Worker(memory, worker.program[1:], (), worker.age + 10)
                yield None, state._replace(workers=put(state.workers, place, read))
            else:
                yield self.called(state, place, worker)
        if self.row.case and not state.restored:
            yield from self.restores(state)

    def called(self, state: State, place: int, worker: Worker) -> tuple[Event, State]:
        """Let a worker make its next call, and judge the guarantees."""
        tick, leases, sink, workers, past, saved, restored = state
        call, _ = attempt(worker)
        if call is None:
            raise ExperimentError(f"a step of {worker.memory.owner} makes no call")
        if call.store == "leases":
            answer, leases = self.world.make(leases, call)
        else:
            answer, sink = self.world.make(sink, call)
        went_on, announced = answered(worker, answer)
        epoch, deadline = worker.memory.lease[2:] if worker.memory.lease else (0, 0)
        if call.name in ("write", "guard") and epoch < max(past.announced):
            self.stale = True
        if answer not in ("written", "committed"):
            epoch = 0
        halves = {"leases": leases, "sink": sink}
        said = (result_of(halves), value_of(halves))
        past = judged(Moment(past, tick, *said, epoch, deadline, announced))
        event = Event(tick, worker.memory.owner, call.name, call.arguments, answer)
        return event, State(tick, leases, sink, put(workers, place, went_on), past, saved, restored)

    def restores(self, state: State) -> Iterator[tuple[Event, State]]:
        """Take a backup of each store that is put back, once, and put them back, once."""
        tick, halves = state.tick, (state.leases, state.sink)
        wanted = [name for name in ("lease", "sink") if self.row.case in (name, "both")]
        missing = [
            place
            for place, name in enumerate(("lease", "sink"))
            if name in wanted and not state.saved[place]
        ]
        for place in missing:
            saved = put(state.saved, place, halves[place])
            asked = (("of", ("lease", "sink")[place]),)
            yield Event(tick, "operator", "backup", asked, None), state._replace(saved=saved)
        if not missing:
            back = [saved or half for saved, half in zip(state.saved, halves, strict=True)]
            after = dict(zip(("leases", "sink"), back, strict=True))
            call, found, past = "put_back", None, state.past
            if self.row.mended:
                call, events = "put_back, reconcile", list[Event]()
                stores: Any = self.world.alone("operator", after, tick, events)
                found = reconcile(*stores)
                past = past._replace(named="value" in [finding.what for finding in found])
            past = judged(Moment(past, tick, result_of(after), value_of(after)))
            asked = (("of", self.row.case),)
            leases, sink = after.values()
            event = Event(tick, "operator", call, asked, found)
            yield event, State(tick, leases, sink, state.workers, past, restored=True)

    def run(self, tell: Callable[[int], object]) -> Document:
        """Go through the states by age, and give the row's cells.

        When a state is reached, all that lead to it have been: the count of the schedules that do,
        and the shortest of them, are final.
        """
        ages: dict[int, dict[State, tuple[int, Node]]] = {}
        for state in self.beginnings():
            ages.setdefault(state.age(), {})[state] = 1, Node()
        while ages:
            for state, (count, node) in ages.pop(min(ages)).items():
                self.note(state, node)
                if self.states % 250 == 0:
                    tell(self.states)
                ended = True
                for event, after in self.moves(state):
                    ended = False
                    there = ages.setdefault(after.age(), {})
                    before, known = there.get(after, (0, None))
                    if known is None or node.length + 1 < known.length:
                        known = Node(node.length + 1, node, event)
                    there[after] = before + count, known
                if ended:
                    for name in GUARANTEES:
                        self.counts[name][0] += count
                        self.counts[name][1] += count * (name in state.past.broken)
        return {name: self.cell(name) for name in IDS}

    def note(self, state: State, node: Node) -> None:
        """Note what is broken in a state, and the shortest way to it."""
        self.states += 1
        broken: dict[str, list[Event]] = {name: [] for name in state.past.broken}
        if result_of({"leases": state.leases}) is None:
            self.counts["stuck"][0] += 1
            if alone := self.stuck(state.leases, state.sink):
                self.counts["stuck"][1] += 1
                broken["stuck"] = alone
        for name, alone in broken.items():
            if name not in self.shortest or node.length < self.shortest[name][0].length:
                self.shortest[name] = node, alone

    def cell(self, name: str) -> Document:
        """Give the verdict on a guarantee, its counts, and a shortest schedule that breaks it."""
        verdict = "holds" if self.stale else "unknown"
        events: list[Event] = []
        if name in self.shortest:
            verdict, (node, alone) = "broken", self.shortest[name]
            while node.before:
                events[:0] = [node.event] if node.event else []
                node = node.before
            events += alone
        told = [plain(event._replace(arguments=dict(event.arguments))) for event in events]
        schedules, broken = self.counts[name]
        return {"verdict": verdict, "schedules": schedules, "broken": broken, "shortest": told}


def put(items: tuple[Any, ...], place: int, item: object) -> tuple[Any, ...]:
    """Give the tuple with another item in one place."""
    return (*items[:place], item, *items[place + 1 :])


def explore(row: Row, tell: Callable[[int], object] = lambda _: None) -> tuple[Document, int, int]:
    """Search a row: its cells, how many states it has, and how many calls were really made."""
    memory = nullcontext((":memory:", ":memory:"))  # the answers are the same, the disk is spared
    places = fresh(load_store(row.store)) if row.store else memory
    with places as (leases, sink), closing(World(row, leases, sink)) as world:
        search = Search(row, world)
        return search.run(tell), search.states, len(world.known)


def search(actors: dict[str, Actor], options: argparse.Namespace) -> Document:
    """Search all rows, side by side in two processes, and show both tables."""
    cases = list(itertools.product(("fenced", "sealed"), CASES, (False, True)))
    more = (options.workers, options.store)
    strategies = [name for name in STRATEGIES if f"guarantees.{name}" not in options.left_out]
    waiting = [Row(strategy, "", False, *more) for strategy in strategies]
    waiting += [Row(*case, *more) for case in cases]
    waiting.sort(key=lambda row: row.case == "both")  # the largest come last, and are taken first
    found: dict[Row, tuple[Document, int, int]] = {}
    running: dict[Any, tuple[Actor, Row]] = {}
    idle, states = [actors["A"], actors["B"]], dict.fromkeys(waiting, 0)
    while waiting or running:
        while idle and waiting:
            actor, row = idle.pop(), waiting.pop()
            actor.send(row)
            running[actor.pipe] = actor, row
        done = f"{len(found)} of {len(states)} rows, {sum(states.values())} states"
        progress(f"searching: {done}", options)
        ready = wait_for(list(running), LIMIT)
        if not ready:
            raise ExperimentError(f"waited {LIMIT:g} s for the search, after {done}")
        for pipe in ready:
            actor, row = running[pipe]
            message = actor.hear(f"search {row}")
            if isinstance(message, str):
                raise ExperimentError(f"the search of {row} {message}")
            if isinstance(message, int):
                states[row] = message
            else:
                found[row], states[row] = message, message[1]
                idle.append(running.pop(pipe)[0])
    progress("", options)
    tables: Document = {"guarantees": {}, "restores": {"fenced": {}, "sealed": {}}}
    for strategy in strategies:
        tables["guarantees"][strategy] = found[Row(strategy, "", False, *more)][0]
    for strategy, case, mended in cases:
        cells = found[Row(strategy, case, mended, *more)][0]
        tables["restores"][strategy][f"{case}_reconciled" if mended else case] = cells
    if not options.quiet:
        show_tables(tables)
    schedules = sum(cells["split"]["schedules"] for cells, _, _ in found.values())
    calls = sum(made for _, _, made in found.values())
    print(f"\n{schedules} schedules, {sum(states.values())} states, {calls} calls really made")
    return tables


# ---- Showing it


BOLD, RED, GREEN = "1", "31", "32"


def colored(line: str, color: str) -> str:
    """Color a line for a terminal, unless NO_COLOR is set."""
    if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        return f"\x1b[{color}m{line}\x1b[0m"
    return line


def progress(line: str, options: argparse.Namespace) -> None:
    """Show on a terminal what is being done, and take it away again."""
    if sys.stdout.isatty() and not options.quiet:
        print(f"\r\x1b[K{line}", end="", flush=True)


def arms_of(name: str, scenario: Any) -> dict[str, Any]:
    """Give a scenario's arms by name; one without arms is its own only one."""
    return scenario if isinstance(scenario, dict) and "events" not in scenario else {name: scenario}


def show(name: str, scenario: Document) -> None:
    """Show a scenario: each arm as lanes with its verdict, or many arms with a verdict each."""
    arms = arms_of(name, scenario)
    if len(arms) > 2:
        print("\n" + colored(name, BOLD))
        print_table([["A paused", "outcome"], *([arm, verdict(arms[arm])] for arm in arms)])
        return
    for arm, result in arms.items():
        told = arms_of(name, SCENARIOS[name])[arm]
        print("\n" + colored(name if arm == name else f"{name}, {arm}", BOLD))
        print(getattr(told, "func", told).__doc__)
        print_table(lanes(result["events"]))
        print(colored(verdict(result), RED if lost(result) else GREEN))


LETTERS = {"holds": "H", "broken": "b", "unknown": "?"}


def letters(cells: Document) -> list[str]:
    """Give a row of verdicts as letters."""
    return [LETTERS[cells[name]["verdict"]] for name in IDS]


def guarantee_table(tables: Document) -> list[list[str]]:
    """Give the first table: which strategy gives which guarantee."""
    found = tables["guarantees"].items()
    return [["strategy", *IDS], *([name, *letters(cells)] for name, cells in found)]


def restore_table(tables: Document) -> list[list[str]]:
    """Give the second table: what is left of it after a restore, and after reconcile."""
    table = [["strategy, put back", *IDS, "with `reconcile`"]]
    for strategy, cases in tables["restores"].items():
        unharmed = letters(tables["guarantees"][strategy])
        for case in CASES:
            mended = letters(cases[f"{case}_reconciled"])
            told = "as if nothing had been put back" if mended == unharmed else " ".join(mended)
            table.append([f"{strategy}, {case}", *letters(cases[case]), told])
    return table


def show_tables(tables: Document) -> None:
    """Show a shortest schedule for each way in which a guarantee breaks, and both tables."""
    broken = {
        **tables["guarantees"],
        **{
            f"{strategy}, {case} put back".replace(
                "_reconciled put back", " put back, reconciled"
            ): cells
            for strategy, cases in tables["restores"].items()
            for case, cells in cases.items()
        },
    }
    for row, cells in broken.items():
        schedules: dict[str, list[str]] = {}
        for name in IDS:
            if cells[name]["verdict"] == "broken":
                told = f"{name} ({cells[name]['broken']} of {cells[name]['schedules']})"
                schedules.setdefault(json.dumps(cells[name]["shortest"]), []).append(told)
        for schedule, names in schedules.items():
            print("\n" + colored(f"{row}: breaks {', '.join(names)}", BOLD))
            print_table(lanes(json.loads(schedule)))
    for table in (guarantee_table(tables), restore_table(tables)):
        print()
        print_table(table)
    print("\n  H holds, b broken, ? unknown: no stale write was ever attempted")


def print_table(table: list[list[str]]) -> None:
    """Print rows as aligned columns."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        print("  " + "  ".join(map(str.ljust, row, widths)).rstrip())


def lanes(events: Iterable[Document]) -> list[list[str]]:
    """Draw one row a call: the tick, the actors, and what the tables hold after it."""
    events = list(events)
    actors = sorted({event["actor"] for event in events})
    table = [["tick", *actors, "lease table", "sink"]]
    lease = sink = pending = "-"
    for event in events:
        asked, answer = event["arguments"], event["answer"]
        match event["call"]:
            case "claim" | "renew" if answer:
                lease = f"{answer['owner']}, epoch {answer['epoch']}, until {answer['deadline']}"
            case "complete" if answer:
                lease = f"done: {asked['result']}"
            case "release" if answer:
                lease = f"released, epoch {asked['lease']['epoch']}"
            case "write" if answer == "written":
                sink = f"{asked['value']}, epoch {asked['epoch']}"
            case "seal" if answer == "sealed":
                sink = f"{sink.partition(' (')[0]} (sealed to {asked['epoch']})"
            case "put_back" | "put_back, reconcile":
                sink = "put back" if asked["of"] in ("sink", "both") else sink
                lease = "put back" if asked["of"] in ("lease", "both") else lease
            case "guard" if answer == "committed":
                sink = f"{event['actor'].lower()}, epoch {asked['lease']['epoch']}"
            case "transaction":
                pending = f"fence {asked['epoch']}"
            case "commit":
                sink = pending
        cells = [phrase(event) if event["actor"] == actor else "" for actor in actors]
        table.append([f"{event['tick']:4}", *cells, lease, sink])
    return table


def phrase(event: Document) -> str:
    """Say a call and its answer in a few words."""
    asked, answer = event["arguments"], event["answer"]
    words = [event["call"]]
    words += [str(asked[key]) for key in ("value", "result", "of") if key in asked]
    words += [f"epoch {one['epoch']}" for one in (asked, asked.get("lease", {})) if "epoch" in one]
    words += [f"above {asked['above']}"] if asked.get("above") else []
    words += [f"at {asked['now']}"] if asked.get("now", event["tick"]) != event["tick"] else []
    if isinstance(answer, dict):
        shown = ("fence", "epoch", "deadline")
        told: object = ", ".join(f"{key} {answer[key]}" for key in shown if key in answer)
    elif isinstance(answer, list):
        told = "; ".join(
            " ".join(map(str, parts(one).values() if isinstance(one, dict) else one))
            for one in answer
        )
    else:
        nothing = "nothing" if event["call"] == "get" else "refused"
        told = {None: nothing, True: "yes", False: "refused"}.get(answer, answer)
    return " ".join(words) + (f": {told}" if event["actor"] != "operator" or answer else "")


def verdict(result: Document) -> str:
    """Hold the lease table's word against the document, in one line."""
    says, holds = told_and_kept(result)
    line = f"lease table says {says or 'unfinished'}, document says {holds or 'nothing'}"
    return f"{line}: OVERWRITTEN IN SILENCE" if lost(result) else line


def told_and_kept(result: Document) -> tuple[str | None, str | None]:
    """Read the result on record and the document's value off the final tables."""
    results = [row["result"] for row in result["lease"]]
    values = [row["value"] for row in result.get("document") or result["sink"]]
    return next(iter(results), None), next(iter(values), None)


def lost(result: Document) -> bool:
    """Tell whether the document is another than the result on record."""
    says, holds = told_and_kept(result)
    return says is not None and holds is not None and says != holds


if __name__ == "__main__":
    sys.exit(main())
