#!/usr/bin/env python3
"""Measures, and writes the results into docs/researchers/measurements.md.

A section of that page has at most one block between `<!-- measured: NAME -->` and
`<!-- end of NAME -->`. Only the blocks of the sections asked for are replaced, each as soon as it
is measured: a run that is broken off keeps what it has. A section whose command fails keeps its old
block. Needs `make build`, and an otherwise idle machine for figures worth keeping.

Ends with 1 if a command failed or a section that was named cannot run here, with 2 if it was
called wrongly or the page lacks a block.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Iterator, Sequence

sys.dont_write_bytecode = True
from measurements_list import SECTIONS, Section, Step  # noqa: E402
from measurements_tables import Result, blocks, folded, wrapped, INDENT  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/researchers/measurements.md"
TARGET = ROOT / os.environ.get("CARGO_TARGET_DIR", "target")
FARPOOL = TARGET / "release/farpool"
MARKER = re.compile(r"<!-- (measured:|end of) (\S+) -->")
# A load above this share of the processors is other work that the figures will show.
IDLE_LOAD = 0.25


class Failure(Exception):
    """A command failed; the message names it."""


# The page.


def problems(page: str, names: Sequence[str]) -> list[str]:
    """What is wrong with the blocks of a page that should have these."""
    found: list[str] = []
    wrong: list[str] = []
    is_open = ""
    for number, line in enumerate(page.splitlines(), 1):
        marker = MARKER.fullmatch(line)
        if not marker:
            continue
        kind, name = marker.groups()
        if (kind == "measured:") == bool(is_open) or (is_open and is_open != name):
            wrong.append(f"line {number}: {line} after {is_open or 'the end of a block'}")
        is_open = name if kind == "measured:" else ""
        found += [name] if is_open else []
    wrong += [f"the block {is_open} does not end"] if is_open else []
    wrong += [f"no block for the section {name}" for name in names if name not in found]
    wrong += [f"no section for the block {name}" for name in found if name not in names]
    wrong += [f"two blocks {name}" for name in names if found.count(name) > 1]
    if not wrong and found != list(names):
        wrong.append("the blocks of the page have another order than the sections of the script")
    return wrong


def replaced(page: str, name: str, block: Sequence[str]) -> str:
    """The page with this block's lines instead of the old ones."""
    begin, end = f"<!-- measured: {name} -->\n", f"<!-- end of {name} -->\n"
    before, found_begin, rest = page.partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        raise Failure(f"the page has no block {name} any more")
    return before + begin + "\n" + "\n".join(block) + "\n\n" + end + after


def write(path: Path, text: str) -> None:
    """Writes a file whole or not at all; it keeps its owner and its rights."""
    old = path.stat()
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as new:
        try:
            new.write(text)
            new.flush()
            os.fsync(new.fileno())
            os.fchmod(new.fileno(), old.st_mode & 0o7777)
            os.fchown(new.fileno(), old.st_uid, old.st_gid)
            os.replace(new.name, path)
        except BaseException:
            os.unlink(new.name)
            raise


# The machine.


def field(path: str, name: str) -> str:
    """The value of the first line `name : value` or `name=value` of a file."""
    with contextlib.suppress(OSError):
        for line in Path(path).read_text().splitlines():
            found = re.match(rf"{name}\s*[:=]\s*(.*)", line)
            if found:
                return found[1].strip('" ')
    return ""


def load() -> float:
    """How many threads ran or wanted to, over the last minute."""
    return os.getloadavg()[0]


def machine() -> str:
    """The machine in a line, without its name."""
    memory_kib = int(field("/proc/meminfo", "MemTotal").split()[0])
    return ", ".join(
        (
            field("/proc/cpuinfo", "model name") or f"a processor {os.uname().machine}",
            f"{os.cpu_count()} processors",
            f"{memory_kib / 2**20:.1f} GiB",
            f"Linux {os.uname().release}",
            field("/etc/os-release", "PRETTY_NAME") or "an unknown system",
        )
    )


