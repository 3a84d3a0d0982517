//! `farpool sim` as users run it: a trace in, a table, JSON or a page out.

mod common;

use std::path::{Path, PathBuf};

use common::{ended, farpool};

/// A trace of pages that are used cyclically, with some that are used often, imported from a table.
fn make_trace(home: &Path) -> PathBuf {
    let (table, trace) = (home.join("t.csv"), home.join("t.parquet"));
    let row = |n: u64| {
        let page = if n.is_multiple_of(3) { n % 8 } else { n * 7 % 100 };
        format!("{},{page},{}\n", n * 500, n % 2)
    };
    let rows: String = (0..5000).map(row).collect();
    std::fs::write(&table, format!("time,block,write\n{rows}")).expect("the table is written");
    let mut import = farpool(home);
    import.args(["trace", "import", "--format", "csv"]).arg(&table).arg("--out").arg(&trace);
    let (code, printed, error) = ended(&mut import);
    assert_eq!(code, 0, "{error}");
    assert!(printed.starts_with("5000 records in "), "{printed}");
    trace
}

fn sim(home: &Path, words: &[&str]) -> (i32, String, String) {
    ended(farpool(home).arg("sim").args(words))
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a plain path")
}

#[test]
fn designs_are_compared_in_a_table_in_json_and_on_a_page() {
    let home = tempfile::tempdir().expect("a folder");
    let trace = make_trace(home.path());
    let report = home.path().join("r.html");
    let run = ["run", text(&trace), "--design", "ps,fgra,disk", "--local", "75%,50%", "--report"];
    let (code, table, error) = sim(home.path(), &[&run[..], &[text(&report)]].concat());
    assert_eq!(code, 0, "{error}");
    assert!(table.contains("\nps        75%  clock "), "{table}");
    let page = std::fs::read_to_string(&report).expect("the page is written");
    assert!(page.contains("<svg") && page.contains("Where the time goes"), "{}", page.len());
    assert!(!page.contains("http://") && !page.contains("https://"), "it needs nothing else");
    let json = |threads| {
        let words = [&run[..6], &["--json", "--threads", threads]].concat();
        let (code, json, error) = sim(home.path(), &words);
        assert_eq!(code, 0, "{error}");
        let mut json: serde_json::Value = serde_json::from_str(&json).expect("JSON");
        json["provenance"]["command"] = serde_json::Value::Null;
        json
    };
    let one = json("1");
    assert_eq!(one, json("3"), "the same bytes whatever the number of threads");
    let rows = one["result"]["rows"].as_array().expect("rows");
    assert_eq!(rows.len(), 6);
    let slowdown = |at: usize| rows[at]["slowdown_permille"].as_u64().expect("a number");
    // Less local memory is slower, a disk slowest of all.
    assert!(slowdown(0) < slowdown(1) && slowdown(1) < slowdown(5), "{rows:?}");
    let hash = one["provenance"]["inputs"][0]["sha256"].as_str().expect("a hash");
    assert_eq!(hash.len(), 64);
}

#[test]
fn an_experiment_is_a_file() {
    let home = tempfile::tempdir().expect("a folder");
    make_trace(home.path());
    let file = home.path().join("e.toml");
    let text_of = "trace = \"t.parquet\"\nlocal = [\"50%\"]\npolicies = [\"lru\", \"fifo\"]\n\
                   designs = [\"ps\", { base = \"ps\", name = \"slow\", far.link_latency_ps = \
                   50_000_000 }]\n";
    std::fs::write(&file, text_of).expect("the experiment is written");
    let (code, json, error) = sim(home.path(), &["run", text(&file), "--json"]);
    assert_eq!(code, 0, "{error}");
    let json: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    let rows = json["result"]["rows"].as_array().expect("rows");
    let names: Vec<_> = rows.iter().map(|row| row["design"].as_str().expect("a name")).collect();
    assert_eq!(names, ["ps", "ps", "slow", "slow"]);
    let far_ps = |at: usize| rows[at]["outcome"]["far_ps"].as_u64().expect("a number");
    let faults = rows[0]["outcome"]["far_references"].as_u64().expect("a number");
    assert!(far_ps(2) > far_ps(0) + faults * 2 * 49_000_000, "two ways of 50 us for each fault");
}

#[test]
fn a_named_design_is_printed_as_an_experiment_takes_it() {
    let home = tempfile::tempdir().expect("a folder");
    let (code, list, _) = sim(home.path(), &["designs"]);
    assert_eq!(code, 0);
    assert!(list.contains("fgra+migration") && list.contains("Lim 2010, Table 1(a)"), "{list}");
    let (code, design, _) = sim(home.path(), &["designs", "ps"]);
    assert_eq!(code, 0);
    let design: toml::Table = toml::from_str(&design).expect("TOML");
    assert_eq!(design["far"]["software_ps"].as_integer(), Some(330_000));
}

