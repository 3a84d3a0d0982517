"""How results of commands stand on the page of measurements: as tables, else as indented text.

Every function `..._lines` takes what the commands of a step returned and gives lines of Markdown.
"""

from __future__ import annotations

import json
import re
import textwrap
from typing import Any, NamedTuple, Sequence

# As crates/lab/tidy/tests/documents.rs has them: prose, and lines of tables and code.
PROSE_COLUMNS = 100
COLUMNS = 120
INDENT = "    "


class Result(NamedTuple):
    """What a command returned: its standard output, and how long it took."""

    command: str
    text: str
    seconds: float


def three_digits(value: float) -> str:
    """Three significant digits, at most three decimals, no exponent: as farpool prints numbers."""
    size = abs(value)
    return f"{value:.{0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3}f}"


def in_steps(value: float, steps: Sequence[tuple[float, str]]) -> str:
    """The value in the first unit that it reaches, else in the last."""
    step, unit = next((it for it in steps if value >= it[0]), steps[-1])
    return f"{three_digits(value / step)} {unit}"


BYTES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))
UNITS: dict[str, Sequence[tuple[float, str]]] = {
    "ns": ((1e6, "ms"), (1e3, "us"), (1, "ns")),
    "bytes": BYTES,
    "bytes/s": [(step, f"{unit}/s") for step, unit in BYTES],
    "ops/s": ((1e6, "M/s"), (1e3, "k/s"), (1, "/s")),
}


def with_unit(value: float | None, unit: str) -> str:
    """A value as `farpool bench` prints it; nothing if there is none."""
    return "" if value is None else in_steps(value, UNITS.get(unit, ((1, unit),)))


