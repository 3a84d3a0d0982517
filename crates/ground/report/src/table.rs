//! Rows under named columns: printed for people, serialised with a name for every value.

use farpool_units::at_most;
use serde::ser::{SerializeMap, SerializeStruct};
use serde::{Serialize, Serializer};

use crate::escape;

/// One value of a row.
#[derive(Clone, Debug, PartialEq)]
pub enum Cell {
    Text(String),
    Whole(i64),
    /// Printed with its column's decimals, serialised in full. If not finite, printed as a dash and
    /// serialised as null.
    Number(f64),
    Flag(bool),
    /// Unknown: printed as a dash, serialised as null.
    Missing,
}

macro_rules! cell_from {
    ($($kind:ty => $make:expr),* $(,)?) => {$(
        impl From<$kind> for Cell {
            fn from(value: $kind) -> Cell {
                $make(value)
            }
        }
    )*};
}

cell_from! {
    &str => |text: &str| Cell::Text(text.to_owned()),
    String => Cell::Text,
    i32 => |whole| Cell::Whole(i64::from(whole)),
    u32 => |whole| Cell::Whole(i64::from(whole)),
    i64 => Cell::Whole,
    // No count of bytes or requests comes near 63 bits.
    u64 => |whole: u64| Cell::Whole(at_most(whole)),
    usize => |whole: usize| Cell::Whole(at_most(whole)),
    f64 => Cell::Number,
    bool => Cell::Flag,
}

impl<T: Into<Cell>> From<Option<T>> for Cell {
    fn from(value: Option<T>) -> Cell {
        value.map_or(Cell::Missing, Into::into)
    }
}

impl Serialize for Cell {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self {
            Cell::Text(text) => to.serialize_str(text),
            Cell::Whole(whole) => to.serialize_i64(*whole),
            Cell::Number(number) if number.is_finite() => to.serialize_f64(*number),
            Cell::Flag(flag) => to.serialize_bool(*flag),
            Cell::Number(_) | Cell::Missing => to.serialize_none(),
        }
    }
}

/// The meaning and the format of a column's values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Column {
    /// The field's name in JSON, in `snake_case`, with its unit last.
    name: String,
    title: String,
    unit: String,
    decimals: usize,
    pub(crate) left: bool,
}

impl Column {
    /// Creates a left-aligned column, for words. Its title is `name` with spaces for underscores,
    /// unless [`Column::title`] sets another.
    pub fn left(name: impl Into<String>) -> Column {
        let name = name.into();
        let title = name.replace('_', " ");
        Column { name, title, unit: String::new(), decimals: 2, left: true }
    }

    /// Creates a right-aligned column, for figures.
    pub fn right(name: impl Into<String>) -> Column {
        Column { left: false, ..Column::left(name) }
    }

    /// Sets the title above it.
    #[must_use]
    pub fn title(self, title: impl Into<String>) -> Column {
        Column { title: title.into(), ..self }
    }

    #[must_use]
    pub fn unit(self, unit: impl Into<String>) -> Column {
        Column { unit: unit.into(), ..self }
    }

    /// Sets the digits after the point of a [`Cell::Number`] [default: 2].
    #[must_use]
    pub fn decimals(self, decimals: usize) -> Column {
        Column { decimals, ..self }
    }

    /// Returns title and unit.
    pub(crate) fn heading(&self) -> String {
        match self.unit.as_str() {
            "" => self.title.clone(),
            unit => format!("{} ({unit})", self.title),
        }
    }

    pub(crate) fn print(&self, cell: &Cell) -> String {
        match cell {
            Cell::Text(text) => text.clone(),
            Cell::Whole(whole) => grouped(&whole.to_string()),
            Cell::Number(number) if number.is_finite() => self.print_number(*number),
            Cell::Flag(flag) => if *flag { "yes" } else { "no" }.into(),
            Cell::Number(_) | Cell::Missing => "-".into(),
        }
    }

    fn print_number(&self, number: f64) -> String {
        let digits = self.decimals;
        let text = format!("{number:.digits$}");
        // A minus zero is only rounding.
        let zero = text.strip_prefix('-').filter(|rest| rest.chars().all(|c| "0.".contains(c)));
        grouped(zero.unwrap_or(&text))
    }
}

impl Serialize for Column {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let mut column = to.serialize_struct("Column", 3)?;
        column.serialize_field("name", &self.name)?;
        column.serialize_field("title", &self.title)?;
        column.serialize_field("unit", &self.unit)?;
        column.end()
    }
}

