//! The designs that have a name. Lim's are from his thesis, 4.1.2 and Table 1(a); the others are
//! today's interfaces with published figures. Local latency is printed nowhere in the thesis; 60 ns
//! is assumed.

use super::{CriticalBlock, Design, LoadPoint, Migration, Overflow, Placement, Tier, Unit};

/// A named design.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Preset {
    /// Everything local: the reference for the others.
    Local,
    /// Lim's page swapping.
    Ps,
    /// Page swapping with critical-block-first, as the thesis counts it.
    PsCbf,
    /// The same, but references to lines still on their way wait.
    PsCbfWaits,
    /// Page swapping with the trap that Lim's prototype in Xen measured.
    PsXen,
    /// Lim's fine-grained remote access over a coherent link.
    Fgra,
    /// Fine-grained access where new pages are local and others are evicted for them.
    FgraEvict,
    /// Fine-grained access with page migration.
    FgraMigration,
    /// Fine-grained access tunnelled over PCIe.
    FgraPcie,
    /// Paging to a disk.
    Disk,
    /// Compressed local memory.
    Zram,
    /// Swap on NVMe flash.
    Nvme,
    /// Memory behind CXL, directly attached.
    CxlDirect,
    /// Memory behind a CXL switch.
    CxlSwitched,
    /// Page swapping over RDMA, 100 Gb/s.
    Rdma,
    /// Farpool's pager over TCP, 25 Gb/s.
    Tcp,
    /// A blade as in `Ps` whose overflow is flash.
    PsFlash,
}

const NS: u64 = 1_000;
const US: u64 = 1_000_000;
const MS: u64 = 1_000_000_000;
const GB: u64 = 1_000_000_000;
const MB: u64 = 1_000_000;

/// Assumed for every design: the thesis does not print it.
const LOCAL_LATENCY_PS: u64 = 60 * NS;
/// Frames kept free for incoming pages: 1 MiB.
const FREE_FRAMES: u32 = 256;

impl Preset {
    /// All presets, in the order of their declaration.
    pub const ALL: [Self; 17] = [
        Self::Local,
        Self::Ps,
        Self::PsCbf,
        Self::PsCbfWaits,
        Self::PsXen,
        Self::Fgra,
        Self::FgraEvict,
        Self::FgraMigration,
        Self::FgraPcie,
        Self::Disk,
        Self::Zram,
        Self::Nvme,
        Self::CxlDirect,
        Self::CxlSwitched,
        Self::Rdma,
        Self::Tcp,
        Self::PsFlash,
    ];

