//! The last resort for memory that must leave a blade and finds no room elsewhere: a private blade
//! of the keeper, in this machine's memory if that has plenty, else in a file.

use std::path::{Path, PathBuf};

use farpool_blade::{BackingKind, BladeConfig, ServeError, Server, Serving};
use farpool_board::{BladeDomain, BladeOffer};
use farpool_host::{MemoryFiles, MemoryLevel};
use farpool_units::SUPERPAGE_BYTES;

/// Memory is spilled to memory only if this fraction (1/8) of the machine's stays available.
const RESERVE_PART: u64 = 8;
/// Name of the blade's socket in the run's directory.
const SOCKET: &str = "spill.sock";

/// Where memory would be spilled to, and the blade once it serves.
#[derive(Debug)]
pub struct Spill {
    socket: PathBuf,
    directory: PathBuf,
    serving: Option<Serving>,
    /// Its entry on the board, and that entry's generation.
    placement: Option<(usize, u32)>,
}

impl Spill {
    /// Starts without a blade. A file would go into `directory`.
    pub fn new(run_directory: &Path, directory: &Path) -> Self {
        let socket = run_directory.join(SOCKET);
        Spill { socket, directory: directory.to_owned(), serving: None, placement: None }
    }

    pub fn is_there(&self) -> bool {
        self.serving.is_some()
    }

    /// Its entry on the board, and that entry's generation.
    pub fn placement(&self) -> Option<(usize, u32)> {
        self.placement
    }

    /// Records its entry on the board.
    pub fn seated(&mut self, entry: usize, generation: u32) {
        self.placement = Some((entry, generation));
    }

    /// Ends the blade and frees its memory, once all have left it.
    pub fn end(&mut self) {
        (self.serving, self.placement) = (None, None);
    }

    /// Starts the blade with room for all that is granted, of which `bytes` must move now. Also
    /// returns what it is made of.
    pub fn start(
        &mut self,
        bytes: u64,
        granted_bytes: u64,
    ) -> Result<(BladeOffer, String), ServeError> {
        let memory_bytes = granted_bytes.max(bytes).saturating_add(SUPERPAGE_BYTES);
        let file = self.directory.join(format!("farpool-spill-{}", std::process::id()));
        let (backing, what) = if has_memory_for(bytes) {
            (BackingKind::Memfd, "this machine's memory".to_owned())
        } else {
            (BackingKind::File(file.clone()), format!("a file in {}", self.directory.display()))
        };
        let listen = farpool_wire::Address::Unix(self.socket.clone());
        let config = BladeConfig { memory_bytes, backing, ..BladeConfig::default() };
        self.serving = Some(Server::bind(&[listen], config)?.serve()?);
        // The blade has it open; nothing is left of it when the keeper ends, for whatever reason.
        let _not_made = std::fs::remove_file(&file);
        let open = BladeOffer::open(format!("unix://{}", self.socket.display()));
        Ok((BladeOffer { domain: BladeDomain::Run, ..open }, what))
    }
}

/// True if this host, and each memory cgroup above this process, keeps its reserve after taking
/// `bytes`.
fn has_memory_for(bytes: u64) -> bool {
    let takes = |level: &MemoryLevel| {
        level.available_bytes > bytes.saturating_add(level.total_bytes / RESERVE_PART)
    };
    MemoryFiles::default().look().is_ok_and(|sight| sight.levels.iter().all(takes))
}
