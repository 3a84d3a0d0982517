#!/usr/bin/env python3
"""Tests of scripts/measurements.py that measure nothing: its page, its tables, its commands."""

from __future__ import annotations

import os
import sys
import tempfile
import unittest
from pathlib import Path

sys.dont_write_bytecode = True
import measurements  # noqa: E402
import measurements_tables as tables  # noqa: E402
from measurements_list import Section, Step  # noqa: E402

PAGE = """# Page

<!-- measured: one -->

old figures

<!-- end of one -->

prose

<!-- measured: two -->
<!-- end of two -->
"""


class Page(unittest.TestCase):
    """Blocks are found, compared with the sections, and replaced."""

    def test_a_block_is_replaced_and_nothing_else(self) -> None:
        page = measurements.replaced(PAGE, "one", ["new", "figures"])
        self.assertEqual(page, PAGE.replace("old figures", "new\nfigures"))
        self.assertEqual(measurements.replaced(page, "one", ["old figures"]), PAGE)
        filled = measurements.replaced(PAGE, "two", ["new"])
        self.assertTrue(filled.endswith("measured: two -->\n\nnew\n\n<!-- end of two -->\n"))

    def test_a_block_that_is_gone_is_an_error(self) -> None:
        with self.assertRaises(measurements.Failure):
            measurements.replaced(PAGE, "three", ["new"])

    def test_page_and_sections_must_agree(self) -> None:
        def found(page: str, *names: str) -> str:
            return "; ".join(measurements.problems(page, names))

        self.assertEqual(found(PAGE, "one", "two"), "")
        self.assertEqual(found(PAGE, "one"), "no section for the block two")
        self.assertIn("no block for the section three", found(PAGE, "one", "two", "three"))
        self.assertIn("another order", found(PAGE, "two", "one"))
        self.assertIn("two blocks one", found(PAGE + PAGE, "one", "two"))
        self.assertIn("does not end", found(PAGE.replace("<!-- end of two -->", ""), "one", "two"))
        self.assertIn("line 11", found(PAGE.replace("<!-- end of one -->", ""), "one", "two"))

    def test_a_file_is_written_with_its_rights(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "page.md")
            path.write_text("old")
            path.chmod(0o640)
            measurements.write(path, "new ▁")
            self.assertEqual(path.read_text(encoding="utf-8"), "new ▁")
            self.assertEqual(path.stat().st_mode & 0o777, 0o640)
            self.assertEqual(os.listdir(folder), ["page.md"])


class Run(unittest.TestCase):
    """Sections that fail leave their block, the others are written."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.addCleanup(setattr, measurements, "PAGE", measurements.PAGE)
        measurements.PAGE = Path(folder.name, "page.md")
        measurements.PAGE.write_text(PAGE)

    def test_what_fails_is_named_and_keeps_its_block(self) -> None:
        one = Section("one", 0, (Step(("echo half",)), Step(("false",))))
        two = Section("two", 0, (Step(("echo whole",)),))
        failed = measurements.measure_all([one, two])
        self.assertEqual(failed, ["one: false: ended with 1"])
        page = measurements.PAGE.read_text()
        self.assertIn("\nold figures\n", page)
        self.assertNotIn("half", page)
        self.assertIn("\n    echo whole\n\n    whole\n", page)
        self.assertEqual(measurements.problems(page, ["one", "two"]), [])

    def test_a_command_without_output_or_a_program_fails(self) -> None:
        silent, absent = Step(("true",)), Step(("no-such-program",))
        for step in (silent, absent, Step(("echo x",), tables.bench_lines)):
            with self.assertRaises(measurements.Failure):
                measurements.step_lines(step)

    def test_paths_of_this_machine_are_not_kept(self) -> None:
        binary, option = measurements.words_of("farpool --to=$PWD/target/x")
        self.assertEqual(Path(binary).name, "farpool")
        self.assertEqual(option, f"--to={measurements.TARGET}/x")
        said = f"\x1b[1m{measurements.TARGET}/x {measurements.ROOT}/docs {Path.home()}/y"
        self.assertEqual(measurements.scrubbed(said), "target/x docs ~/y")


class Tables(unittest.TestCase):
    """Results become Markdown that is not too wide."""

    def test_rows_of_bench_have_units_and_notes(self) -> None:
        row = (
            '{"name":"fault.p50","value":6495.5,"unit":"ns","floor":4334.9,"ratio":1.498,'
            '"bar":"<= 1.3","met":false,"note":"floor: bare fault"}\n'
            '{"name":"gone","value":null,"unit":"s","floor":null,"ratio":null,'
            '"bar":null,"met":null,"note":"no root"}\n'
        )
        lines = tables.bench_lines([tables.Result("bench", row, 1)])
        self.assertIn("| fault.p50 | 6.50 us | 4.33 us | 1.50 | <= 1.3 | no |", lines)
        self.assertIn("| gone | | | | | skipped |", lines)
        self.assertEqual(lines[-2:], ["- fault.p50: floor: bare fault", "- gone: no root"])

    def test_wide_tables_are_turned(self) -> None:
        header = [f"a long name {number}" for number in range(10)]
        lines = tables.table(header, [list(range(10))])
        self.assertEqual(lines[0], "| a long name 0 | 0 |")
        self.assertEqual(lines[2], "| a long name 1 | 1 |")

    def test_printed_tables_stay_and_the_rest_is_code(self) -> None:
        text = "head\n| a |\n|---|\n" + "word " * 40 + "\n"
        lines = tables.text_lines([tables.Result("x", text, 1)])
        self.assertEqual(lines[:5], ["    head", "", "| a |", "|---|", ""])
        self.assertTrue(all(len(line) <= tables.COLUMNS for line in lines))
        self.assertEqual(len(lines), 7)

    def test_of_tests_only_what_they_print_is_kept(self) -> None:
        text = "\nrunning 1 test\ntest a::b ... ok\nfcfs: 0.4\ntest c ... near: 1\n"
        lines = tables.test_lines([tables.Result("x", text + "test result: ok. 1\n", 1)])
        self.assertEqual(lines, ["    fcfs: 0.4", "    near: 1"])


if __name__ == "__main__":
    unittest.main()