    /// Its name on the command line and in experiments.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Local => "local",
            Self::Ps => "ps",
            Self::PsCbf => "ps+cbf",
            Self::PsCbfWaits => "ps+cbf-waits",
            Self::PsXen => "ps-xen",
            Self::Fgra => "fgra",
            Self::FgraEvict => "fgra-evict",
            Self::FgraMigration => "fgra+migration",
            Self::FgraPcie => "fgra-pcie",
            Self::Disk => "disk",
            Self::Zram => "zram",
            Self::Nvme => "nvme",
            Self::CxlDirect => "cxl",
            Self::CxlSwitched => "cxl-switch",
            Self::Rdma => "rdma",
            Self::Tcp => "tcp",
            Self::PsFlash => "ps+flash",
        }
    }

    /// Where its figures are from.
    #[must_use]
    pub fn source(self) -> &'static str {
        match self {
            Self::Local => "60 ns assumed for local memory",
            Self::Ps => "Lim 2010, Table 1(a): PCIe 2.0 x2, trap 330 ns",
            Self::PsCbf => {
                "Lim 2010, Table 1(a) and 6.3: first block after 0.75 us, the rest is hidden"
            }
            Self::PsCbfWaits => "as ps+cbf; other lines of the page are waited for until they come",
            Self::PsXen => "Lim 2010, section 5.4: as ps, with the prototype's trap of 12 us",
            Self::Fgra => "Lim 2010, Table 1(a): HyperTransport, 60 ns, 4 GB/s",
            Self::FgraEvict => "as fgra; new pages as in 4.1.2",
            Self::FgraMigration => "Lim 2010, 4.6.1: every 10 ms; 330 ns for a page assumed",
            Self::FgraPcie => "Lim 2010, 4.6.2: the link of ps",
            Self::Disk => "Lim 2010, 4.1.2: 8 ms, 50 MB/s",
            Self::Zram => "this project: swap-in from zram 3 us, Linux 6.18; ratio 3 assumed",
            Self::Nvme => "80 us a random 4 KiB read through the swap path, 3 GB/s; assumed",
            Self::CxlDirect => {
                "+110 ns over local (60 % more latency on off-the-shelf CXL); load curve after Mess"
            }
            Self::CxlSwitched => {
                "as cxl, and 70 ns more each way through a switch; load curve after Mess"
            }
            Self::Rdma => {
                "Leap: 4.3 us for 4 KiB on the wire at 100 Gb/s; fault 3.5 us as pager measured"
            }
            Self::Tcp => "this project: fault and ping-pong over TCP 22 us in all; 25 Gb/s",
            Self::PsFlash => "as ps; flash 80 us, 3 GB/s; the blade holds half of the footprint",
        }
    }

    /// The design.
    #[must_use]
    pub fn design(self) -> Design {
        let design = base(self);
        match self {
            Self::Local => Design { is_all_local: true, ..design },
            Self::Ps => design,
            Self::PsCbf | Self::PsCbfWaits => Design {
                critical_block: Some(CriticalBlock {
                    first_ps: 750 * NS,
                    others_wait: self == Self::PsCbfWaits,
                }),
                ..design
            },
            Self::PsXen => Design { far: Tier { software_ps: 12 * US, ..pcie() }, ..design },
            Self::Fgra => lines(design, hyper_transport()),
            Self::FgraEvict => {
                Design { placement: Placement::Local, ..lines(design, hyper_transport()) }
            }
            Self::FgraMigration => Design {
                migration: Some(Migration {
                    epoch_ps: 10 * MS,
                    page_ps: 330 * NS,
                    min_references: 2,
                }),
                ..lines(design, hyper_transport())
            },
            Self::FgraPcie => lines(design, Tier { software_ps: 0, ..pcie() }),
            Self::Disk => Design { far: disk(), keeps_copies: true, ..design },
            Self::Zram => Design {
                far: direct(3 * US, 0, 40 * GB),
                compression_permille: Some(3000),
                ..design
            },
            Self::Nvme => {
                Design { far: direct(3 * US, 77 * US, 3 * GB), keeps_copies: true, ..design }
            }
            Self::CxlDirect => lines(design, cxl(85 * NS)),
            Self::CxlSwitched => lines(design, cxl(155 * NS)),
            Self::Rdma => Design {
                far: Tier {
                    link_latency_ps: 1_800 * NS,
                    ..direct(3_500 * NS, 100 * NS, 12_500 * MB)
                },
                keeps_copies: true,
                ..design
            },
            Self::Tcp => Design {
                far: Tier { link_latency_ps: 8 * US, ..direct(4_500 * NS, 200 * NS, 3_125 * MB) },
                keeps_copies: true,
                prefetch: Some("sequential".to_owned()),
                ..design
            },
            Self::PsFlash => Design {
                overflow: Some(Overflow {
                    far_permille: 500,
                    tier: direct(3 * US, 77 * US, 3 * GB),
                }),
                ..design
            },
        }
    }
}

fn base(preset: Preset) -> Design {
    Design {
        name: preset.name().to_owned(),
        source: preset.source().to_owned(),
        unit: Unit::Page,
        placement: Placement::Local,
        is_all_local: false,
        local_latency_ps: LOCAL_LATENCY_PS,
        far: pcie(),
        critical_block: None,
        free_frames: FREE_FRAMES,
        keeps_copies: false,
        prefetch: None,
        migration: None,
        compression_permille: None,
        duplicates_permille: 0,
        overflow: None,
    }
}

