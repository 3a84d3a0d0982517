//! `farpool plan compare`: two answers of `sim` or `plan` beside each other: what was asked
//! differently, and what came out differently.

use std::collections::{BTreeMap, BTreeSet};

use farpool_report::{Cell, Column, Input, Page, Table};
use serde_json::Value;

use super::{answer_of, give, provenance};
use crate::args::CompareArgs;

pub fn compare(args: &CompareArgs) -> anyhow::Result<u8> {
    let (one, two) = (answer_of(&args.one)?, answer_of(&args.two)?);
    let from = provenance().input(Input::of_file(&args.one)?).input(Input::of_file(&args.two)?);
    let settings = settings(&one, &two);
    let (figures, equal) = figures(&one, &two);
    let (differ, asked) = (figures.rows(), settings.rows());
    let mut page = Page::new("Two answers", from)
        .finding(format!("{differ} values differ and {equal} are equal; {asked} settings differ."));
    if one["title"] != two["title"] {
        page = page.warning(format!(
            "they answer different questions: {} and {}",
            one["title"], two["title"]
        ));
    }
    give(&page.table(settings.table).table(figures.table), &args.answer)
}

/// A table that knows how many rows it has.
struct Counted {
    table: Table,
    rows: usize,
}

impl Counted {
    fn new(name: &str, title: &str, columns: impl IntoIterator<Item = Column>) -> Counted {
        Counted { table: Table::new(name, title, columns), rows: 0 }
    }

    fn row(&mut self, cells: impl IntoIterator<Item = Cell>) {
        self.table.row(cells);
        self.rows += 1;
    }

    fn rows(&self) -> usize {
        self.rows
    }
}

/// What was asked, and of which files.
fn settings(one: &Value, two: &Value) -> Counted {
    let columns = [Column::left("setting"), Column::left("first"), Column::left("second")];
    let mut table = Counted::new("settings", "Asked differently", columns);
    let all = |answer: &Value| -> BTreeMap<String, Value> {
        let from = &answer["provenance"];
        let parameters = from["parameters"].as_object().into_iter().flatten();
        let parameters = parameters.map(|(name, value)| (name.clone(), value.clone()));
        let version = ("version".to_owned(), from["version"].clone());
        let inputs = from["inputs"].as_array().into_iter().flatten().enumerate();
        let inputs = inputs.map(|(at, it)| (format!("input {}", at + 1), it["sha256"].clone()));
        parameters.chain([version]).chain(inputs).collect()
    };
    let (one, two) = (all(one), all(two));
    let names: BTreeSet<&String> = one.keys().chain(two.keys()).collect();
    for name in names {
        let (first, second) = (one.get(name), two.get(name));
        if !are_equal(first, second) {
            let [first, second] =
                [first, second].map(|value| value.map_or_else(|| "-".to_owned(), plain));
            table.row([name.clone().into(), first.into(), second.into()]);
        }
    }
    table
}

/// Whether two values are the same; 1 and 1.0 are.
fn are_equal(first: Option<&Value>, second: Option<&Value>) -> bool {
    let is_float = |value: Option<&Value>| value.is_some_and(Value::is_f64);
    if is_float(first) || is_float(second) {
        let number = |value: Option<&Value>| value.and_then(Value::as_f64);
        return number(first) == number(second);
    }
    // Whole numbers are compared exactly: a float cannot hold all of them.
    first == second
}

