"""The text of a page: formatted figures, bars in percent, and a template that escapes all text."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from bunkbed.core.budget import format_bytes, parse_bytes
from bunkbed.core.types import Json
from bunkbed.machine.text import milliseconds, rates
from bunkbed.train.evaluate.results import EvalResult
from bunkbed.train.output.display import main_metrics
from bunkbed.train.output.plots import Metrics
from bunkbed.train.report import charts
from bunkbed.train.report.ages import Ages, bars_of, in_words
from bunkbed.train.report.charts import Chart
from bunkbed.train.report.facts import UNKNOWN, Facts, Limit, Option

_DISK = {
    "live": ("a", "rows", "the newest record of every stored row, weights and optimizer state"),
    "snapshots": ("d", "snapshots", "what only snapshots hold; dropping them frees it"),
    "superseded": (
        "b",
        "older records",
        "until compaction removes them; ids of deleted and of counted rows; what is not committed yet",
    ),
    "checkpoints": ("c", "directory", "checkpoint of where each row lies, for opening at once"),
    "dense": ("e", "dense weights", "of the model, with their optimizer state"),
    "data": ("f", "interactions", "the run's own copy of the pairs it is trained on"),
    "rest": ("muted", "the rest", "configuration, metrics, pictures and reports"),
}


@dataclass(frozen=True)
class Card:
    """Figure at the top of the page."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Bar:
    """Bar of a figure: its name, its length in percent, and its value as text."""

    name: str
    percent: float
    value: str
    note: str = ""
    color: str = "a"


@dataclass(frozen=True)
class Figure:
    """Chart with its title and the sentence that explains it."""

    title: str
    text: str
    chart: Chart


@dataclass(frozen=True)
class _Judged:
    """The run or a baseline: how it scores, its figures on the validation and on the test, and its color."""

    name: str
    about: str
    best: Json
    test: EvalResult | None
    seconds: float
    color: str

    @property
    def tested(self) -> Json:
        return {} if self.test is None else self.test.metrics