#[test]
fn curves_fall_with_local_memory_and_end_at_the_first_touches() {
    let home = tempfile::tempdir().expect("a folder");
    let trace = make_trace(home.path());
    let words =
        ["mrc", text(&trace), "--policy", "lru,fifo,belady", "--local", "10%,50%,100%", "--json"];
    let (code, json, error) = sim(home.path(), &words);
    assert_eq!(code, 0, "{error}");
    let json: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    let result = &json["result"];
    assert_eq!(result["sizes_pages"], serde_json::json!([10, 50, 100]));
    let misses = |curve: usize, size: usize| {
        result["curves"][curve]["misses"][size].as_u64().expect("an exact count")
    };
    for curve in 0..3 {
        assert!(misses(curve, 0) > misses(curve, 1) && misses(curve, 1) > misses(curve, 2));
        assert_eq!(misses(curve, 2), 100);
        assert!(misses(2, 1) <= misses(curve, 1), "nothing passes Belady's optimum");
    }
    let (code, table, error) = sim(home.path(), &["mrc", text(&trace), "--sample", "0.3"]);
    assert_eq!(code, 0, "{error}");
    assert!(table.contains("SHARDS, 30 % of the pages: mean of 5 samples of"), "{table}");
    for (share, reason) in [("0", "0"), ("1.5", "1.5"), ("NaN", "NaN")] {
        let (code, _, error) = sim(home.path(), &["mrc", text(&trace), "--sample", share]);
        assert_eq!(code, 2, "{error}");
        assert!(error.contains(reason), "{error}");
    }
}

#[test]
fn an_answer_is_made_again_from_the_words_that_it_carries() {
    let home = tempfile::tempdir().expect("a folder");
    let trace = make_trace(home.path());
    for words in [
        &["sim", "run", text(&trace), "--local", "50%", "--policy", "random"][..],
        &["sim", "mrc", text(&trace), "--policy", "lru,w-tinylfu"],
        &["sim", "mrc", text(&trace), "--sample", "0.5"],
        &["sim", "reproduce", "lim", text(&trace)],
        &["plan", "local", text(&trace), "--design", "fgra"],
    ] {
        let page = |name: &str, words: &[&str]| {
            let report = home.path().join(name);
            let mut command = farpool(home.path());
            let (code, json, error) =
                ended(command.args(words).args(["--json", "--report"]).arg(&report));
            assert_eq!(code, 0, "{words:?}: {error}");
            (std::fs::read(&report).expect("a page"), json)
        };
        let (first, json) = page("first.html", words);
        let json: serde_json::Value = serde_json::from_str(&json).expect("JSON");
        let carried = json["provenance"]["command"].as_array().expect("words");
        let carried: Vec<&str> =
            carried.iter().map(|word| word.as_str().expect("a word")).collect();
        assert_eq!(carried, words);
        assert!(page("again.html", &carried).0 == first, "{words:?} gave another page");
    }
}

#[test]
fn a_slowdown_says_how_much_local_memory_it_takes() {
    let home = tempfile::tempdir().expect("a folder");
    let trace = make_trace(home.path());
    let plan = |slowdown: &str| {
        let words =
            ["plan", "local", text(&trace), "--slowdown", slowdown, "--design", "fgra", "--json"];
        let (code, json, error) = ended(farpool(home.path()).args(words));
        assert_eq!(code, 0, "{error}");
        let json: serde_json::Value = serde_json::from_str(&json).expect("JSON");
        let least = &json["result"][0]["least"];
        let number = |name: &str| least[name].as_u64().expect("a number");
        (number("local_pages"), number("slowdown_permille"))
    };
    let (strict, generous) = (plan("3%"), plan("15%"));
    assert!(strict.1 <= 30 && generous.1 <= 150, "{strict:?} {generous:?}");
    assert!(generous.0 < strict.0, "{strict:?} {generous:?}");
    let (code, _, error) =
        ended(farpool(home.path()).args(["plan", "local", "x", "--slowdown", "3"]));
    assert_eq!(code, 2, "{error}");
}

#[test]
fn papers_are_set_beside_what_comes_out_here() {
    let home = tempfile::tempdir().expect("a folder");
    let trace = make_trace(home.path());
    let (code, table, error) = sim(home.path(), &["reproduce", "lim", text(&trace)]);
    assert_eq!(code, 0, "{error}");
    for part in
        ["Table 3", "Table 5", "4.2, Fig. 6(a)", "page swapping beats a disk", "contradicts"]
    {
        assert!(table.contains(part), "{part} is not in\n{table}");
    }
    let (_, table, _) = sim(home.path(), &["reproduce", "lim"]);
    assert!(table.contains("warning: no trace was named"), "{table}");
    let (code, table, _) = sim(home.path(), &["reproduce", "gutierrez"]);
    assert_eq!(code, 0);
    assert!(table.contains("Table 3.3") && table.contains("Table 4.2"), "{table}");
    for paper in ["gutierrez", "acms", "dredbox"] {
        let (code, table, _) = sim(home.path(), &["reproduce", paper]);
        let first = table.lines().next().unwrap_or_default();
        assert!(code == 0 && first.contains("cells are predictions"), "{paper}: {first}");
        assert!(first.contains("test nothing"), "{paper}: {first}");
    }
    let (code, _, error) = sim(home.path(), &["reproduce", "gutierrez", text(&trace)]);
    assert_eq!(code, 2, "{error}");
}

