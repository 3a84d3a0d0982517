//! dReDBox (Syrivelis 2017): bandwidth of cores to memory behind one transceiver.
//!
//! A core moves a fixed number of bytes a second as long as the link has room; beyond, all cores
//! share the link. Reads and writes share it, too, as the prototype multiplexes the bus's channels.

use super::{Cell, Lack, Reproduction, errata, left_out};

const MIB: f64 = 1_048_576.0;
/// One core's STREAM copy to remote memory, and how much slower than local that is (Figure 6).
const COPY_MIB_S: f64 = 582.0;
const COPY_PENALTY: f64 = 0.45;
/// The same for scale, which computes once for each two words moved.
const SCALE_PENALTY: f64 = 0.25;
/// The dotted line of Figure 6.
const LINK_MIB_S: f64 = 1280.0;
/// 64 bits a cycle at 156.25 MHz, and the cycles of a round trip.
const CLOCK_HZ: f64 = 156.25e6;
const BYTES_A_CYCLE: f64 = 8.0;
const ROUND_TRIP_CYCLES: f64 = 134.0;
const CORES: u32 = 4;

/// Bandwidth of this many cores to remote memory.
fn remote_mib_s(cores: u32) -> f64 {
    (f64::from(cores) * COPY_MIB_S).min(LINK_MIB_S)
}

/// Computes what the paper's figures say of each other.
pub fn dredbox() -> Reproduction {
    let local = COPY_MIB_S / (1.0 - COPY_PENALTY);
    let cell = |place: &str, name: &str, unit: &str, paper: f64, ours: f64, decimals: i32| {
        Cell::rounded(place, name.into(), unit, paper, ours, decimals)
    };
    let saturated = (1..=CORES).find(|cores| f64::from(*cores) * COPY_MIB_S >= LINK_MIB_S);
    let free = saturated.map_or(CORES, |cores| cores - 1);
    let worst = f64::from(CORES) * local / remote_mib_s(CORES);
    // One operation takes so long that it hides what remote memory adds to copy.
    let (near, far) = (1.0, 1.0 / (1.0 - COPY_PENALTY));
    let operation = ((1.0 - SCALE_PENALTY) * far - near) / SCALE_PENALTY;
    let scale_penalty = 1.0 - (near + operation) / (far + operation);
    let round_trip_ns = ROUND_TRIP_CYCLES / CLOCK_HZ * 1e9;
    let cells = vec![
        cell("section VI", "round trip below", "ns", 1000.0, round_trip_ns, 0)
            .within(0.2)
            .because("printed as below 1 us; 134 cycles of 156.25 MHz, without cable and DRAM"),
        cell("Figure 6", "copy, one core, remote", "MiB/s", COPY_MIB_S, remote_mib_s(1), 0)
            .input("put in"),
        cell("Figure 6", "link", "MiB/s", LINK_MIB_S, BYTES_A_CYCLE * CLOCK_HZ / MIB, 0)
            .within(0.07)
            .because("64 bits at 156.25 MHz are 10 Gbit/s; 1,280 are 10 x 1024 / 8, as if of 2^30"),
        cell("Figure 6", "cores that the link serves in full", "", 2.0, f64::from(free), 0)
            .because("beyond 2 cores the link is the bottleneck: 3 x 582 exceed it"),
        cell("section VIII", "copy, slowdown of one core", "times", 1.8, 1.0 / (1.0 - 0.45), 1)
            .input("1 / (1 - 0.45), the 45 % of section VI as the text has them a second time"),
        cell("section VI", "scale, penalty", "%", 25.0, scale_penalty * 100.0, 0).fitted(
            "an operation for two words takes 1.45 times as long as moving them locally, solved for \
             from this cell",
        ),
        cell("section VI", "four cores, slowdown at worst", "times", 5.0, worst, 1).because(
            "3.3 if local bandwidth grows with the cores as copy's one core has it; the kernels \
             that reach 5 have no printed local bandwidth",
        ),
    ];
    Reproduction {
        source: "Syrivelis and others, A Software-defined Architecture for Rack-scale Memory \
                 Disaggregation (dReDBox), 2017"
            .into(),
        cells,
        errata: errata(&[
            (
                "abstract",
                "a penalty as low as 55 %; section VI has 45 % for copy and 25 % for scale",
            ),
            ("Figure 6", "10 Gbit/s are 1,192 MiB/s; the dotted line is at 1,280, 10 x 1,024 / 8"),
        ]),
        left_out: [
            left_out(
                Lack::NotDerivable,
                &[(
                    "Figure 6",
                    "bars of sum and triad and of local memory are drawn without numbers",
                )],
            ),
            left_out(
                Lack::NothingToCompute,
                &[("Figures 1 to 5", "architecture, controller, table, graph, photograph")],
            ),
        ]
        .concat(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reproduce::Verdict;

    #[test]
    fn a_model_of_cores_and_one_link_gives_the_saturation_and_the_slowdown() {
        let all = dredbox();
        let cell =
            |part: &str| all.cells.iter().find(|cell| cell.name.contains(part)).expect("the cell");
        assert_eq!(cell("cores that the link").verdict, Verdict::Exact);
        assert_eq!(cell("slowdown of one core").verdict, Verdict::Input);
        assert_eq!(cell("copy, one core").verdict, Verdict::Input);
        assert_eq!(cell("scale, penalty").verdict, Verdict::Fitted);
        assert_eq!(cell("at worst").verdict, Verdict::Departs);
        assert!((remote_mib_s(2) - 1164.0).abs() < 1e-9 && remote_mib_s(4) == LINK_MIB_S);
        assert!(all.cells.iter().all(|cell| !cell.why.is_empty()), "{:#?}", all.cells);
    }
}