/// What tables hold differently, rows that one answer alone has included; and how many values are
/// equal.
fn figures(one: &Value, two: &Value) -> (Counted, usize) {
    let columns = [
        Column::left("table"),
        Column::left("row"),
        Column::left("figure"),
        Column::right("first").decimals(3),
        Column::right("second").decimals(3),
        Column::right("change").unit("%").decimals(1),
    ];
    let (mut table, mut equal) = (Counted::new("figures", "Came out differently", columns), 0);
    let (one, two) = (values(one, two), values(two, one));
    let places: BTreeSet<&Place> = one.keys().chain(two.keys()).collect();
    for place in places {
        let (first, second) = (one.get(place), two.get(place));
        if are_equal(first, second) {
            equal += usize::from(place.figure.is_some());
            continue;
        }
        let number = |value: Option<&Value>| value.and_then(Value::as_f64);
        let change = number(first).zip(number(second)).filter(|(first, _)| *first != 0.0);
        let change = change.map(|(first, second)| (second / first - 1.0) * 100.0);
        let Place { table: name, row, figure } = place.clone();
        table.row([
            name.into(),
            row.into(),
            figure.unwrap_or_else(|| "the row itself".to_owned()).into(),
            cell(first),
            cell(second),
            change.into(),
        ]);
    }
    (table, equal)
}

fn cell(value: Option<&Value>) -> Cell {
    match value {
        None | Some(Value::Null) => Cell::Missing,
        Some(Value::Bool(flag)) => (*flag).into(),
        Some(value) => value.as_f64().map_or_else(|| plain(value).into(), Cell::from),
    }
}

/// Where a value is; the row itself has no figure. Rows of one name are numbered.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    table: String,
    row: String,
    figure: Option<String>,
}

/// The values of an answer. Rows have the same names in both answers.
fn values(answer: &Value, other: &Value) -> BTreeMap<Place, Value> {
    let mut found = BTreeMap::new();
    for (table, content) in answer["tables"].as_object().into_iter().flatten() {
        let rows = rows_of(content);
        let columns: Vec<&str> = columns(content).collect();
        let all: Vec<&Value> = [&rows[..], &rows_of(&other["tables"][table])].concat();
        let names = naming(&columns, &all);
        let mut known: BTreeMap<String, u64> = BTreeMap::new();
        for row in rows {
            let words = names.iter().map(|name| match &row[name] {
                Value::String(word) => word.clone(),
                Value::Null => "-".to_owned(),
                value => format!("{name} {}", plain(value)),
            });
            let name = words.collect::<Vec<_>>().join(", ");
            let count = known.entry(name.clone()).or_insert(0);
            *count += 1;
            let name = if *count == 1 { name } else { format!("{name} ({count})") };
            let place = |figure: Option<&str>| {
                let (table, row) = (table.clone(), name.clone());
                Place { table, row, figure: figure.map(str::to_owned) }
            };
            found.insert(place(None), Value::Bool(true));
            for figure in columns.iter().filter(|name| !names.contains(name)) {
                if !row[figure].is_null() {
                    found.insert(place(Some(figure)), row[figure].clone());
                }
            }
        }
    }
    found
}

fn rows_of(table: &Value) -> Vec<&Value> {
    table["rows"].as_array().into_iter().flatten().collect()
}

/// Returns the columns that name a row: those of words before the first that holds something else;
/// a word may be missing in some rows. If there are none, or no others, it is the first.
fn naming<'a>(columns: &[&'a str], rows: &[&Value]) -> Vec<&'a str> {
    let is_words = |name: &&&str| {
        let mut values = rows.iter().map(|row| &row[**name]);
        values.clone().any(Value::is_string)
            && values.all(|value| value.is_string() || value.is_null())
    };
    let names: Vec<&str> = columns.iter().take_while(is_words).copied().collect();
    match names.is_empty() || names.len() == columns.len() {
        true => columns.iter().take(1).copied().collect(),
        false => names,
    }
}

/// The names of a table's columns, in their order.
fn columns(table: &Value) -> impl Iterator<Item = &str> {
    let columns = table["columns"].as_array().into_iter().flatten();
    columns.filter_map(|column| column["name"].as_str())
}

fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn answer(columns: &[&str], rows: &Value) -> Value {
        let columns: Vec<Value> = columns.iter().map(|name| json!({"name": name})).collect();
        json!({"tables": {"t": {"columns": columns, "rows": rows}}})
    }

    /// The places that differ, as text.
    fn told(columns: &[&str], one: &Value, two: &Value) -> (String, usize) {
        let (found, equal) = figures(&answer(columns, one), &answer(columns, two));
        (found.table.text(), equal)
    }

    #[test]
    fn rows_that_one_answer_alone_has_are_shown_on_either_side() {
        let both = json!({"name": "both", "n": 1, "verdict": "exact"});
        let one = json!({"name": "one", "n": 2, "verdict": "exact"});
        let two = json!({"name": "two", "n": null, "verdict": "departs"});
        let columns = ["name", "n", "verdict"];
        let (text, equal) = told(&columns, &json!([both, one]), &json!([both, two]));
        assert_eq!(equal, 2, "{text}");
        let rows: Vec<Vec<&str>> =
            text.lines().skip(2).map(|line| line.split_whitespace().collect()).collect();
        for row in [
            vec!["t", "one", "the", "row", "itself", "yes", "-", "-"],
            vec!["t", "one", "n", "2.000", "-", "-"],
            vec!["t", "one", "verdict", "exact", "-", "-"],
            vec!["t", "two", "the", "row", "itself", "-", "yes", "-"],
            vec!["t", "two", "verdict", "-", "departs", "-"],
        ] {
            assert!(rows.contains(&row), "{row:?} in {text}");
        }
        assert_eq!(rows.len(), 5, "{text}");
    }

    #[test]
    fn rows_of_words_alone_of_one_name_or_without_a_name_are_compared() {
        let words = ["setting", "value"];
        let one = json!([{"setting": "a", "value": "x"}]);
        let (text, equal) = told(&words, &one, &json!([{"setting": "a", "value": "y"}]));
        assert!(text.contains("value") && text.contains('x') && text.contains('y'), "{text}");
        assert_eq!((equal, text.lines().count()), (0, 3), "{text}");
        let figures = ["name", "n"];
        let one = json!([{"name": "a", "n": 1}, {"name": "a", "n": 2}]);
        let (text, equal) = told(&figures, &one, &json!([{"name": "a", "n": 1}]));
        assert!(text.contains("a (2)") && equal == 1, "{text}");
        let bare = ["vms", "ratio"];
        let one = json!([{"vms": 1, "ratio": 0.5}, {"vms": 2, "ratio": 0.4}]);
        let (text, _) = told(&bare, &one, &json!([{"vms": 1, "ratio": 0.5}]));
        assert!(text.contains("vms 2") && text.contains("0.400"), "{text}");
    }

    #[test]
    fn a_row_has_the_same_name_in_both_answers_and_a_number_one_value() {
        let columns = ["name", "far", "n"];
        let one = json!([{"name": "a", "far": "tcp", "n": 1}, {"name": "b", "far": null, "n": 2}]);
        let two = json!([{"name": "a", "far": "tcp", "n": 1.0}]);
        let (text, equal) = told(&columns, &one, &two);
        assert!(text.contains("b, -") && !text.contains("a, tcp"), "{text}");
        assert_eq!(equal, 1, "{text}");
        let is_same = |one: Value, two: Value| are_equal(Some(&one), Some(&two));
        assert!(is_same(json!(1), json!(1.0)) && !is_same(json!(1), json!(1.5)));
        assert!(!is_same(json!(u64::MAX), json!(u64::MAX - 1)), "a float would hide it");
        assert!(!is_same(json!("1"), json!(1)) && !is_same(json!(null), json!(0.0)));
        assert!(!are_equal(None, Some(&json!("x"))) && are_equal(None, None));
        let asked = |value: Value| json!({"provenance": {"parameters": {"local": value}}});
        assert_eq!(settings(&asked(json!(1)), &asked(json!(1.0))).rows(), 0);
        assert_eq!(settings(&asked(json!(1)), &asked(json!(2))).rows(), 1);
    }
}
