//! Whether far memory pays, from data: pools sized from utilisation, servers packed, designs priced.
//!
//! Prices, powers and areas are data files with a date and a source; only formulas are code.