def render(facts: Facts, *, now: datetime | None = None) -> str:
    """Return the page of `facts` as HTML."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    import bunkbed

    # autoescape: names come from files, which may be untrusted.
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(bytes=format_bytes, count=lambda number: f"{number:,}", svg=Markup, when=_when)
    metrics = facts.metrics
    shown = metrics is not None and bool(metrics.steps or metrics.epochs)
    return environment.get_template("page.html.j2").render(
        facts=facts,
        name=facts.path.name,
        about=_about(facts),
        cards=_run_cards(facts) if facts.kind == "run" else _table_cards(facts),
        learning=_learning(facts, metrics) if metrics is not None and shown else [],
        baselines=_baselines(facts) if facts.baselines else None,
        epochs=_epochs(metrics) if metrics is not None else [],
        rows=_rows(metrics) if metrics is not None and shown else [],
        why_no_metrics=facts.why.get("metrics", "") or ("" if shown else "Nothing was reported yet."),
        tiers=_tiers(facts),
        limit=_limit(facts.limit) if facts.limit is not None else None,
        hot=charts.hot_rows(facts.curves) if facts.curves else Chart(missing=facts.why.get("curves", "")),
        hot_text=_hot_text(facts),
        ages=[_ages(one) for one in facts.ages],
        disk=_disk(facts),
        disk_bytes=sum(facts.disk.values()),
        changed=[_option(one) for one in facts.options if one.differs],
        same=[_option(one) for one in facts.options if not one.differs],
        now=(now or datetime.now()).astimezone(),
        version=bunkbed.__version__,
    )


def _about(facts: Facts) -> str:
    """Return the line below the title."""
    parts = []
    if facts.options:
        parts += [
            f"{facts.option('model')}, {facts.option('loss')}, dim {facts.option('dim')}, {facts.option('optimizer')}"
        ]
        ram = _size(facts.option("ram"))
        parts += [f"{format_bytes(ram)} of RAM"] if ram else []
    progress = facts.progress
    if progress:
        parts.append(f"{progress.get('epoch', 0):,} epochs, {progress.get('global_step', 0):,} steps committed")
    elif facts.epoch:
        parts.append(f"commit {facts.epoch:,}")
    metrics = facts.metrics
    if metrics is not None and (metrics.steps or metrics.epochs):
        last = max(entry["global_step"] for entry in (*metrics.steps, *metrics.epochs))
        if last > progress.get("global_step", 0):
            parts.append(f"reported until step {last:,}")
    if progress.get("stopped_early"):
        parts.append("stopped early")
    return " · ".join(parts)


# ---- Cards


def _run_cards(facts: Facts) -> list[Card]:
    metrics, progress = facts.metrics or Metrics(), facts.progress
    cards = []
    metric, best = str(facts.option("metric", "")), progress.get("best", {})
    note = f"epoch {progress.get('best_epoch')}"
    if progress.get("chosen_on"):
        note += " of the training before this one on all pairs"
    if _has(best, metric):
        cards.append(Card(f"best {metric}", f"{best[metric]:.4f}", note))
    last = metrics.epochs[-1] if metrics.epochs else {}
    if _has(last, "loss"):
        cards.append(Card("loss", f"{last['loss']:.4f}", f"mean of epoch {last.get('epoch')}"))
    if _has(last, "unique_hit_rate"):
        cards.append(Card("found in RAM", f"{last['unique_hit_rate']:.1%}", "of the unique rows, last epoch"))
    if _has(last, "stall_s") and _has(last, "seconds") and last["seconds"] > 0:
        cards.append(Card("waited for reads", f"{last['stall_s'] / last['seconds']:.0%}", "of the last epoch's steps"))
    speed = [entry["samples_per_s"] for entry in metrics.steps if _has(entry, "samples_per_s")]
    if speed:
        cards.append(
            Card("pairs a second", charts.compact(_three_digits(sum(speed) / len(speed))), "mean of all reports")
        )
    if facts.limit is not None:
        cards.append(Card("of the limit", f"{facts.limit.share:.0%}", f"{facts.limit.times.binds} binds"))
    return cards


def _table_cards(facts: Facts) -> list[Card]:
    table = facts.tables[0]
    rows = f"of {table.num_rows:,}" if table.num_rows is not None else "of any id"
    return [
        Card("rows stored", f"{table.stored_rows:,}", rows),
        Card("a row", f"{table.record_bytes:,} B", f"{table.dim} x {table.dtype}, with its state"),
        Card("on disk", format_bytes(sum(facts.disk.values())), f"{format_bytes(table.live_bytes)} of it live"),
        Card("step", f"{table.step:,}", f"commit {table.epoch:,}"),
        Card("snapshots", f"{len(facts.snapshots):,}", "kept by name"),
    ]


# ---- Over time


def _learning(facts: Facts, metrics: Metrics) -> list[Figure]:
    evaluated = [entry for entry in metrics.epochs if entry.get("metrics")]
    ranking = str(evaluated[-1].get("ranking", "")) if evaluated else ""
    judged = (
        f"How well the held-out pairs are ranked after each epoch ({ranking})"
        if ranking
        else "How well the held-out pairs are ranked after each epoch"
    )
    return [
        Figure(
            "Loss",
            "What training minimises, over its steps: pale each report, strong the mean of an epoch.",
            charts.loss(metrics),
        ),
        Figure(
            "Quality",
            f"{judged}; dashed is the epoch kept as best.",
            charts.quality(metrics, str(facts.option("metric", ""))),
        ),
    ]


def _rows(metrics: Metrics) -> list[Figure]:
    return [
        Figure(
            "Rows found in RAM",
            "Of the different rows a step wants, those that needed no read; a row that was never stored counts as "
            "not found, though it needs none.",
            charts.hits(metrics),
        ),
        Figure(
            "Waiting for the SSD",
            "The part of the time in which steps waited for reads; the rest of the reading is hidden behind the "
            "model's work.",
            charts.stalls(metrics),
        ),
        Figure(
            "Speed",
            "Positive pairs trained on in a second, making batches and waiting included.",
            charts.speed(metrics),
        ),
    ]


def _epochs(metrics: Metrics) -> list[Json]:
    """Return the rows of the table of epochs: each figure as text, empty if unknown."""

    def shown(entry: Json, key: str, form: str) -> str:
        return format(entry[key], form) if _has(entry, key) else ""

    return [
        {
            "epoch": entry.get("epoch", ""),
            "loss": shown(entry, "loss", ".4f"),
            "metrics": ", ".join(f"{name} {value:.4f}" for name, value in entry["metrics"].items() if _is_number(value))
            if isinstance(entry.get("metrics"), dict)
            else "",
            "hits": shown(entry, "unique_hit_rate", ".1%"),
            "seconds": shown(entry, "seconds", ",.1f"),
            "stall_s": shown(entry, "stall_s", ",.1f"),
            "read": format_bytes(entry["disk_read_bytes"]) if _has(entry, "disk_read_bytes") else "",
            "written": format_bytes(entry["disk_written_bytes"]) if _has(entry, "disk_written_bytes") else "",
            "is_best": bool(entry.get("is_best")),
        }
        for entry in metrics.epochs
    ]


def _baselines(facts: Facts) -> Json:
    """Return the run and its baselines, the best first: bars of one metric, and the rows of a table."""
    metric, metrics = str(facts.option("metric")), facts.metrics or Metrics()
    seconds = sum(float(entry["seconds"]) for entry in metrics.epochs if _has(entry, "seconds"))
    rows = [_Judged("this run", str(facts.option("model")), facts.progress.get("best", {}), facts.test, seconds, "a")]
    rows += [_Judged(one.name, one.about, one.best, one.test, one.seconds, "muted") for one in facts.baselines]
    # The run has figures on its test once it is done.
    is_tested = all(row.test is not None for row in rows)
    first = facts.baselines[0]
    judged = first.test if is_tested or first.validation is None else first.validation
    assert judged is not None  # nothing is stored without figures
    names = main_metrics(judged.metrics, metric)

    def value(row: _Judged) -> float:
        return float((row.tested if is_tested else row.best).get(metric, -1.0))

    def shown(figures: Json) -> str:
        return ", ".join(f"{name} {figures[name]:.4f}" for name in names if _has(figures, name))

    rows.sort(key=value, reverse=True)
    longest = max(value(row) for row in rows)
    return {
        "text": f"{metric} on the {judged.split} ({judged.ranking}). The baselines are judged as the run.",
        "bars": [
            Bar(row.name, 100 * value(row) / (longest or 1.0), f"{value(row):.4f}", row.about, row.color)
            for row in rows
            if value(row) >= 0
        ],
        "rows": [
            (row.name, shown(row.best), shown(row.tested), _seconds(row.seconds) if row.seconds else "") for row in rows
        ],
    }


# ---- Tiers and limits


def _tiers(facts: Facts) -> list[Bar]:
    """Return bytes of the tables by tier, compared with the bytes of all rows in RAM."""
    rows = sum(table.nbytes for table in facts.tables)
    live = sum(table.live_bytes for table in facts.tables)
    of_tables = sum(facts.disk[name] for name in ("live", "snapshots", "superseded", "checkpoints"))
    found: list[tuple[str, float, str, str]] = []
    device = _size(facts.option("device_cache"))
    if device:
        found.append(("device", device, f"at most, for hot rows on {facts.option('device')}", "d"))
    entries = [] if facts.metrics is None else [*facts.metrics.steps, *facts.metrics.epochs]
    entries = [entry for entry in entries if _has(entry, "ram_bytes") and _has(entry, "ram_budget_bytes")]
    if entries:
        last = max(reversed(entries), key=lambda entry: float(entry["global_step"]))
        budget = format_bytes(last["ram_budget_bytes"])
        found.append(("RAM", float(last["ram_bytes"]), f"of a budget of {budget}, as last reported", "c"))
    if of_tables:
        found.append(("SSD", float(of_tables), f"of files, {format_bytes(live)} with live rows", "a"))
    if rows:
        found.append(("all rows", float(rows), "with optimizer state, were they held in RAM", "muted"))
    longest = max((size for _, size, *_ in found), default=0.0)
    return [
        Bar(name, 100 * size / longest if longest else 0.0, format_bytes(size), note, color)
        for name, size, note, color in found
    ]


def _limit(limit: Limit) -> Json:
    times = limit.times
    rows = [
        ("disk, reads", times.disk_reads, "at least"),
        ("disk, writes", times.disk_writes, "at least"),
        ("memory", times.memory, "at least"),
        ("measured", limit.seconds, "the model's work included"),
    ]
    longest = max(seconds for _, seconds, _ in rows)
    bars = [
        Bar(
            name,
            100 * seconds / longest,
            _seconds(seconds),
            note,
            "muted" if name == "measured" else "b" if name.startswith(times.binds) else "a",
        )
        for name, seconds, note in rows
        if seconds
    ]
    epochs = "the last epoch" if limit.epochs == 1 else f"{limit.epochs:,} epochs"
    return {
        "bars": bars,
        "text": f"Seconds that the steps of {epochs} took, compared with those that this machine needs "
        f"at least for the rows they read, wrote and moved: the training ran at {limit.share:.0%} of that limit, and "
        f"{times.binds} binds.",
        "machine": rates(limit.machine),
        "disk": limit.machine.disk,
        "is_beyond": limit.share > 1.1,
    }


def _hot_text(facts: Facts) -> str:
    counted = facts.curves
    if not counted:
        return ""
    halves = " and ".join(f"{one.rows_for(0.5):.1%} of the {one.table} rows" for one in counted)
    negatives = facts.option("negatives")
    each = "step" if facts.option("share_negatives") is True else "pair"
    more = (
        f" The {negatives} negatives sampled for each {each} come on top of the item rows and are not counted."
        if negatives
        else ""
    )
    return (
        f"What share of the {max(one.pairs for one in counted):,} saved pairs, held-out ones included, the hottest "
        f"rows take, by part of all rows: half goes to {halves}.{more}"
    )


def _disk(facts: Facts) -> list[Bar]:
    total = sum(facts.disk.values())
    return [
        Bar(name, 100 * facts.disk[key] / total, format_bytes(facts.disk[key]), note, color)
        for key, (color, name, note) in _DISK.items()
        if facts.disk[key]
    ]


def _ages(ages: Ages) -> Json:
    swept, figures = ages.swept, []
    if swept is not None:
        unit = "steps" if ages.rules.clock == "step" else "units of the clock"
        figures = [
            Figure(
                "Rows by age",
                f"Stored rows by the {unit} since an update named them, or set or an import wrote them; each bar "
                "begins at twice the age of the one before.",
                charts.by_age(swept, ages.rules.expire),
            ),
            Figure(
                "Rows by count",
                "Stored rows by the number of updates that named them; 0 are those that were only set or imported.",
                charts.by_count(swept),
            ),
        ]
    return {"table": ages.table, "lines": in_words(ages), "figures": figures, "bars": bars_of(ages)}


# ---- In words


def _option(option: Option) -> tuple[str, str, str]:
    return (
        option.name,
        _plain(option.value),
        "not known to this release" if option.default is UNKNOWN else _plain(option.default),
    )


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "by itself" if value is None else str(value)


def _when(time: datetime | None) -> str:
    return "" if time is None else time.astimezone().strftime("%Y-%m-%d %H:%M")


def _seconds(value: float) -> str:
    return f"{milliseconds(value)} ms" if value < 1 else f"{value:,.1f} s" if value < 600 else f"{value / 60:,.0f} min"


def _size(option: object) -> int:
    """Return the bytes of an option; 0 for None or an invalid size."""
    try:
        return parse_bytes(option) if isinstance(option, (int, str)) else 0
    except (ValueError, TypeError):
        return 0


def _three_digits(value: float) -> float:
    return float(f"{value:.3g}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _has(entry: Json, key: str) -> bool:
    return _is_number(entry.get(key))
