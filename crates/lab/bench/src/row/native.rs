//! What Farpool costs where far memory is not needed: starting, execs, builds, and programs that
//! fit into local memory. Each but `start.true`, which is judged by itself, is run with Farpool and
//! without, in turn, and medians are compared.

use super::{Experiment, Lab, MIB, limit, programs};
use crate::BenchError;
use crate::latency::median;
use crate::program::{Program, Workload};
use crate::report::{Bar, Row, Unit};
use crate::stage::{Place, check_interrupted, lacking, progress};
use crate::workload::WorkloadName;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

/// Names of the rows, one for each program.
pub(super) const NAMES: [&str; 9] = [
    "start.true",
    "start.execs",
    "start.make",
    "fits.alloc",
    "fits.mstress",
    "fits.sort",
    "fits.redis",
    "fits.go",
    "fits.java",
];
/// Local memory of programs that are timed as a whole: far more than they need.
const ROOM_BYTES: u64 = 1024 * MIB;
const START_RUNS: usize = 31;
/// Longest start of a program under Farpool, in seconds: people notice 100 ms, and scripts start
/// dozens of programs.
const START_BAR: Bar = Bar::AtMost(0.010);
const RUNS: usize = 7;
const EXECS: &str = "i=0; while [ $i -lt 1000 ]; do /bin/true; i=$((i+1)); done";
const EXECS_BAR: Bar = Bar::AtMost(1.05);
/// Time of a build or of a program that fits, divided by its time without Farpool.
const FITTING_BAR: Bar = Bar::AtMost(1.02);
const FITTING_BYTES: u64 = 256 * MIB;
const BUILT_FILES: usize = 40;
/// Maps of small objects that are made and dropped: the collector runs all the time.
const GO: &str = r#"package main

import "fmt"

type node struct {
	next *node
	data [10]uint64
}

func main() {
	total := uint64(0)
	for round := uint64(0); round < 40; round++ {
		nodes := map[uint64]*node{}
		var last *node
		for i := uint64(0); i < 100000; i++ {
			last = &node{last, [10]uint64{i, round}}
			nodes[i*7] = last
		}
		for key, value := range nodes {
			total += key ^ value.data[0] + value.data[1]
		}
	}
	fmt.Println(total)
}
"#;

pub(super) fn run(lab: &Lab, experiment: &Experiment) -> Result<Vec<Row>, BenchError> {
    let name = experiment.name.as_str();
    let row = match name {
        "start.true" => return Ok(vec![start(lab, name)?]),
        "start.execs" => {
            let shell = words(&["sh", "-c", EXECS]);
            beside(name, EXECS_BAR, |place| whole_seconds(lab, place, &shell))
        }
        "start.make" => {
            let folder = sources(lab)?;
            beside(name, FITTING_BAR, |place| build_seconds(lab, place, &folder))
        }
        "fits.redis" => {
            let redis = Program::Redis(programs::redis(lab, 16, 1));
            let room_bytes = redis.guess_bytes() * 4;
            return beside_in(name, Unit::Nanoseconds, FITTING_BAR, |place| {
                let measured = redis.run(&lab.stage, place.at(room_bytes), room_bytes)?;
                Ok(1e9 / measured.ops_s)
            })
            .map(|row| {
                vec![row.note("for each request of 16 connections; floor: without farpool")]
            });
        }
        "fits.go" => {
            let program = vec![go(lab)?.into_os_string()];
            beside(name, FITTING_BAR, |place| whole_seconds(lab, place, &program))
        }
        "fits.java" => {
            let objects = if lab.quick { "500000" } else { "1500000" };
            let program = limit::java(lab, objects)?;
            beside(name, FITTING_BAR, |place| whole_seconds(lab, place, &program))
        }
        _ => {
            let program = fitting(lab, name);
            beside(name, FITTING_BAR, |place| {
                let (bytes, place) = (program.bytes, place.at(program.bytes * 3));
                let (report, _) = program.run(&lab.stage, place, bytes * 2)?;
                Ok(report.fill_seconds + report.seconds)
            })
        }
    }?;
    Ok(vec![row.note("floor: without farpool")])
}

/// Whether a program runs with Farpool or without.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    With,
    Without,
}

impl Side {
    fn at(self, limit_bytes: u64) -> Place {
        match self {
            Self::With => Place::Shm(limit_bytes),
            Self::Without => Place::Local,
        }
    }
}

fn fitting(lab: &Lab, name: &str) -> Workload {
    let names = [WorkloadName::Alloc, WorkloadName::Mstress];
    let is_this = |it: &WorkloadName| name.ends_with(it.as_str());
    let name = names.into_iter().find(is_this).unwrap_or(WorkloadName::Sort);
    Workload { name, bytes: lab.bytes(FITTING_BYTES), args: &[] }
}

fn start(lab: &Lab, name: &str) -> Result<Row, BenchError> {
    progress(name);
    let program = words(&["true"]);
    let took = |_| whole_seconds(lab, Side::With, &program);
    let took: Vec<f64> = (0..START_RUNS).map(took).collect::<Result<_, _>>()?;
    let row = Row::judged(name, median(&took), Unit::Seconds, START_BAR);
    Ok(row.note("farpool run -- true, from start to end"))
}

