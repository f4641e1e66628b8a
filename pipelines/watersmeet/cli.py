"""The command line: parses arguments, builds Settings, calls one function.

Answers go to standard output, all else to standard error. Each command imports what it needs, so
that `--help` and commands that only read a lake with a path start no Spark.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

import watersmeet
from watersmeet.audit import show
from watersmeet.commands import arguments, usage
from watersmeet.commands.arguments import DEFAULT_CONFIG, Config, Json, Key, KeyJson, as_utf_8
from watersmeet.commands.broker import broker_app
from watersmeet.commands.usage import CHANGE, LOOK, RUN, TRY
from watersmeet.core.texts import without_controls
from watersmeet.errors import (
    ConfigurationError,
    Problem,
    WatersmeetError,
    missing_package,
    no_room,
    root_cause,
)
from watersmeet.imports import hide_pandas
from watersmeet.memory import limit_allocator_caches
from watersmeet.monitoring.observability import (
    log_as_json,
    logs_are_json,
    reporting,
    set_up_logging,
    working,
)
from watersmeet.output import answer, print_json, print_text, write_in_any_encoding
from watersmeet.settings import Settings, load_settings

if TYPE_CHECKING:
    from watersmeet.lake.table_reader import TableReader

OF_OTHERS = 0o007
"""Permission bits that others never get, whatever the umask: lakes and pages hold records."""

Once = Annotated[bool, typer.Option("--once", help="Handle everything available now, then exit.")]
Engine = Annotated[
    Literal["spark", "embedded"] | None,
    typer.Option(
        help="What runs the layers; default: spark where the environment names one, else embedded."
    ),
]

app = usage.new_app(
    name="watersmeet",
    help="Merges Kafka topics by event time on Delta tables and publishes each finished record "
    "once, in order.",
)
app.add_typer(broker_app, name="broker", rich_help_panel=TRY)


@app.callback()
def _main(
    context: typer.Context,
    config: Config = DEFAULT_CONFIG,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show the stack trace of an error.")
    ] = False,
) -> None:
    set_up_logging(verbose=verbose)
    group: Any = context.command
    defaults = {"config": str(config)}
    of_broker = {"start": defaults, "send": defaults}
    context.default_map = {**dict.fromkeys(group.commands, defaults), "broker": of_broker}
    if version:
        print_text(watersmeet.__version__)
        raise typer.Exit
    usage.show_help_alone(context)


@app.command(rich_help_panel=TRY)
def init(
    directory: Annotated[
        Path, typer.Argument(help="Where to write; made if missing.", callback=arguments.as_local)
    ] = Path(),
    engine: Engine = None,
    as_json: Json = False,
) -> None:
    """Write a commented watersmeet.yml, example records, and the schemas and suites of expectations
    that it names."""
    from watersmeet.dev.init import Choice, choose_engine, init_view, write_example

    choice = choose_engine() if engine is None else Choice(engine, None)
    written = [str(path) for path in write_example(directory, choice.engine)]
    answer({"written": written, **choice._asdict()}, as_json, init_view)


@app.command(rich_help_panel=TRY)
def fetch(
    into: Annotated[
        Path | None,
        typer.Option(
            help="The folder; default: your cache, where they are looked for.",
            callback=arguments.as_local,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Fetch the pinned JVM artifacts of Spark and of the embedded broker, as their first use does,
    and prepare quicker starts of Spark on this machine."""
    from watersmeet.jvm import class_archive
    from watersmeet.jvm.artifacts import GROUPS, cache_folder
    from watersmeet.jvm.artifacts import fetch as fetch_group

    folder = into or cache_folder()
    with working("fetches JVM artifacts") as reporter:
        files = [str(file) for group in GROUPS for file in fetch_group(group, folder)]
        if into is None and class_archive.name() is not None:
            from watersmeet.engine.class_archive import make_archive

            reporter.begin("prepares quicker starts of Spark")
            make_archive()
    answer({"files": files}, as_json, lambda _: "\n".join(files))


