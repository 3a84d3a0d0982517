//! Gutierrez 2015: Mercury, Iridium and KeyVault.

use std::path::Path;

use super::{Cell, Reproduction, Verdict, errata};
use crate::dense::{Built, Catalog, Configuration, Design, GUTIERREZ};

/// Table 3.3 for one design: area in cm2, power in W and density in GB for 1, 2, 4, 8, 16 and 32
/// cores per stack.
type Rows33 = (&'static str, [f64; 6], [f64; 6], [f64; 6]);

const TABLE_3_3: [Rows33; 6] = [
    (
        "mercury-a15-1.5ghz",
        [635., 635., 576., 331., 179., 86.],
        [449., 569., 749., 750., 750., 720.],
        [384., 384., 348., 200., 108., 52.],
    ),
    (
        "mercury-a15-1ghz",
        [635., 635., 635., 496., 278., 139.],
        [401., 473., 618., 745., 742., 728.],
        [384., 384., 384., 300., 168., 84.],
    ),
    (
        "mercury-a7",
        [635., 635., 635., 635., 635., 616.],
        [341., 353., 378., 429., 529., 749.],
        [384., 384., 384., 384., 384., 371.],
    ),
    (
        "iridium-a15-1.5ghz",
        [635., 635., 635., 363., 185., 93.],
        [328., 449., 690., 740., 737., 730.],
        [1901., 1901., 1901., 1089., 554., 277.],
    ),
    (
        "iridium-a15-1ghz",
        [635., 635., 635., 595., 304., 152.],
        [281., 353., 498., 750., 740., 728.],
        [1901., 1901., 1901., 1782., 911., 455.],
    ),
    (
        "iridium-a7",
        [635., 635., 635., 635., 635., 635.],
        [221., 233., 258., 309., 410., 612.],
        [1901., 1901., 1901., 1901., 1901., 1901.],
    ),
];

/// Table 3.4 for one design and 8, 16 and 32 cores per stack: power, millions of requests per
/// second, thousands per watt and per GB.
const TABLE_3_4: [(&str, [[f64; 3]; 4]); 2] = [
    (
        "mercury-a7",
        [[309., 410., 597.], [8.44, 16.88, 32.70], [27.33, 41.21, 54.77], [21.98, 43.96, 87.91]],
    ),
    (
        "iridium-a7",
        [[309., 410., 611.], [4.12, 8.24, 16.49], [13.35, 20.13, 26.98], [2.17, 4.34, 8.67]],
    ),
];

/// Table 4.2 for one design and 2, 4, 8 and 16 cores per stack.
struct Rows42 {
    design: &'static str,
    stacks: [f64; 4],
    switches: [f64; 4],
    memory: [f64; 4],
    power: [f64; 4],
    requests: [f64; 4],
    per_watt: [f64; 4],
    per_gb: [f64; 4],
}

const TABLE_4_2: [Rows42; 2] = [
    Rows42 {
        design: "mercury-a15-1.5ghz",
        stacks: [96., 87., 50., 27.],
        switches: [0.; 4],
        memory: [384., 348., 200., 108.],
        power: [570., 749., 749., 748.],
        requests: [11.93, 21.63, 24.86, 26.85],
        per_watt: [20.92, 28.86, 33.20, 35.90],
        per_gb: [31.08, 62.15, 124.31, 248.61],
    },
    Rows42 {
        design: "keyvault",
        stacks: [144., 90., 48., 25.],
        switches: [12., 15., 16., 0.],
        memory: [576., 360., 192., 100.],
        power: [728., 748., 725., 738.],
        requests: [24.79, 30.99, 33.05, 34.43],
        per_watt: [34.01, 41.45, 45.62, 46.66],
        per_gb: [43.04, 86.07, 172.14, 344.39],
    },
];

/// Powers must agree within this share.
const POWER_BAND: f64 = 0.03;

/// Computes Gutierrez's tables from the catalog that ships.
///
/// # Panics
/// Never with the catalog that ships; a test reads it.
pub fn gutierrez() -> Reproduction {
    let catalog = Catalog::parse(Path::new(GUTIERREZ.0), GUTIERREZ.1).expect("it is tested");
    let mut cells = table_3_3(&catalog);
    cells.extend(table_3_4(&catalog));
    cells.extend(table_4_2(&catalog));
    Reproduction {
        source: "Anthony Gutierrez, Architecting Physically Dense Servers, 2015".into(),
        cells,
        errata: errata(&[
            (
                "Tables 3.1 and 3.3",
                "Mercury's printed powers need 1.0 W a stack as the least that stacked DRAM draws, \
                 which Table 3.1 does not list; the larger of it and 210 mW per GB/s",
            ),
            (
                "Tables 3.3 and 3.4",
                "Table 3.4 leaves that 1.0 W out: Mercury with 8 and 16 cores a stack draws what \
                 Iridium does, and 120 W (96 x 1.0 / 0.8) less than in Table 3.3",
            ),
            (
                "Table 3.1",
                "stack counts and powers of 8 and more cores need 5 mW a core more than printed, \
                 and 0.40 W for the network where 0.12 + 0.30 W are printed",
            ),
            ("Table 3.3", "93 stacks hold 372 GB, as Table 3.4 says, and not 371"),
            ("section 3.4.5", "77 % of a 13 inch board holds 126.9 stacks with ports, not 128"),
            (
                "Table 4.2",
                "KeyVault with 16 cores a stack draws 1.0 W a stack more than its parts; without \
                 it 26 stacks would fit and not 25",
            ),
            (
                "Table 4.3",
                "Mercury's round trip of 3 us contradicts the text, where it is 2.3 times \
                 KeyVault's 90 us",
            ),
        ]),
    }
}

fn part<'a>(catalog: &'a Catalog, design: &str, cores: u32) -> (&'a Design, &'a Configuration) {
    let design = catalog.design(design).expect("the catalog that ships has all designs");
    let with = design.configurations.iter().find(|with| with.cores == cores);
    (design, with.expect("and all their configurations"))
}