def git(*words: str) -> str:
    """What git prints, nothing if it fails."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def commit() -> str:
    """As `git describe --always --dirty`, but the page itself, which this writes, may differ."""
    changed = git("status", "--porcelain", "--untracked-files=no", "--", f":(exclude){PAGE}", ":/")
    return (git("describe", "--always") or "unknown") + ("-dirty" if changed else "")


# Commands.


def words_of(command: str) -> list[str]:
    """What to execute for a command as it stands in the list."""
    words = []
    for word in shlex.split(command):
        word = re.sub(r"\$PWD/target\b", lambda _: str(TARGET), word)
        word = re.sub(r"^target\b", lambda _: str(TARGET), word)
        words.append(str(FARPOOL) if word == "farpool" else word)
    return words


def scrubbed(text: str) -> str:
    """The output without colours, and without paths of this machine."""
    text = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text)
    text = text.replace(str(TARGET), "target").replace(f"{ROOT}/", "")
    return re.sub(rf"{re.escape(str(Path.home()))}(?=/)", "~", text)


def run(command: str) -> Result:
    """Runs a command; what it says on its standard error goes to the terminal."""
    began = time.monotonic()
    try:
        done = subprocess.run(words_of(command), cwd=ROOT, stdout=subprocess.PIPE)
    except OSError as error:
        raise Failure(f"{command}: {error.strerror}") from error
    if done.returncode != 0:
        sys.stderr.buffer.write(done.stdout[-2000:])
        raise Failure(f"{command}: ended with {done.returncode}")
    text = scrubbed(done.stdout.decode(errors="replace"))
    return Result(command, text, time.monotonic() - began)


@contextlib.contextmanager
def serving(command: str) -> Iterator[None]:
    """A server that runs meanwhile; it is there once it has printed a line."""
    if not command:
        yield
        return
    server = subprocess.Popen(words_of(command), cwd=ROOT, stdout=subprocess.PIPE)
    assert server.stdout
    try:
        if not server.stdout.readline():
            raise Failure(f"{command}: ended with {server.wait()}")
        yield
    finally:
        server.terminate()
        server.communicate()


def command_lines(step: Step) -> list[str]:
    """The commands of a step as a block of code."""
    lines = [*([f"{step.server} &"] if step.server else []), *step.commands]
    return [INDENT + line for command in lines for line in folded(command, " \\")]


def step_lines(step: Step) -> list[str]:
    """Runs a step: its commands and what they found."""
    with serving(step.server):
        results = []
        for command in step.commands:
            print(f"    {command}", flush=True)
            results.append(run(command))
    try:
        return blocks([command_lines(step), step.lines(results)])
    except (KeyError, TypeError, ValueError) as error:
        raise Failure(f"{step.commands[0]}: its output cannot be read: {error!r}") from error


def missing(section: Section) -> str:
    """Why a section cannot run here; nothing if it can."""
    if section.needs_root and os.geteuid() != 0:
        return "needs root"
    for program in section.programs:
        if not shutil.which(program):
            return f"{program} is not installed (scripts/install-deps.sh test)"
    for file in section.files:
        if not Path(words_of(file)[0] if file.startswith("target/") else ROOT / file).exists():
            return f"{file} is missing (scripts/install-deps.sh test, make build)"
    return ""


# The command line.


def measure(section: Section, heading: str) -> None:
    """Measures a section and replaces its block, in the page as it is then."""
    block = blocks([wrapped(heading), *map(step_lines, section.steps)])
    write(PAGE, replaced(PAGE.read_text(encoding="utf-8"), section.name, block))


def measure_all(sections: Sequence[Section]) -> list[str]:
    """Measures what can run here; returns the sections that failed, with the reason."""
    today, failed = datetime.date.today(), []
    heading = (
        f"Measured on {today.day} {today:%B %Y} at commit {commit()}. {machine()}; load {load():.2f}"
        " when the run began."
    )
    for number, section in enumerate(sections, 1):
        print(f"[{number}/{len(sections)}] {section.name}, about {section.minutes:g} min", flush=True)
        began = time.monotonic()
        try:
            measure(section, heading)
            print(f"    written after {time.monotonic() - began:.0f} s", flush=True)
        except Failure as failure:
            failed.append(f"{section.name}: {failure}")
            print(f"    FAILED, the old block stays: {failure}", flush=True)
    return failed


def show_list() -> None:
    """Prints every section with its time, its needs and its commands."""
    for section in SECTIONS:
        needs = [*(["root"] if section.needs_root else []), *section.programs, *section.files]
        note = f", needs {', '.join(needs)}" if needs else ""
        print(f"{section.name}: about {section.minutes:g} min{note}")
        for step in section.steps:
            print("\n".join(command_lines(step)))
    print(f"all of them: about {sum(it.minutes for it in SECTIONS):.0f} min")


def chosen(names: Sequence[str]) -> list[Section]:
    """The sections of these names, all if there are none; ends the program for unknown ones."""
    known = {section.name: section for section in SECTIONS}
    unknown = [name for name in names if name not in known]
    if unknown:
        stop(f"no section {', '.join(unknown)}; there are: {', '.join(known)}")
    return [section for section in SECTIONS if not names or section.name in names]


def stop(message: str) -> None:
    """Ends the program with 2: nothing was measured."""
    print(f"measurements: {message}", file=sys.stderr)
    sys.exit(2)


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="*", help="which [default: all that can run here]")
    parser.add_argument("--list", action="store_true", help="list the sections, measure nothing")
    parser.add_argument(
        "--check", action="store_true", help="compare page and sections, measure nothing"
    )
    return parser.parse_args()


def ready(names: Sequence[str]) -> tuple[list[Section], list[str]]:
    """The sections that can run here, and those that cannot, with the reason."""
    sections = chosen(names)
    skipped = [f"{it.name}: {missing(it)}" for it in sections if missing(it)]
    return [it for it in sections if not missing(it)], skipped


def main() -> int:
    """The exit status says whether everything that was asked for has been measured."""
    args = arguments()
    os.environ["PATH"] += f":{Path.home()}/.cargo/bin:/usr/sbin:/sbin"
    if args.list:
        show_list()
        return 0
    sections, skipped = ready(args.sections)
    wrong = problems(PAGE.read_text(encoding="utf-8"), [it.name for it in SECTIONS])
    if wrong:
        stop(f"{PAGE.relative_to(ROOT)}: " + "; ".join(wrong))
    if args.check:
        return 0
    if not os.access(FARPOOL, os.X_OK):
        stop("there is no release build: make build")
    if load() > IDLE_LOAD * (os.cpu_count() or 1):
        print(f"measurements: load {load():.2f}: other work will show in the figures", flush=True)
    for line in skipped:
        print(f"skipped {line}", flush=True)
    failed = measure_all(sections)
    for line in failed:
        print(f"FAILED {line}")
    print(f"measurements: {len(sections) - len(failed)} written, {len(failed)} failed,"
          f" {len(skipped)} skipped")
    return 1 if failed or (skipped and args.sections) else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("\nmeasurements: broken off; sections that were written stay")