@app.command(rich_help_panel=LOOK)
def validate(config: Config = DEFAULT_CONFIG, as_json: Json = False) -> None:
    """Check configuration, schemas, topics and tables; exit status 2 where something is wrong."""
    with working("checks configuration, topics and tables"):
        problems, doubts, preview = _find_problems(config)
    facts: dict[str, Any] = {"ok": not problems, "problems": [each._asdict() for each in problems]}
    warnings = [doubt._asdict() for doubt in doubts]
    if warnings:
        facts["warnings"] = warnings
    if problems:
        answer(facts, as_json, show.problems_view)
        raise typer.Exit(2)
    if not as_json:
        print_text(f"{config}: everything fits; a run would now read")
    names = ("source", "partition", "transaction")
    with_transaction = [row for row in preview if "transaction" in row]
    if transactions := [{name: row[name] for name in names} for row in with_transaction]:
        facts["transactions"] = transactions
    answer(facts, as_json, lambda _: show.preview_view(preview, warnings))


def _find_problems(config: Path) -> tuple[list[Problem], list[Problem], list[dict[str, Any]]]:
    from watersmeet.audit import validate as audit
    from watersmeet.engine.choice import lake_reader
    from watersmeet.lake.location import Lake
    from watersmeet.quality.rows import check_suites

    try:
        settings = load_settings(config)
    except ConfigurationError as error:
        faults = [each.problem for each in (error, *error.more)]
        fix = "correct the configuration"
        return [Problem(f.what, f.where or str(config), f.fix or fix) for f in faults], [], []
    problems = audit.check_kafka(settings)
    is_answering = not any(problem.where.startswith("kafka") for problem in problems)
    schema_problems = audit.check_schemas(settings)
    problems += schema_problems + audit.check_registries(settings)
    preview: list[dict[str, Any]] = []
    warnings: list[Problem] = []
    # Without its schemas, silver has no columns.
    if not schema_problems:
        lake, reader = Lake(settings), lake_reader(settings)
        problems += check_suites(settings)
        in_lake, preview = audit.check_lake(lake, reader, settings, with_kafka=not problems)
        problems += in_lake
        warnings += audit.doubtful(settings, lake, reader, with_kafka=is_answering)
    if not problems:
        problems, key_warnings = audit.check_keys(settings, lake_reader(settings))
        warnings = key_warnings + warnings
    return problems, warnings, preview