def cell(value: Any) -> str:
    """What stands in a cell of a table."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        return f"{value:,.0f}" if float(value).is_integer() else three_digits(value)
    return " ".join(str(value).split()).replace("|", "\\|")


def row_line(cells: Sequence[Any]) -> str:
    """A row of a table; an empty cell is two bars with a blank between."""
    return "|" + "|".join(f" {text} " if text else " " for text in map(cell, cells)) + "|"


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """A table; turned if it would be too wide, and a list if it still is."""
    for head, body in ((header, rows), turned(header, rows)):
        lines = [row_line(head), "|" + "---|" * len(head), *map(row_line, body)]
        if max(map(len, lines)) <= COLUMNS:
            return lines
    lines = []
    for row in rows:
        pairs = [f"{name}: {cell(it)}" for name, it in zip(header, row) if cell(it)]
        lines += item("; ".join(pairs))
    return lines


def turned(
    header: Sequence[str], rows: Sequence[Sequence[Any]]
) -> tuple[list[Any], list[list[Any]]]:
    """The same table with its columns as rows."""
    columns = [list(column) for column in zip(header, *rows)]
    return columns[0], columns[1:]


def wrapped(text: str) -> list[str]:
    """A paragraph."""
    return textwrap.wrap(text, PROSE_COLUMNS, break_long_words=False, break_on_hyphens=False)


def item(text: str) -> list[str]:
    """An item of a list."""
    first, *rest = textwrap.wrap(
        text, PROSE_COLUMNS - 2, break_long_words=False, break_on_hyphens=False
    )
    return [f"- {first}", *(f"  {line}" for line in rest)]


def code(text: str) -> list[str]:
    """Text as it is, indented; lines that are too wide go on in the next one."""
    lines = []
    for line in text.expandtabs().splitlines():
        lines += folded(line.rstrip())
    return [(INDENT + line).rstrip() for line in lines]


def folded(line: str, end: str = "") -> list[str]:
    """A line in pieces that fit into an indented block; `end` closes all but the last."""
    limit = COLUMNS - len(INDENT) - len(end)
    pieces = []
    while len(line) > limit:
        at = line.rfind(" ", len(INDENT) + 1, limit)
        at = at if at > 0 else limit
        pieces.append(line[:at].rstrip() + end)
        line = INDENT + line[at:].lstrip()
    return [*pieces, line]


def blocks(parts: Sequence[list[str]]) -> list[str]:
    """Parts with an empty line between two."""
    lines: list[str] = []
    for part in filter(None, parts):
        lines += [*([""] if lines else []), *part]
    return lines


def objects(results: Sequence[Result]) -> list[dict[str, Any]]:
    """The lines of JSON among what was printed, at least one."""
    lines = [line for it in results for line in it.text.splitlines() if line.startswith("{")]
    if not lines:
        raise ValueError("no line of JSON")
    return [json.loads(line) for line in lines]


def text_lines(results: Sequence[Result]) -> list[str]:
    """What the commands print themselves: Markdown tables as they are, the rest as code."""
    lines = "\n".join(it.text.strip("\n") for it in results).splitlines()
    if not any(lines):
        raise ValueError("nothing was printed")
    parts: list[list[str]] = []
    is_table = None
    for line in lines:
        if is_table != line.startswith("|"):
            is_table = line.startswith("|")
            parts.append([])
        parts[-1].append(line)
    return blocks([as_printed(part) for part in parts])


def as_printed(part: list[str]) -> list[str]:
    """A table that was printed, if it fits, else code."""
    fits = all(line.startswith("|") and len(line) <= COLUMNS for line in part)
    return part if fits else code("\n".join(part).strip("\n"))


def bench_lines(results: Sequence[Result]) -> list[str]:
    """Rows of `farpool bench --json`, and their notes below the table."""
    rows, notes = [], {}
    for row in objects(results):
        value, floor = (with_unit(row[name], row["unit"]) for name in ("value", "floor"))
        rows.append([row["name"], value, floor, row["ratio"], row["bar"], verdict(row)])
        if row.get("note"):
            notes.setdefault(row["note"], []).append(row["name"])
    below = [line for note, names in notes.items() for line in item(f"{', '.join(names)}: {note}")]
    return blocks([table(["what", "value", "floor", "ratio", "bar", "met"], rows), below])


def verdict(row: dict[str, Any]) -> str:
    """Whether a row has met its bar, or why there is no figure."""
    if row["value"] is None:
        return "skipped" if row["met"] is None else "**FAILED**"
    return {True: "yes", False: "no", None: ""}[row["met"]]


def demo_lines(results: Sequence[Result]) -> list[str]:
    """Rows of `farpool demo --json`: every way beside all-local."""
    found = objects(results)
    base = found[0] if found else {}
    header = ["", "redis requests/s", "of local", "GET p50, us", "p99", "Python, s", "of local"]
    return table([*header, "remark"], [demo_row(row, base) for row in found])


def demo_row(row: dict[str, Any], base: dict[str, Any]) -> list[Any]:
    """One row of the demo."""
    rate, python = row.get("requests_per_s"), row.get("python_s")
    of_local = f"{100 * rate / base['requests_per_s']:.0f} %" if rate else ""
    slower = python / base["python_s"] if python and base.get("python_s") else None
    times = [row[it] / 1e3 if row.get(it) else None for it in ("get_p50_ns", "get_p99_ns")]
    reasons = ("skipped", "redis_stopped", "python_stopped", "failed")
    remark = "; ".join(f"{it.replace('_', ' ')}: {row[it]}" for it in reasons if row.get(it))
    if row.get("zram_memory_bytes"):
        remark = f"{with_unit(row['zram_memory_bytes'], 'bytes')} for zram"
    return [row["name"], rate and round(rate), of_local, *times, python, slower, remark]


def rack_lines(results: Sequence[Result]) -> list[str]:
    """The checks of `farpool demo rack --json`."""
    checks = [it for it in objects(results) if it.get("kind") == "check"]
    failed = [it for it in checks if not it["passed"]]
    racks = dict.fromkeys(it["rack"] for it in checks)
    parts = [[f"{len(checks) - len(failed)} of {len(checks)} checks passed."]]
    for rack in racks:
        of_rack = [it for it in checks if it["rack"] == rack]
        parts.append([f"*{rack}*"])
        parts.append([line for it in of_rack for line in item(check_text(it))])
    return blocks(parts)


def check_text(check: dict[str, Any]) -> str:
    """One check, with what was seen."""
    sign = "" if check["passed"] else "**FAILED**: "
    return f"{sign}{check['name']}: {cell(check['seen'])}".rstrip(": ")


def plan_lines(results: Sequence[Result]) -> list[str]:
    """Findings and tables of an answer of `farpool plan --json`."""
    parts: list[list[str]] = []
    for answer in (json.loads(it.text) for it in results):
        parts.append([line for finding in answer["findings"] for line in item(finding)])
        parts += [plan_table(it) for it in answer["tables"].values()]
    return blocks(parts)


def plan_table(answer: dict[str, Any]) -> list[str]:
    """One table of an answer, between its title and its notes; units move there if it is wide."""
    columns, notes = answer["columns"], list(answer["notes"])
    units = {it["title"]: f"{it['title']}, {it['unit']}" for it in columns if it["unit"]}
    header = [it["title"] for it in columns]
    rows = [[row.get(it["name"]) for it in columns] for row in answer["rows"]]
    if len(row_line([units.get(it, it) for it in header])) <= COLUMNS:
        header = [units.get(it, it) for it in header]
    elif units:
        named = [f"{it['title']} ({it['unit']})" for it in columns if it["unit"]]
        notes.append(f"Units: {'; '.join(named)}.")
    below = [line for note in notes for line in item(note)]
    return blocks([[f"*{answer['title']}*"], table(header, rows), below])


def kv_lines(results: Sequence[Result]) -> list[str]:
    """Answers of `farpool kv bench --json`, one for each command."""
    rows = []
    for result, found in zip(results, objects(results)):
        what = result.command.split(" kv bench ")[-1]
        what = re.sub(r"--(json|closed|(client-cpu|server) \S+) ?", "", what)
        latency = found["latency_us"]
        rows.append([f"`{what.strip()}`", round(found["requests_per_s"]), latency["p50"], latency["p99"]])
    return table(["kv bench", "requests/s", "p50, us", "p99, us"], rows)


def took_lines(results: Sequence[Result]) -> list[str]:
    """How long commands took, for those whose time is what counts."""
    return table(["command", "took"], [[f"`{it.command}`", f"{it.seconds:.2f} s"] for it in results])


def test_lines(results: Sequence[Result]) -> list[str]:
    """What tests print, without what the test program says of them."""
    kept = []
    for line in "\n".join(it.text for it in results).splitlines():
        line = re.sub(r"^test \S+ \.\.\. (ok$)?|^---- (?=\S+ stdout ----$)", "", line)
        line = line.replace(" stdout ----", ":")
        if line.strip() and not re.match(NOISE_OF_TESTS, line):
            kept.append(line)
    if not kept:
        raise ValueError("no test printed anything")
    return code("\n".join(kept))


NOISE_OF_TESTS = (
    r"running \d+ test|test result: |successes:$|FARPOOL_SEED=|    [\w:]+$"
)


def no_lines(_results: Sequence[Result]) -> list[str]:
    """For commands that only prepare."""
    return []