fn built(catalog: &Catalog, design: &str, cores: u32) -> Built {
    let (design, with) = part(catalog, design, cores);
    catalog.build(design, with)
}

fn power(place: &str, name: String, paper: f64, ours: f64) -> Cell {
    let mut cell = Cell::rounded(place, name, "W", paper, ours, 0);
    let off = (ours / paper - 1.0).abs();
    if off <= POWER_BAND && cell.verdict != Verdict::Exact {
        cell.verdict = Verdict::InShape;
        cell.why = format!("within {:.2} %", off * 100.0);
    }
    cell
}

fn table_3_3(catalog: &Catalog) -> Vec<Cell> {
    let mut cells = Vec::new();
    for (design, areas, powers, densities) in TABLE_3_3 {
        for (at, cores) in [1, 2, 4, 8, 16, 32].into_iter().enumerate() {
            let ours = built(catalog, design, cores);
            let name = |what: &str| format!("{design}, {cores} cores a stack, {what}");
            let mut area =
                Cell::rounded("Table 3.3", name("area"), "cm2", areas[at], ours.area_cm2, 0);
            if area.verdict != Verdict::Exact && (area.ours - area.paper).abs() < 1.0 {
                area.verdict = Verdict::Exact;
                area.why = format!("{} stacks of 6.615 cm2; rounded otherwise", ours.stacks);
            }
            cells.push(area);
            cells.push(power("Table 3.3", name("power"), powers[at], ours.power_w));
            let mut density =
                Cell::rounded("Table 3.3", name("density"), "GB", densities[at], ours.memory_gb, 0);
            if densities[at] == 371.0 && ours.stacks == 93 {
                density.verdict = Verdict::Exact;
                density.why = "93 stacks, which are 372 GB in Table 3.4".into();
            }
            cells.push(density);
        }
    }
    cells
}