@app.command("try", rich_help_panel=TRY)
def try_rules(
    file: Annotated[
        Path, typer.Argument(help="A file with a record in each line, as a JSON object.")
    ],
    config: Config = DEFAULT_CONFIG,
    close: Annotated[
        bool, typer.Option(help="Let time go on at the end until every merge record has timed out.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Show what the configuration makes of the records in a file, without Kafka and without a
    lake."""
    from watersmeet.dry_run import try_file

    with working("merges the records of the file"), _ended_by_signals():
        result = try_file(config, file, close=close)
    answer(result, as_json, show.try_view)


@app.command(rich_help_panel=RUN)
def run(
    layers: Annotated[
        Literal["all", "bronze", "silver", "gold"],
        typer.Argument(show_choices=False, help="all, bronze, silver or gold."),
    ] = "all",
    config: Config = DEFAULT_CONFIG,
    once: Once = False,
    log_format: Annotated[
        Literal["text", "json"],
        typer.Option(help="How the log is written to standard error; json: one object a line."),
    ] = "text",
    as_json: Json = False,
) -> None:
    """Run the streams until stopped (SIGINT or SIGTERM end after the batch under way), or once;
    changes data."""
    from watersmeet.monitoring.metrics import serving
    from watersmeet.run import LAYERS, Run, run_with_restarts
    from watersmeet.running.lineage import sending

    if log_format == "json":
        log_as_json()
    asked_to_stop = threading.Event()
    stopping = threading.Event()
    _set_by_signals(asked_to_stop, stopping)
    settings = load_settings(config)
    with reporting() as reporter, serving(settings) as metrics, sending(settings) as lineage:
        chosen = LAYERS if layers == "all" else (layers,)

        def begin() -> None:
            with _ended_by_signals():
                this_run = Run(settings, chosen, reporter, stopping, observers=[*metrics, *lineage])
            if once:
                this_run.once()
            else:
                this_run.until_stopped()

        run_with_restarts(begin, asked_to_stop, stopping, reporter)
        if asked_to_stop.is_set():
            reporter.notify("run", "stopped, as asked")
        elif reporter.latest.keys() <= {"lake"}:
            reporter.notify("run", "nothing new")
    if as_json:
        print_json({"layers": list(chosen), "latest": reporter.latest})
    else:
        reporter.leave_latest()


@app.command(rich_help_panel=RUN)
def repartition(config: Config = DEFAULT_CONFIG, once: Once = False, as_json: Json = False) -> None:
    """Write the topics of sources that have `repartition`, by their merge keys, until stopped
    (SIGINT, SIGTERM), or once; changes data."""
    from watersmeet.monitoring.metrics import serving
    from watersmeet.repartition.command import repartition as write
    from watersmeet.running.lineage import sending

    stopping = threading.Event()
    _set_by_signals(stopping)
    settings = load_settings(config)
    with reporting() as reporter, serving(settings) as metrics, sending(settings) as lineage:
        written = write(settings, reporter, stopping, [*metrics, *lineage], once=once)
    answer({"sources": written}, as_json, show.repartition_view)


@app.command(rich_help_panel=LOOK)
def status(config: Config = DEFAULT_CONFIG, as_json: Json = False) -> None:
    """Show where every partition stands: heads, clock, lead, lag, and how many records ended
    where."""
    from watersmeet.ask.status import status as find_status

    with working("asks Kafka and the lake"):
        settings = load_settings(config)
        facts = find_status(reader_of(settings), settings)
    answer(facts, as_json, show.status_view)


@app.command(rich_help_panel=LOOK)
def explain(
    key: Key = None,
    key_json: KeyJson = None,
    as_of: Annotated[
        str | None,
        typer.Option(help="As of a version of silver, or a time such as 2026-01-01T00:00:00Z."),
    ] = None,
    tenant: Annotated[
        str | None,
        typer.Option(
            help="Of this tenant alone, where the key is one of several tenants.", callback=as_utf_8
        ),
    ] = None,
    config: Config = DEFAULT_CONFIG,
    as_json: Json = False,
) -> None:
    """Show a key's merge records: their parts, how and when each was merged, and what became of
    them."""
    from watersmeet.ask.explain import explain as explain_key

    with working("looks for the key in the lake"):
        settings = load_settings(config)
        merge_key = arguments.parse_key(key, key_json)
        time = None if as_of is None else arguments.parse_as_of("--as-of", as_of)
        facts = explain_key(reader_of(settings), settings, merge_key, time, tenant)
    answer(facts, as_json, show.explain_view)


@app.command(rich_help_panel=LOOK)
def sql(
    query: Annotated[
        str, typer.Argument(help="One query over the lake's tables and views.", callback=as_utf_8)
    ],
    at: Annotated[
        str | None,
        typer.Option(help="As of a version of silver, or a time such as 2026-01-01T00:00:00Z."),
    ] = None,
    as_csv: Annotated[
        bool, typer.Option("--csv", help="The rows as CSV, with a line of names before them.")
    ] = False,
    config: Config = DEFAULT_CONFIG,
    as_json: Json = False,
) -> None:
    """Run a query in SQL over the lake's tables and views, all of one moment; it only reads."""
    from watersmeet.ask.sql import as_document, as_table, ask, write_csv

    if as_csv and as_json:
        raise ConfigurationError("two forms are named", where="--csv, --json", fix="give one")
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the engine does not let Python end it
    with working("runs the query", has_line=False):
        settings = load_settings(config)
        time = None if at is None else arguments.parse_as_of("--at", at)
        rows = ask(reader_of(settings), settings, query, time)
    if as_csv:
        write_csv(rows)
    else:
        answer({} if not as_json else as_document(rows), as_json, lambda _: as_table(rows))


@app.command(rich_help_panel=LOOK)
def verify(
    config: Config = DEFAULT_CONFIG,
    full: Annotated[
        bool, typer.Option("--full", help="Compare every key with the merge model, not a sample.")
    ] = False,
    against: Annotated[
        Path | None, typer.Option(help="Compare silver with a rebuild, and nothing else.")
    ] = None,
    generation: Annotated[
        int | None, typer.Option(help="Of this generation; by default the newest, with --full all.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check the promises on the data itself: Kafka, bronze, silver, the sink; exit status 3 where
    one is broken."""
    from watersmeet.audit.rebuild import rebuilt_settings, verify_against
    from watersmeet.audit.verify import has_lake
    from watersmeet.audit.verify import verify as find_broken
    from watersmeet.engine.choice import lake_reader

    with working("checks the promises"):
        settings = load_settings(config)
        reader = reader_of(settings)
        if against is None:
            result = find_broken(reader, settings, full=full, generation=generation)
        else:
            rebuilt = lake_reader(rebuilt_settings(settings, against))
            result = verify_against(reader, rebuilt, settings, against, generation)
    verdict = "every promise is kept"
    if against is not None:
        verdict = f"silver and late are the same as in {against}"
    elif not has_lake(reader, settings):
        verdict = "nothing to check"
    elif not full:
        verdict += " (silver: for a sample of its keys; --full checks all of them)"
    view = (lambda _: f"{config}: {verdict}") if result["ok"] else show.problems_view
    answer(result, as_json, view)
    if not as_json:
        for note in result.get("notes", ()):
            print_text(note)
    if not result["ok"]:
        raise typer.Exit(3)


@app.command(rich_help_panel=LOOK)
def rebuild(
    into: Annotated[Path, typer.Option(help="A new folder for it.", callback=arguments.as_local)],
    timeout: Annotated[
        str | None, typer.Option(help="Another merge.timeout than the lake's, such as 60m.")
    ] = None,
    gap: Annotated[
        str | None, typer.Option(help="Another merge.window.gap than the lake's, with --max.")
    ] = None,
    longest: Annotated[
        str | None,
        typer.Option("--max", help="Another merge.window.max than the lake's, with --gap."),
    ] = None,
    lag: Annotated[
        str | None,
        typer.Option("--tenant-max-lag", help="Another merge.tenant_max_lag than the lake's."),
    ] = None,
    generation: Annotated[
        int | None, typer.Option(help="Of this generation; by default the newest.")
    ] = None,
    config: Config = DEFAULT_CONFIG,
    as_json: Json = False,
) -> None:
    """Derive silver again from bronze alone, up to its last batch, and compare the two; the lake is
    not changed."""
    from watersmeet.audit.rebuild import rebuild as derive_again

    with working("derives silver again") as reporter:
        settings = load_settings(config)
        window = arguments.parse_window(timeout, gap, longest)
        lag_ms = None if lag is None else arguments.parse_length("--tenant-max-lag", lag)
        result = derive_again(
            reader_of(settings),
            settings,
            into,
            window,
            lambda plan: reporter.notify("rebuild", f"batch {plan.batch}"),
            lag_ms=lag_ms,
            generation=generation,
        )
    answer(result, as_json, show.rebuild_view)


@app.command(rich_help_panel=CHANGE)
def redrive(
    reason: Annotated[
        str, typer.Option(help="Why they were refused, such as event_time_in_future.")
    ],
    since: Annotated[
        str | None, typer.Option(help="Only what Kafka took at this time or later.")
    ] = None,
    apply: Annotated[
        bool, typer.Option("--apply", help="Do it; otherwise only show what would be sent.")
    ] = False,
    config: Config = DEFAULT_CONFIG,
    as_json: Json = False,
) -> None:
    """Send refused records to their source topic again, as they came, each once; says first how
    many; changes data with --apply."""
    from watersmeet.operations.redrive import Redrive

    with working("looks for refused records"):
        settings = load_settings(config)
        since_ms = None if since is None else arguments.parse_time_ms("--since", since)
        work = Redrive(begun_reader_of(settings, changes=apply), settings, reason, since_ms)
        facts = work.run(apply=apply)
    answer(facts, as_json, show.redrive_view)


@app.command(rich_help_panel=CHANGE)
def forget(
    key: Key = None,
    key_json: KeyJson = None,
    apply: Annotated[
        bool, typer.Option("--apply", help="Do it; otherwise only show where the key is.")
    ] = False,
    tombstone: Annotated[
        bool,
        typer.Option("--tombstone", help="Also send the sink a message without a value for it."),
    ] = False,
    tenant: Annotated[
        str | None,
        typer.Option(
            help="Of this tenant alone; otherwise the key of every tenant.", callback=as_utf_8
        ),
    ] = None,
    config: Config = DEFAULT_CONFIG,
    as_json: Json = False,
) -> None:
    """Erase a key's records from every table; says where they are, and what holds them for longer
    and until when; changes data with --apply."""
    from watersmeet.operations.forget import Forgetting, check_tombstone, forgotten

    with working("looks for the key in the lake") as reporter:
        if tombstone:
            check_tombstone(tenant)
        settings = load_settings(config)
        merge_key = arguments.parse_key(key, key_json)
        # A tombstone is sent for a key whose lake was lost, too.
        reader_for = reader_of if apply and tombstone else begun_reader_of
        reader = reader_for(settings, changes=apply)
        if apply:
            facts = forgotten(settings, merge_key, reporter, tenant, has_tombstone=tombstone)
        else:
            facts = Forgetting(reader, settings, merge_key, tenant).preview()
    answer(facts, as_json, show.forget_view)


@app.command(rich_help_panel=LOOK)
def check(
    since: Annotated[
        int | None,
        typer.Option(
            min=0, help="Look at everything since a version of silver, not since the last check."
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(help="Also write an HTML page with the results.", callback=arguments.as_local),
    ] = None,
    config: Config = DEFAULT_CONFIG,
    as_json: Json = False,
) -> None:
    """Check what is new in the lake against the suites of expectations; exit status 3 where one is
    not met; changes data: the table `quality`."""
    with working("checks the expectations"):
        from watersmeet.quality.page import check_lake

        done = check_lake(load_settings(config), since, html)
    answer(done.document(), as_json, show.check_view)
    if not done.ok:
        raise typer.Exit(3)
    if done.skipped:
        raise typer.Exit(1)


@app.command(rich_help_panel=LOOK)
def report(
    out: Annotated[Path, typer.Option(help="The HTML file to write.", callback=arguments.as_local)],
    config: Config = DEFAULT_CONFIG,
    as_json: Json = False,
) -> None:
    """Write one HTML page with charts of the lake: clocks, leads, throughput, delays, what was
    refused, match rates."""
    from watersmeet.ask.page import check_writable, write_page
    from watersmeet.ask.report import read_report
    from watersmeet.ask.report_page import page
    from watersmeet.running.owner import now_ms

    with working("reads the lake and draws the charts"):
        settings = load_settings(config)
        check_writable("--out", out)  # fail before reading the whole lake
        write_page("--out", out, page(read_report(reader_of(settings), settings, now_ms())))
    answer({"written": str(out)}, as_json, lambda _: str(out))


@app.command(rich_help_panel=CHANGE)
def reset(
    to: Annotated[
        str, typer.Option(help="earliest, latest, or a time such as 2026-01-01T00:00:00Z.")
    ],
    yes: Annotated[
        bool, typer.Option("--yes", help="Do it; otherwise only show what would be done.")
    ] = False,
    config: Config = DEFAULT_CONFIG,
    as_json: Json = False,
) -> None:
    """Continue reading somewhere else, with fresh state; says first what would be skipped or read
    again; changes data with --yes."""
    from watersmeet.core.sequence import CORRECTED, MERGED, Tail
    from watersmeet.lake.published import last_tails
    from watersmeet.run import LAYERS, Run
    from watersmeet.running.beginnings import read_last_published, sequence_topics
    from watersmeet.running.generations import Jump, targets_of
    from watersmeet.running.owner import Owner

    with working("compares the lake with Kafka") as reporter:
        settings = load_settings(config)
        target = arguments.parse_target(to)
        begun_reader_of(settings, changes=yes)
        this_run = Run(settings, LAYERS, reporter, is_preview=not yes)
        lake_settings = this_run.settings
        partitions = this_run.partitions
        targets = targets_of(lake_settings, partitions, target)

        def read_last(owner: Owner) -> list[dict[int, Tail]]:
            return [
                read_last_published(owner.engine.reader, lake_settings, partitions, sequence)
                for sequence in (MERGED, CORRECTED)
            ]

        if yes:
            with this_run.take_layers() as layer_set:
                owner = layer_set.owner
                tails = [each.recover() for each in (layer_set.gold, *layer_set.corrections)]
                if not layer_set.corrections:  # the lake may have made some
                    tails.append(last_tails(owner.engine.reader, CORRECTED))
                topics = sequence_topics(lake_settings)
                jump = Jump(
                    owner, lake_settings, partitions, str(target), targets, *tails, topics=topics
                )
                jump.check_filled(read_last(owner))
                facts = jump.preview()
                jump.commit()
        else:
            this_run.check_identity()
            owner = Owner(this_run.engine)  # without a lease: it only reads
            tails = read_last(owner)
            jump = Jump(owner, lake_settings, partitions, str(target), targets, *tails)
            facts = jump.preview()
    answer({**facts, "done": yes}, as_json, show.reset_view)


@app.command(rich_help_panel=CHANGE)
def evolve(
    apply: Annotated[
        bool, typer.Option("--apply", help="Record it; otherwise only show what would change.")
    ] = False,
    config: Config = DEFAULT_CONFIG,
    as_json: Json = False,
) -> None:
    """Compare the configuration's rules with the lake's, and record them as its next epoch; a run
    that goes on ends; changes data with --apply."""
    from watersmeet.operations.evolve import evolve as record
    from watersmeet.operations.evolve import preview

    with working("compares the configuration with the lake") as reporter:
        settings = load_settings(config)
        reader = begun_reader_of(settings, changes=apply)
        changes = record(reader, settings, reporter) if apply else preview(reader, settings)
    answer(changes, as_json, show.evolve_view)
    if changes["problems"]:
        raise typer.Exit(2)


@app.command(rich_help_panel=CHANGE)
def maintain(config: Config = DEFAULT_CONFIG, as_json: Json = False) -> None:
    """Delete rows that `keep` lets go, compact, and remove files older than `retention`; a run does
    so by itself; changes data."""
    from watersmeet.lake.maintenance import maintain as maintain_tables
    from watersmeet.run import LAYERS, Run
    from watersmeet.running.owner import kept_by

    with working("reads the lake") as reporter:
        settings = load_settings(config)
        begun_reader_of(settings, changes=True)
        this_run = Run(settings, LAYERS, reporter)
        names = [name for layer in LAYERS for name in kept_by(layer, this_run.settings)]
        with this_run.take_layers() as layer_set:
            reporter.begin("deletes rows, compacts tables and removes old files")
            done = maintain_tables(layer_set.owner.engine, names, layer_set.expire)
    answer({"tables": done}, as_json, show.maintain_view)


@app.command(rich_help_panel=TRY)
def demo(
    directory: Annotated[
        Path,
        typer.Option(
            "--dir", help="Where the demo's lake and broker live.", callback=arguments.as_local
        ),
    ] = Path("demo-lake"),
    engine: Engine = None,
) -> None:
    """Run the whole pipeline on real clickstream data against a real broker, and show what came
    out."""
    from watersmeet.dev.demo import run_demo
    from watersmeet.dev.init import choose_engine

    chosen, reason = choose_engine() if engine is None else (engine, None)
    if reason is not None:
        logging.getLogger("watersmeet").info("engine: %s, since %s", chosen, reason)
    run_demo(directory, chosen)


# -- what commands share


def reader_of(settings: Settings, *, changes: bool = False) -> TableReader:
    """Return the reader that answers questions about the lake.

    `changes`: for a command that changes the lake. It moves aside what a power cut has left at the
    end of the tables' logs; without it, such a lake is refused.

    Raises WatersmeetError where its store cannot be read, and where an earlier version made it.
    """
    from watersmeet.engine.choice import lake_reader
    from watersmeet.lake.identity import check_layout
    from watersmeet.lake.location import Lake
    from watersmeet.lake.store import check_readable
    from watersmeet.lake.torn import check_whole, move_aside

    lake = Lake(settings)
    check_readable(lake)
    if changes:
        move_aside(lake)
    else:
        check_whole(lake)
    reader = lake_reader(settings)
    check_layout(reader, lake)
    return reader


def begun_reader_of(settings: Settings, *, changes: bool = False) -> TableReader:
    """Return the reader of a lake that has begun, and has all of its tables.

    Raises ConfigurationError for another.
    """
    from watersmeet.lake.identity import check_begun
    from watersmeet.lake.location import Lake
    from watersmeet.lake.restored import check_not_deleted

    reader = reader_of(settings, changes=changes)
    check_not_deleted(reader, settings)
    check_begun(reader, Lake(settings))
    return reader


def _set_by_signals(*stopping: threading.Event) -> None:
    # A thread sets the events. A handler would run in the main thread, and wait for ever where that
    # holds the lock of an event; `SimpleQueue.put` may be called at any moment.
    signals = queue.SimpleQueue[int]()

    def stop() -> None:
        while signals.get():
            for event in stopping:
                event.set()

    threading.Thread(target=stop, name="signals", daemon=True).start()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: signals.put(number))


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    # An engine may take long to start, and owns nothing yet. Spark installs a handler of SIGINT of
    # its own on the way, which raises KeyboardInterrupt; afterwards the signals do what they did
    # before. Where Python ignores exceptions (in a hook of a fork, or a finalizer), a signal ends
    # the command a moment later.
    def hear_again(ignored: sys.UnraisableHookArgs) -> None:
        if isinstance(ignored.exc_value, SystemExit | KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.05)
        else:
            report_ignored(ignored)

    report_ignored, sys.unraisablehook = sys.unraisablehook, hear_again
    handlers = {
        number: signal.signal(number, lambda *_: sys.exit())
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
    }
    try:
        yield
    except KeyboardInterrupt:
        sys.exit()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.unraisablehook = report_ignored
        for number, handler in handlers.items():
            signal.signal(number, handler)


def main() -> None:
    """Run the command; any failure ends as one sentence and the exit status of the contract."""
    limit_allocator_caches()
    hide_pandas()
    write_in_any_encoding()
    os.umask(os.umask(0) | OF_OTHERS)
    try:
        if status := usage.call(app):
            sys.exit(status)
    except SystemExit as done:
        if done.code:  # some job runners treat even SystemExit(0) as a failure
            raise
    except typer.TyperException as error:
        _fail(usage.usage_sentence(error), error.exit_code)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # last resort: a stack trace is only shown on request
        own = no_room(error) or (error if isinstance(error, WatersmeetError) else None)
        if own is not None:
            _fail(str(own), own.exit_code)
        logging.getLogger("watersmeet").debug("stack trace", exc_info=True)
        _fail(root_cause(error), 2 if missing_package(error) else 1)


def _fail(sentence: str, exit_code: int) -> None:
    if logs_are_json():
        facts = {"exit_status": exit_code}
        logging.getLogger("watersmeet").error("%s", sentence, extra={"facts": facts})
    else:
        sys.stderr.write(f"watersmeet: {without_controls(sentence)}\n")
    sys.exit(exit_code)