/// Access by lines; new pages go far when local memory is full.
fn lines(design: Design, far: Tier) -> Design {
    Design { unit: Unit::Line, placement: Placement::Far, far, ..design }
}

/// The blade's side of Table 1(a): request and response 60 ns, map 5 ns, DRAM 120 ns and 6.4 GB/s.
fn blade() -> Tier {
    Tier {
        request_ps: 60 * NS,
        map_ps: 5 * NS,
        response_ps: 60 * NS,
        ..direct(0, 120 * NS, 6_400 * MB)
    }
}

fn pcie() -> Tier {
    Tier { software_ps: 330 * NS, link_latency_ps: 120 * NS, link_bytes_per_s: GB, ..blade() }
}

fn hyper_transport() -> Tier {
    Tier { link_latency_ps: 60 * NS, link_bytes_per_s: 4 * GB, ..blade() }
}

fn disk() -> Tier {
    Tier { is_serial: true, ..direct(330 * NS, 8 * MS, 50 * MB) }
}

fn cxl(link_latency_ps: u64) -> Tier {
    // Flat to half, twice the latency at 80 %, four times near saturation (Mess: 85-130 ns idle,
    // 200-600 loaded; links saturate at 70 to 90 % of their peak).
    let points = [(500, 1000), (700, 1300), (800, 2000), (900, 3000), (1000, 4000)];
    let loaded_latency = points.map(|(utilisation_permille, latency_permille)| LoadPoint {
        utilisation_permille,
        latency_permille,
    });
    // The device's own latency is that of local memory.
    Tier {
        link_latency_ps: link_latency_ps - LOCAL_LATENCY_PS / 2,
        loaded_latency: loaded_latency.to_vec(),
        ..direct(0, LOCAL_LATENCY_PS, 28 * GB)
    }
}

/// A tier without a link worth modelling: software, device, one bandwidth.
fn direct(software_ps: u64, device_ps: u64, bytes_per_s: u64) -> Tier {
    Tier {
        software_ps,
        link_latency_ps: 0,
        link_bytes_per_s: bytes_per_s,
        request_ps: 0,
        map_ps: 0,
        device_ps,
        device_bytes_per_s: bytes_per_s,
        is_serial: false,
        response_ps: 0,
        loaded_latency: Vec::new(),
    }
}

/// A name that belongs to no preset.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("there is no design named \"{name}\"; choose one of: {known}")]
pub struct UnknownDesign {
    name: String,
    known: String,
}

impl std::str::FromStr for Preset {
    type Err = UnknownDesign;

    fn from_str(name: &str) -> Result<Self, UnknownDesign> {
        Self::ALL.into_iter().find(|preset| preset.name() == name).ok_or_else(|| UnknownDesign {
            name: name.to_owned(),
            known: Self::ALL.map(Self::name).join(", "),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_preset_can_be_simulated_and_read_back() {
        for preset in Preset::ALL {
            let design = preset.design();
            design.check().unwrap();
            assert_eq!(preset.name().parse(), Ok(preset));
            let text = toml::to_string(&design).unwrap();
            assert_eq!(toml::from_str::<Design>(&text).unwrap(), design);
        }
    }

    #[test]
    fn lims_latencies_are_those_of_his_table() {
        let idle = |preset: Preset| preset.design().idle_fetch_ps(4096);
        // 330 trap, 120 link, 60 request, 5 map, 120 DRAM, 60 response, 120 link, 4,096 transfer.
        assert_eq!(idle(Preset::Ps), 4_911 * NS);
        assert_eq!(idle(Preset::Fgra), 381 * NS);
        assert_eq!(idle(Preset::FgraPcie), 549 * NS);
        assert_eq!(idle(Preset::Disk), 8 * MS + 81_920 * NS + 330 * NS);
    }

    #[test]
    fn loaded_latency_is_a_line_between_its_points() {
        let tier = Preset::CxlDirect.design().far;
        let at = |permille| tier.loaded_ps(1000, permille);
        assert_eq!(
            [0, 400, 500, 600, 750, 800, 1000].map(at),
            [1000, 1000, 1000, 1150, 1650, 2000, 4000]
        );
    }
}