/// Puts commas between the thousands of a decimal number.
fn grouped(text: &str) -> String {
    let (sign, digits) = text.strip_prefix('-').map_or(("", text), |rest| ("-", rest));
    let (whole, fraction) = digits.split_once('.').map_or((digits, None), |(w, f)| (w, Some(f)));
    let mut out = String::from(sign);
    for (at, digit) in whole.chars().enumerate() {
        if at > 0 && (whole.len() - at).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    if let Some(fraction) = fraction {
        out.push('.');
        out.push_str(fraction);
    }
    out
}

/// Rows under named columns. JSON: `{"title", "columns": [{"name", "title", "unit"}], "rows":
/// [{name: value}]}`.
#[derive(Clone, Debug, PartialEq)]
pub struct Table {
    name: String,
    title: String,
    columns: Vec<Column>,
    rows: Vec<Vec<Cell>>,
    notes: Vec<String>,
}

impl Table {
    /// Creates a table; `name` is its key in JSON, `title` the text above it.
    pub fn new(
        name: impl Into<String>,
        title: impl Into<String>,
        columns: impl IntoIterator<Item = Column>,
    ) -> Table {
        let columns = columns.into_iter().collect();
        let (name, title) = (name.into(), title.into());
        Table { name, title, columns, rows: Vec::new(), notes: Vec::new() }
    }

    /// Adds a row with one cell per column; another number of cells is a programming error and
    /// panics.
    pub fn row(&mut self, cells: impl IntoIterator<Item = Cell>) {
        let cells: Vec<Cell> = cells.into_iter().collect();
        assert_eq!(cells.len(), self.columns.len(), "one cell per column of {}", self.name);
        self.rows.push(cells);
    }

    /// Adds a remark below the table.
    #[must_use]
    pub fn note(mut self, note: impl Into<String>) -> Table {
        self.notes.push(note.into());
        self
    }

    /// True if it has no rows.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn title(&self) -> &str {
        &self.title
    }

    pub(crate) fn columns(&self) -> &[Column] {
        &self.columns
    }

    pub(crate) fn rows(&self) -> &[Vec<Cell>] {
        &self.rows
    }

    pub(crate) fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Renders title, header and rows in columns two spaces apart, then the remarks.
    pub fn text(&self) -> String {
        let header = self.columns.iter().map(Column::heading).collect();
        let print = |row: &Vec<Cell>| -> Vec<String> {
            let cells = self.columns.iter().zip(row);
            cells.map(|(column, cell)| escape::terminal(&column.print(cell))).collect()
        };
        let lines: Vec<Vec<String>> =
            std::iter::once(header).chain(self.rows.iter().map(print)).collect();
        let widest = |at: usize| lines.iter().map(|line| line[at].chars().count()).max();
        let widths: Vec<usize> =
            (0..self.columns.len()).map(|at| widest(at).unwrap_or(0)).collect();
        let mut text = format!("{}\n", escape::terminal(&self.title));
        for line in &lines {
            let cells = line.iter().zip(&widths).zip(&self.columns);
            let padded: Vec<String> = cells
                .map(|((cell, width), column)| match column.left {
                    true => format!("{cell:<width$}"),
                    false => format!("{cell:>width$}"),
                })
                .collect();
            text += padded.join("  ").trim_end();
            text.push('\n');
        }
        for note in &self.notes {
            text += &format!("{}\n", escape::terminal(note));
        }
        text
    }
}

/// A row with the names of its columns.
struct NamedRow<'a>(&'a [Column], &'a [Cell]);

impl Serialize for NamedRow<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let mut row = to.serialize_map(Some(self.0.len()))?;
        for (column, cell) in self.0.iter().zip(self.1) {
            row.serialize_entry(&column.name, cell)?;
        }
        row.end()
    }
}

impl Serialize for Table {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let rows: Vec<NamedRow> =
            self.rows.iter().map(|row| NamedRow(&self.columns, row)).collect();
        let mut table = to.serialize_struct("Table", 4)?;
        table.serialize_field("title", &self.title)?;
        table.serialize_field("columns", &self.columns)?;
        table.serialize_field("rows", &rows)?;
        table.serialize_field("notes", &self.notes)?;
        table.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> Table {
        let columns = [
            Column::left("server"),
            Column::right("memory_gib").title("memory").unit("GiB").decimals(1),
            Column::right("count"),
        ];
        let mut table = Table::new("servers", "Servers", columns).note("prices of 2010");
        table.row(["srvr1".into(), 1234.56.into(), 7.into()]);
        table.row(["x\x1b[2J".into(), f64::NAN.into(), Cell::Missing]);
        table
    }

    #[test]
    fn people_read_columns_that_line_up() {
        let text = example().text();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[1], "server  memory (GiB)  count");
        assert_eq!(lines[2], "srvr1        1,234.6      7");
        assert_eq!(lines[3], "x\u{fffd}[2J              -      -");
        assert_eq!(lines[4], "prices of 2010");
    }

    #[test]
    fn programs_read_names_and_all_digits() {
        let json = serde_json::to_value(example()).expect("JSON");
        assert_eq!(json["rows"][0]["memory_gib"], 1234.56);
        assert_eq!(json["columns"][1]["unit"], "GiB");
        assert!(json["rows"][1]["memory_gib"].is_null() && json["rows"][1]["count"].is_null());
    }

    #[test]
    fn thousands_are_grouped_and_no_zero_is_negative() {
        let print = |number: f64| Column::right("x").decimals(0).print(&number.into());
        assert_eq!(print(999.0), "999");
        assert_eq!(print(-1_000_000.4), "-1,000,000");
        assert_eq!(print(-0.2), "0");
        assert_eq!(Column::right("x").print(&(-123_456).into()), "-123,456");
    }
}