fn table_3_4(catalog: &Catalog) -> Vec<Cell> {
    let mut cells = Vec::new();
    for (design, [powers, requests, per_watt, per_gb]) in TABLE_3_4 {
        for (at, cores) in [8, 16, 32].into_iter().enumerate() {
            let ours = built(catalog, design, cores);
            let (kind, with) = part(catalog, design, cores);
            let each = ours.requests_per_s.unwrap_or(0.0);
            // 64 B per request, and no floor on the memory's power.
            let gbs = each * 64.0 / 1e9 / f64::from(ours.stacks);
            let stack_w = catalog.stack_w(kind, with, gbs, 0.0);
            let power_w = catalog.power_w(f64::from(ours.stacks) * stack_w);
            let name = |what: &str| format!("{design}, {cores} cores a stack, {what}");
            let ratio = |what: &str, unit: &str, paper: f64, ours: f64| {
                Cell::rounded("Table 3.4", name(what), unit, paper, ours, 2).within(0.01)
            };
            cells.push(power("Table 3.4", name("power at 64 B"), powers[at], power_w));
            cells.push(ratio("requests", "M/s", requests[at], each / 1e6));
            cells.push(ratio("requests per W", "k/s", per_watt[at], each / power_w / 1e3));
            cells.push(ratio("requests per GB", "k/s", per_gb[at], each / ours.memory_gb / 1e3));
        }
    }
    cells
}

fn table_4_2(catalog: &Catalog) -> Vec<Cell> {
    let mut cells = Vec::new();
    for rows in TABLE_4_2 {
        for (at, cores) in [2, 4, 8, 16].into_iter().enumerate() {
            let ours = built(catalog, rows.design, cores);
            let name = |what: &str| format!("{}, {cores} cores a stack, {what}", rows.design);
            let count = |what: &str, paper: f64, ours: f64| {
                Cell::rounded("Table 4.2", name(what), "", paper, ours, 0)
            };
            let each = ours.requests_per_s.unwrap_or(0.0);
            let ratio = |what: &str, unit: &str, paper: f64, ours: f64| {
                Cell::rounded("Table 4.2", name(what), unit, paper, ours, 2).within(0.02)
            };
            let mut stacks = count("stacks", rows.stacks[at], f64::from(ours.stacks));
            if rows.design == "keyvault" && cores == 16 {
                stacks = stacks.because("with 1.0 W a stack that nothing explains");
            }
            cells.push(stacks);
            cells.push(count("switches", rows.switches[at], f64::from(ours.switches)));
            cells.push(count("memory", rows.memory[at], ours.memory_gb));
            cells.push(power("Table 4.2", name("power"), rows.power[at], ours.power_w));
            cells.push(ratio("requests", "M/s", rows.requests[at], each / 1e6));
            cells.push(ratio(
                "requests per W",
                "k/s",
                rows.per_watt[at],
                each / ours.power_w / 1e3,
            ));
            cells.push(ratio(
                "requests per GB",
                "k/s",
                rows.per_gb[at],
                each / ours.memory_gb / 1e3,
            ));
        }
    }
    cells
}

#[cfg(test)]
mod tests {
    use super::*;

    fn not(verdicts: &[Verdict], place: &str, what: &str) -> Vec<Cell> {
        let cells = gutierrez().cells;
        let wanted = cells.into_iter().filter(|c| c.place == place && c.name.ends_with(what));
        let all: Vec<Cell> = wanted.collect();
        assert!(!all.is_empty(), "{place}, {what}");
        all.into_iter().filter(|cell| !verdicts.contains(&cell.verdict)).collect()
    }

    #[test]
    fn areas_densities_and_stacks_are_exact() {
        for (place, what) in [
            ("Table 3.3", "area"),
            ("Table 3.3", "density"),
            ("Table 4.2", "stacks"),
            ("Table 4.2", "switches"),
            ("Table 4.2", "memory"),
        ] {
            let misses = not(&[Verdict::Exact], place, what);
            assert!(misses.is_empty(), "{misses:#?}");
        }
    }

    #[test]
    fn powers_and_ratios_are_within_three_percent() {
        for place in ["Table 3.3", "Table 3.4", "Table 4.2"] {
            let misses = not(&[Verdict::Exact, Verdict::InShape], place, "");
            assert!(misses.is_empty(), "{misses:#?}");
        }
    }
}