fn beside(
    name: &str,
    bar: Bar,
    seconds: impl Fn(Side) -> Result<f64, BenchError>,
) -> Result<Row, BenchError> {
    beside_in(name, Unit::Seconds, bar, seconds)
}

fn beside_in(
    name: &str,
    unit: Unit,
    bar: Bar,
    measure: impl Fn(Side) -> Result<f64, BenchError>,
) -> Result<Row, BenchError> {
    let (mut with, mut without) = (Vec::new(), Vec::new());
    for run in 0..RUNS {
        progress(&format!("{name}: {} of {RUNS}", run + 1));
        without.push(measure(Side::Without)?);
        with.push(measure(Side::With)?);
    }
    Ok(Row::beside(name, median(&with), median(&without), unit, bar))
}

/// Measures a program from start to end, unwatched: sampling the tree takes longer than a short
/// program.
fn whole_seconds(lab: &Lab, side: Side, program: &[OsString]) -> Result<f64, BenchError> {
    check_interrupted()?;
    let mut launch = lab.stage.launch(side.at(ROOM_BYTES), program, ROOM_BYTES)?;
    let command = launch.command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let start = Instant::now();
    let output = command.output().map_err(BenchError::os("start a program"))?;
    let seconds = start.elapsed().as_secs_f64();
    succeeded(program, &output)?;
    Ok(seconds)
}

fn build_seconds(lab: &Lab, side: Side, folder: &Path) -> Result<f64, BenchError> {
    let make = |target: &str| {
        let mut make = words(&["make", "-s", "-C"]);
        make.extend([folder.into(), target.into()]);
        make
    };
    whole_seconds(lab, Side::Without, &make("clean"))?;
    whole_seconds(lab, side, &make("all"))
}

/// Writes sources of a few thousand lines to build, and returns their folder.
fn sources(lab: &Lab) -> Result<PathBuf, BenchError> {
    for tool in ["make", "cc"] {
        if Command::new(tool).arg("--version").output().is_err() {
            return Err(lacking(format!("{tool} is not installed")));
        }
    }
    let folder = lab.stage.folder.join("build");
    let written = std::fs::create_dir_all(&folder).and_then(|()| {
        for file in 0..BUILT_FILES {
            let lines = (0..100).map(|line| {
                format!(
                    "int f{file}_{line}(int a) {{ for (int i = 0; i < {line}; i++) \
                     a += printf(\"%d\", i ^ a); return a; }}\n"
                )
            });
            let text = format!(
                "#include <stdio.h>\n#include \
                <stdlib.h>\n{}",
                lines.collect::<String>()
            );
            std::fs::write(folder.join(format!("part{file}.c")), text)?;
        }
        let rules = "OBJECTS = $(patsubst %.c,%.o,$(wildcard *.c))\nall: $(OBJECTS)\n%.o: \
                     %.c\n\tcc -O1 -c -o $@ $<\n\
                     clean:\n\trm -f *.o\n";
        std::fs::write(folder.join("Makefile"), rules)
    });
    written.map_err(BenchError::os("write sources to build"))?;
    Ok(folder)
}

/// Builds the Go program, linked statically, as Go does by default without cgo.
fn go(lab: &Lab) -> Result<PathBuf, BenchError> {
    let (source, program) =
        (lab.stage.folder.join("collected.go"), lab.stage.folder.join("collected"));
    std::fs::write(&source, GO).map_err(BenchError::os("write the Go program"))?;
    let mut build = Command::new(go_tool());
    build.args(["build", "-o"]).arg(&program).arg(&source).env("CGO_ENABLED", "0");
    build.env("GOCACHE", lab.stage.folder.join("go-cache"));
    let output = build.output().map_err(|_| lacking("go is not installed"))?;
    succeeded(&words(&["go", "build"]), &output)?;
    Ok(program)
}

/// Returns the `go` of an unpacked archive of Go's, or else the one in PATH.
fn go_tool() -> &'static str {
    const UNPACKED: &str = "/usr/local/go/bin/go";
    if Path::new(UNPACKED).exists() { UNPACKED } else { "go" }
}

fn succeeded(program: &[OsString], output: &std::process::Output) -> Result<(), BenchError> {
    if output.status.success() {
        return Ok(());
    }
    let program = program.first().map_or(String::new(), |name| name.to_string_lossy().into_owned());
    let detail = String::from_utf8_lossy(&output.stderr);
    Err(BenchError::Program { program, detail: format!("{}: {}", output.status, detail.trim()) })
}

fn words(words: &[&str]) -> Vec<OsString> {
    words.iter().map(OsString::from).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_program_that_fits_is_another_one() {
        let names = NAMES.iter().filter(|name| name.starts_with("fits."));
        assert_eq!(names.count(), 6);
        assert_eq!(Side::With.at(5), Place::Shm(5));
        assert_eq!(Side::Without.at(5), Place::Local);
    }
}
