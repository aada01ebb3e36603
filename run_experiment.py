"""Let real processes pause, take over and wake, and reproduce what they left in the tables.

    python3 run_experiment.py                        run and show every scenario
    python3 run_experiment.py unfenced fenced        run and show these two
    python3 run_experiment.py --check results.json   run everything and compare it with the archive

Worker A claims a resource and is paused, B takes over, A goes on. Each worker is a process of its
own with connections of its own, and is paused by a gate before one of its calls, or by a signal
(`--pause sigstop`). No clock and no sleep decides about an order: a process goes on when the one
before it has said that it is paused or has ended.

Exit status: 0 reproduced (or nothing was to be compared), 1 different, 2 could not run.
"""

from __future__ import annotations

import argparse
import difflib
import io
import json
import multiprocessing
import os
import platform
import signal
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from leases import Fenced, FencedSink, Lease, LeaseTable

LIMIT = 15.0  # seconds that anything is waited for
RESOURCE, TTL = "report", 10
POSIX = os.name == "posix"
Document = dict[str, Any]  # results.json, or a part of it, as parsed
Scenario = Callable[["Stage"], None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the scenarios, show them, archive them, compare them; answer with the exit status."""
    options = parse(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace", line_buffering=True)  # names may be odd
    try:
        archived, began = load(options.check), time.perf_counter()
        document = run(options)
        if options.output:
            save(document, options.output)
        print(
            f"\n{len(document['scenarios'])} scenarios in {time.perf_counter() - began:.1f} s, "
            f"Python {platform.python_version()}, SQLite {sqlite3.sqlite_version}, {sys.platform}"
        )
        return judge(archived, document, options)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
    except (ExperimentError, OSError, sqlite3.Error) as error:
        print(f"run_experiment.py: {error}", file=sys.stderr)
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
    if not os.path.isfile(globals().get("__file__", "")):
        parser.error("run it from its file: the processes that it spawns import that file again")
    options.scenario = [name for name in SCENARIOS if name in (options.scenario or SCENARIOS)]
    return options


def same_file(one: Path, other: Path) -> bool:
    """Tell whether two names are one file, also by a link."""
    return one.resolve() == other.resolve() or (
        one.exists() and other.exists() and one.samefile(other)
    )


# ---- Archiving and comparing


def text(document: object) -> str:
    """Write a document as results.json has it."""
    return json.dumps(document, indent=1) + "\n"


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


def save(document: Document, path: Path) -> None:
    """Archive a document in one step, so that no reader ever finds half of it."""
    target = path.resolve()
    if target.exists() and not target.is_file():
        raise ExperimentError(f"can't write {path}: it is no regular file")
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        with part.open("x", encoding="ascii", newline="\n") as file:
            file.write(text(document))
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
    everything = list(document["scenarios"]) == list(SCENARIOS)
    if not everything:
        scenarios = expected.get("scenarios")
        if isinstance(scenarios, dict):
            scenarios = {key: scenarios[key] for key in document["scenarios"] if key in scenarios}
        expected = {"scenarios": scenarios}
    difference = first_difference(expected, document)
    if difference:
        old, new = (text(side).splitlines(keepends=True) for side in (expected, document))
        sys.stdout.writelines(difflib.unified_diff(old, new, str(options.check), "this run"))
        print(colored(f"DIFFERENT from {options.check}, first at {difference}", RED))
        return 1
    part = "all of it" if everything else ", ".join(document["scenarios"])
    print(colored(f"REPRODUCED: {options.check} ({part})", GREEN))
    if everything and written != text(document):
        print("the same values, though not the same bytes")
    return 0


def first_difference(expected: object, found: object, path: str = "") -> str | None:
    """Name the first leaf in which two parsed documents differ, types included, or None."""
    if type(expected) is not type(found):
        return f"{path or 'the top'}: {brief(expected)} became {brief(found)}"
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in [*expected, *(key for key in found if key not in expected)]:
            step = f"{path}.{key}" if path else str(key)
            if key not in found or key not in expected:
                return f"{step}: {'missing now' if key in expected else 'not in the archive'}"
            if difference := first_difference(expected[key], found[key], step):
                return difference
    elif isinstance(expected, list) and isinstance(found, list):
        for index, (one, other) in enumerate(zip(expected, found, strict=False)):
            if difference := first_difference(one, other, f"{path}[{index}]"):
                return difference
        if len(expected) != len(found):
            return f"{path}: {len(expected)} items became {len(found)}"
    elif expected != found:
        return f"{path or 'the top'}: {brief(expected)} became {brief(found)}"
    return None


def brief(leaf: object) -> str:
    """Write a value in at most a few words."""
    written = json.dumps(leaf)
    return written if len(written) <= 60 else f"{written[:57]}..."


# ---- The workers: small programs of steps over the library's calls, the same for every strategy


class Memory(NamedTuple):
    """What a worker keeps in mind from one step to the next."""

    value: str
    owner: str
    now: int = 0  # the clock as last read
    lease: Lease | None = None


class Crash(Exception):
    """A worker's own failure inside a block."""


def claim(memory: Memory, leases: Any, sink: Any) -> Memory:
    """Claim the resource; without a lease the worker ends."""
    lease = leases.claim(RESOURCE, memory.owner, now=memory.now, ttl=TTL)
    return memory._replace(lease=lease)


def renew(memory: Memory, leases: Any, sink: Any) -> Memory:
    """Renew the lease; careless, the worker goes on with the old one if that is refused."""
    lease = leases.renew(memory.lease, now=memory.now, ttl=TTL)
    return memory._replace(lease=lease or memory.lease)


def check(memory: Memory, leases: Any, sink: Any) -> Memory:
    """Ask the lease table whether the lease is still valid, and end if it is not."""
    row, lease = leases.get(RESOURCE), memory.lease
    valid = lease and row.epoch == lease.epoch and memory.now < row.deadline
    return memory if valid else memory._replace(lease=None)


def write(memory: Memory, leases: Any, sink: Any) -> Memory:
    """Send the value to the sink; careless, the worker goes on if that is refused."""
    sink.write(RESOURCE, memory.lease.epoch if memory.lease else 0, memory.value)
    return memory


def complete(memory: Memory, leases: Any, sink: Any) -> Memory:
    """Record the value as the work's result."""
    leases.complete(memory.lease, memory.value, now=memory.now)
    return memory


def document(memory: Memory, leases: Any, sink: Any, *, fails: bool = False) -> Memory:
    """Write the value into a table of the worker's own, in one transaction with the fence."""
    with sink.transaction(RESOURCE, memory.lease.epoch if memory.lease else 0) as block:
        block.execute("CREATE TABLE IF NOT EXISTS document (resource TEXT PRIMARY KEY, value TEXT)")
        block.execute(
            f"INSERT INTO document VALUES ('{RESOURCE}', '{memory.value}') "
            "ON CONFLICT (resource) DO UPDATE SET value = excluded.value"
        )
        if fails:
            raise Crash
    return memory


def crash(memory: Memory, leases: Any, sink: Any) -> Memory:
    """Do the same, and fail before the commit."""
    with suppress(Crash):
        document(memory, leases, sink, fails=True)
    return memory


def find(memory: Memory, leases: Any, sink: Any) -> Memory:
    """Read the fence, and the table of the worker's own as the newest epoch sees it."""
    row = sink.get(RESOURCE)
    with sink.transaction(RESOURCE, row.fence) as block:
        block.execute("SELECT value FROM document")
    return memory


STEPS = {
    step.__name__: step for step in (claim, renew, check, write, complete, document, crash, find)
}
PLAIN = ("clock", "claim", "write", "clock", "complete")
CHECKING = ("clock", "claim", "clock", "check", "write", "clock", "complete")


class UnfencedSink:
    """A sink that takes whatever arrives last. It is here to be shown to fail."""

    def __init__(self, database: str) -> None:
        self.connection = sqlite3.connect(database, isolation_level=None)
        self.connection.execute(
            "CREATE TABLE IF NOT EXISTS sink (resource TEXT PRIMARY KEY, epoch INTEGER, value TEXT)"
        )

    def write(self, resource: str, epoch: int, value: str) -> str:
        """Store the value."""
        self.connection.execute("REPLACE INTO sink VALUES (?, ?, ?)", (resource, epoch, value))
        return "written"

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()


# ---- The scenarios: who goes on when, and how far; nothing here says what is answered


def overtaken(stage: Stage, program: tuple[str, ...] = PLAIN, *, fenced: bool = True) -> None:
    """Pause A before its write, let B do all of the work, let A go on."""
    a = stage.worker("A", "old", program, fenced=fenced)
    b = stage.worker("B", "new", program, fenced=fenced)
    a.run(0, until="write")
    b.run(10)
    a.run(11)


def unfenced(stage: Stage) -> None:
    """Nobody checks: the document goes back while the lease table says that all is well."""
    overtaken(stage, fenced=False)


def fenced(stage: Stage) -> None:
    """The same schedule with a sink that checks."""
    overtaken(stage)


def check_then_write(stage: Stage) -> None:
    """A asks the lease table just before its write, and is paused just after the answer."""
    overtaken(stage, CHECKING, fenced=False)


def window(stage: Stage) -> None:
    """The fence learns of B's epoch only by B's first write: until then A's is accepted."""
    program = ("clock", "claim", "write", "write", "clock", "complete")
    a = stage.worker("A", "old", program)
    b = stage.worker("B", "new", PLAIN)
    a.run(0, until="write")
    b.run(10, until="write")
    a.run(11, until="write")
    b.run(11)
    a.run(11)


def rolled_back(stage: Stage) -> None:
    """The fence and the value are one transaction: after an exception neither has stayed."""
    stage.worker("A", "old", ("clock", "claim", "document")).run(0)
    stage.worker("B", "new", ("clock", "claim", "crash")).run(10)
    retried(stage)


def killed(stage: Stage) -> None:
    """The same when the process is killed just before the commit."""
    stage.worker("A", "old", ("clock", "claim", "document")).run(0)
    b = stage.worker("B", "new", ("clock", "claim", "document"))
    b.run(10, until="commit")
    stage.kill("B", 10)
    retried(stage)


def retried(stage: Stage) -> None:
    """Let another process look at what B left, and send B's write again."""
    stage.worker("C", "new", ("find", "document"), lease=Lease(RESOURCE, "B", 2, 20)).run(11)


def renewal(stage: Stage) -> None:
    """A renewal moves the deadline, not the epoch; at the deadline the lease is over."""
    program = ("clock", "claim", "clock", "renew", "clock", "renew", "complete")
    a = stage.worker("A", "old", (*program, "clock", "renew", "write", "complete"))
    a.run(0, until="clock")
    a.run(5, until="clock")
    stage.worker("B", "new", ("clock", "claim")).run(10)
    a.run(15, until="clock")
    stage.worker("B", "new", ("clock", "claim")).run(15)
    stage.worker("C", "newer", PLAIN, owner="A").run(25)
    a.run(26)


def two_files(stage: Stage) -> None:
    """The fenced schedule again, the sink in a file of its own: it needs no lease table."""
    overtaken(stage)


SCENARIOS: dict[str, Scenario | dict[str, Scenario]] = {
    "unfenced": unfenced,
    "fenced": fenced,
    "check_then_write": check_then_write,
    "window": window,
    "rollback": {"exception": rolled_back, "killed": killed},
    "renewal": renewal,
    "two_files": two_files,
}


def run(options: argparse.Namespace) -> Document:
    """Run the scenarios one after the other, showing each as soon as it has ended."""
    scenarios: Document = {}
    with ExitStack() as ending:
        folder = ending.enter_context(tempfile.TemporaryDirectory(prefix="leases-"))
        actors = Troupe(options.pause, ending)
        for number, name in enumerate(options.scenario, 1):
            progress(f"{number} of {len(options.scenario)}: {name}", options)
            arms = {}
            for arm, scenario in arms_of(name, SCENARIOS[name]).items():
                stage = Stage(Path(folder, f"{name}-{arm}"), actors, apart=name == "two_files")
                arms[arm] = stage.play(scenario)
            scenarios[name] = arms.get(name, arms)
            progress("", options)
            if not options.quiet:
                show(name, scenarios[name])
    if not options.quiet and len(scenarios) > 1:
        print()
        print_table(matrix(scenarios))
    return {"scenarios": scenarios}


# ---- The stage: processes, the gate that pauses them, and what they report


class Event(NamedTuple):
    """One call of a worker: what it asked and what it was told."""

    tick: int
    actor: str
    call: str
    arguments: Document
    answer: Any


class Job(NamedTuple):
    """A worker's program, what it has in mind, and where its lease table and its sink are."""

    actor: str
    program: tuple[str, ...]
    memory: Memory
    leases: Path
    sink: Path
    fenced: bool


class Stage:
    """One scenario's databases, and the record of what happens on them."""

    def __init__(self, folder: Path, actors: dict[str, Actor], *, apart: bool) -> None:
        folder.mkdir()
        self.leases = folder / "leases.db"
        self.fenced = folder / "sink.db" if apart else self.leases
        self.unfenced = folder / "unfenced.db"
        self.actors = actors
        self.events: list[Event] = []

    def worker(
        self, actor: str, value: str, program: tuple[str, ...], *, fenced: bool = True, **known: Any
    ) -> Actor:
        """Give an actor its work, and what it knows beforehand; it begins with its first `run`."""
        sink = self.fenced if fenced else self.unfenced
        memory = Memory(value=value, **{"owner": actor, **known})
        self.actors[actor].begin(
            Job(actor, program, memory, self.leases, sink, fenced), self.events
        )
        return self.actors[actor]

    def kill(self, actor: str, tick: int) -> None:
        """Kill an actor's process where it stands; its next job begins in a new one."""
        process = self.actors.pop(actor).process
        process.kill()
        process.join(LIMIT)
        self.events.append(Event(tick, actor, "fail", {"by": "kill"}, "killed"))

    def play(self, scenario: Scenario) -> Document:
        """Run a scenario; answer with its events and what the tables hold at its end."""
        scenario(self)
        sink = self.unfenced if self.unfenced.exists() else self.fenced
        tables = {
            "lease": rows(self.leases, "lease"),
            "sink": rows(sink, "sink"),
            "document": rows(self.fenced, "document"),
        }
        if not tables["document"]:
            del tables["document"]
        return {"events": [event._asdict() for event in self.events], **tables}


class Actor:
    """A spawned process that does one job after the other, and goes on only when told to."""

    def __init__(self, name: str, how: str) -> None:
        self.name, self.how, self.idle, self.stopped = name, how, True, False
        context = multiprocessing.get_context("spawn")
        self.pipe, end = context.Pipe()
        self.process = context.Process(target=child, args=(end,), daemon=True)
        # The child inherits the blocked signal: Ctrl-C ends the parent, and the parent the child.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}) if POSIX else set()
        try:
            self.process.start()
        finally:
            if POSIX:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        end.close()

    def begin(self, job: Job, events: list[Event]) -> None:
        """Take a job, and the record to report to."""
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

    def hear(self, expected: str) -> object:
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
    gate = Gate(pipe)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent is gone
        while True:
            job = pipe.recv()
            gate.wait()
            try:
                work(job, gate)
            except Exception as error:
                pipe.send(f"failed: {type(error).__name__}: {error}")
            else:
                pipe.send("end its work")


def work(job: Job, gate: Gate) -> None:
    """Do a worker's steps, each call through the gate."""
    opened: Any = FencedSink(job.sink) if job.fenced else UnfencedSink(str(job.sink))
    with LeaseTable(job.leases) as table, closing(opened):
        leases, sink = (Recorder(gate, job.actor, store) for store in (table, opened))
        memory = job.memory
        for step in job.program:
            if step == "clock":
                gate.reach("clock")
                memory = memory._replace(now=gate.tick)
            else:
                memory = STEPS[step](memory, leases, sink)
                if memory.lease is None:
                    break


class Gate:
    """Where a worker is paused: before the call that the parent has named."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe

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


POSITIONAL = {
    "claim": ("resource", "owner"),
    "renew": ("lease",),
    "complete": ("lease", "result"),
    "get": ("resource",),
    "write": ("resource", "epoch", "value"),
}


class Recorder:
    """A lease table or a sink whose calls go through the gate and are reported to the parent."""

    def __init__(self, gate: Gate, actor: str, store: Any) -> None:
        self.gate, self.actor, self.store = gate, actor, store

    def report(self, call: str, arguments: Document, answer: object) -> None:
        """Tell the parent what was asked and answered."""
        arguments = {name: plain(value) for name, value in arguments.items()}
        event = Event(self.gate.tick, self.actor, call, arguments, plain(answer))
        self.gate.pipe.send(event)

    def __getattr__(self, call: str) -> Callable[..., Any]:
        def made(*positional: Any, **named: Any) -> Any:
            self.gate.reach(call)
            answer = getattr(self.store, call)(*positional, **named)
            self.report(
                call, {**dict(zip(POSITIONAL[call], positional, strict=True)), **named}, answer
            )
            return answer

        return made

    @contextmanager
    def transaction(self, resource: str, epoch: int) -> Iterator[Recorder]:
        """Report a block: its beginning, its statements and its end."""
        self.gate.reach("transaction")
        arguments = {"resource": resource, "epoch": epoch}
        try:
            with self.store.transaction(resource, epoch) as connection:
                self.report("transaction", arguments, "admitted")
                yield Recorder(self.gate, self.actor, connection)
                self.gate.reach("commit")
            self.report("commit", {}, "committed")
        except Fenced:
            self.report("transaction", arguments, "fenced")
        except Crash:
            self.report("fail", {"by": "exception"}, "raised")
            raise

    def execute(self, sql: str) -> None:
        """Run and report a statement of a block, with the rows that it reads."""
        self.gate.reach("execute")
        cursor = self.store.execute(sql)
        answer = [list(row) for row in cursor.fetchall()] if cursor.description else None
        self.report("execute", {"sql": sql}, answer)


def plain(value: Any) -> Any:
    """Make of a call's argument or answer what JSON can hold."""
    return value._asdict() if hasattr(value, "_asdict") else value


def rows(path: Path, table: str) -> list[Document]:
    """Read a table through a plain connection of its own; a table that was never made is empty."""
    with closing(sqlite3.connect(path)) as connection:
        known = "SELECT count(*) FROM sqlite_master WHERE name = ?"
        if connection.execute(known, (table,)).fetchone() == (0,):
            return []
        connection.row_factory = sqlite3.Row
        return [dict(row) for row in connection.execute(f"SELECT * FROM {table} ORDER BY resource")]


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
    """Show a scenario as lanes, each arm with its verdict."""
    for arm, result in arms_of(name, scenario).items():
        print("\n" + colored(name if arm == name else f"{name}, {arm}", BOLD))
        print(getattr(arms_of(name, SCENARIOS[name])[arm], "__doc__", ""))
        print_table(lanes(result))
        print(colored(verdict(result), RED if summary(result)["overwritten"] else GREEN))


def print_table(table: list[list[str]]) -> None:
    """Print rows as aligned columns."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        print("  " + "  ".join(map(str.ljust, row, widths)).rstrip())


def lanes(result: Document) -> list[list[str]]:
    """Draw one row a call: the tick, the actors, and what the tables hold after it."""
    actors = sorted({event["actor"] for event in result["events"]})
    table = [["tick", *actors, "lease table", "sink"]]
    lease = sink = pending = "-"
    for event in result["events"]:
        asked, answer = event["arguments"], event["answer"]
        match event["call"]:
            case "claim" | "renew" if answer:
                lease = f"{answer['owner']}, epoch {answer['epoch']}, until {answer['deadline']}"
            case "complete" if answer:
                lease = f"done: {asked['result']}"
            case "write" if answer == "written":
                sink = f"{asked['value']}, epoch {asked['epoch']}"
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
    words += [str(asked[key]) for key in ("value", "result", "by") if key in asked]
    words += [f"epoch {asked['epoch']}"] if "epoch" in asked else []
    words += [asked["sql"].partition(" ")[0]] if "sql" in asked else []
    if isinstance(answer, dict):
        shown = ("fence", "epoch", "deadline")
        told: object = ", ".join(f"{key} {answer[key]}" for key in shown if key in answer)
    elif "sql" in asked:
        told = "done" if answer is None else ", ".join(str(cell) for row in answer for cell in row)
    else:
        told = {None: "refused", True: "recorded", False: "refused"}.get(answer, answer)
    return f"{' '.join(words)}: {told}"


def summary(result: Document) -> Document:
    """Hold the lease table against the document, and count the refused and the lost writes."""
    writes = [event for event in result["events"] if event["call"] == "write"]
    accepted = [event["arguments"]["epoch"] for event in writes if event["answer"] == "written"]
    best = [max(accepted[: place + 1]) for place in range(len(accepted))]
    results = [row["result"] for row in result["lease"] if row["result"] is not None]
    values = [row["value"] for row in result.get("document") or result["sink"]]
    return {
        "lease table": results[0] if results else "unfinished",
        "document": values[0] if values else "nothing",
        "refused": [event["answer"] for event in writes].count("stale"),
        "overwritten": sum(epoch < highest for epoch, highest in zip(accepted, best, strict=True)),
    }


def verdict(result: Document) -> str:
    """Say in one line what a summary comes to."""
    found = summary(result)
    line = f"lease table says {found['lease table']}, document says {found['document']}"
    if found["overwritten"]:
        return f"{line}: OVERWRITTEN IN SILENCE"
    return f"{line}; stale writes refused: {found['refused']}"


def matrix(scenarios: Document) -> list[list[str]]:
    """Sum up all scenarios, a row each, under a row of headings."""
    found = {
        name if arm == name else f"{name}, {arm}": summary(result)
        for name, scenario in scenarios.items()
        for arm, result in arms_of(name, scenario).items()
    }
    heads = ["scenario", "lease table", "document", "refused", "overwritten"]
    return [heads, *([name, *map(str, row.values())] for name, row in found.items())]


if __name__ == "__main__":
    sys.exit(main())
