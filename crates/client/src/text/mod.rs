//! State as text: [`tree`] shows any part of it in full, [`views`] are the tables of `status` and `top`, and [`status`]
//! is the overview.

pub mod status;
pub mod tree;
pub mod views;

use comfy_table::{CellAlignment, Row, Table, presets};

/// A table without rows; the columns with numbers are aligned to the right.
pub fn table<T: Into<Row>>(header: T, has_numbers: impl Fn(usize) -> bool) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(header);
    for (at, column) in table.column_iter_mut().enumerate() {
        column.set_padding((0, 2));
        if has_numbers(at) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

/// A value, or a dash.
pub fn or_dash(value: Option<impl ToString>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| value.to_string())
}