#[test]
fn what_cannot_be_simulated_is_refused_by_name_and_leaves_no_page() {
    let home = tempfile::tempdir().expect("a folder");
    let trace = make_trace(home.path());
    let whole = std::fs::read(&trace).expect("the trace");
    let cut = home.path().join("cut.parquet");
    std::fs::write(&cut, &whole[..whole.len() / 2]).expect("half a trace");
    let report = home.path().join("r.html");
    let (trace, cut, report) = (text(&trace), text(&cut), text(&report));
    let cases: [(&[&str], i32, &str); 7] = [
        (&["run", cut], 1, "cut.parquet: cut short, or not a Parquet file"),
        (&["run", "none.parquet"], 1, "none.parquet: No such file"),
        (&["run", trace, "--design", "pss"], 2, "no design named \"pss\""),
        (&["run", trace, "--local", "0%"], 2, "\"0%\" is not a size of local memory"),
        (&["run", trace, "--policy", "mru"], 2, "no cache policy named \"mru\""),
        (
            &["run", trace, "--memory", "1KiB"],
            1,
            "5000 records take 80000 bytes and 1024 may be used",
        ),
        (&["run", trace, "--page", "1KiB"], 1, "pages of 1024 bytes; the trace has blocks of 4096"),
    ];
    for (words, expected_code, expected) in cases {
        let (code, _, error) = sim(home.path(), &[words, &["--report", report]].concat());
        assert_eq!(code, expected_code, "{words:?}: {error}");
        assert!(error.contains(expected), "{words:?} says {error:?}, without {expected:?}");
    }
    assert!(!Path::new(report).exists());
    // A configuration that does not fit is reported, also by the exit code; the others are
    // simulated.
    let (code, table, _) =
        sim(home.path(), &["run", trace, "--design", "zram,ps", "--local", "20%"]);
    assert_eq!(code, 1);
    assert!(
        table.contains("zram with 20% local was not simulated: 100 pages compressed"),
        "{table}"
    );
    assert!(table.contains("\nps        20%  clock "), "{table}");
}

/// Counts with their words: those of the verdicts that occur, as the page has them.
fn listed(counts: &[(u64, &str, &str)]) -> String {
    let found = counts.iter().filter(|(count, ..)| *count > 0);
    let words = found.map(|(count, one, many)| {
        let word = if *count == 1 { one } else { many };
        format!("{count} {word}")
    });
    words.collect::<Vec<_>>().join(", ")
}

/// What the page of the papers has as the outcome, from the first line of an answer.
fn outcome(first_line: &str) -> String {
    let numbers = first_line.split_ascii_whitespace().filter_map(|word| word.parse().ok());
    let numbers: Vec<u64> = numbers.collect();
    let [predictions, cells, exact, consistent, shape, depart, fitted, input, underivable] =
        numbers[..]
    else {
        panic!("{first_line}");
    };
    let tested = listed(&[
        (exact, "exact", "exact"),
        (consistent, "consistent", "consistent"),
        (shape, "in shape", "in shape"),
        (depart, "departs", "depart"),
    ]);
    let others = listed(&[
        (fitted, "fitted", "fitted"),
        (input, "input", "inputs"),
        (underivable, "not derivable", "not derivable"),
    ]);
    format!("{cells} cells, {predictions} of them predictions: {tested}; {others}")
}

#[test]
fn the_page_of_the_papers_has_the_counts_of_the_answers() {
    let home = tempfile::tempdir().expect("a folder");
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/researchers/reproduce.md");
    let page = std::fs::read_to_string(page).expect("the page");
    let page = page.split_ascii_whitespace().collect::<Vec<_>>().join(" ");
    for paper in ["lim", "gutierrez", "acms", "dredbox"] {
        let (code, printed, error) = sim(home.path(), &["reproduce", paper]);
        assert_eq!(code, 0, "{error}");
        let outcome = outcome(printed.lines().next().expect("a first line"));
        let entry = format!("`farpool sim reproduce {paper}` - what comes out: {outcome} - **");
        let is_there = page.contains(&entry);
        assert!(is_there, "docs/researchers/reproduce.md has not: {entry}");
    }
}
