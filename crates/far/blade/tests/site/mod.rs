//! A rack's authority, and clients and blades with its certificates.

#![allow(dead_code, reason = "each test binary uses its part of this")]

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use farpool_blade::{BladeConfig, ServeError, Server, Serving};
use farpool_fabric::{
    ClientId, ConnectError, Control, DescriptorSet, Link, LinkPage, Met, PageDone, Session, Spare,
    StreamLink, Time,
};
use farpool_handshake::Dialer;
use farpool_identity::authority::{Authority, Host, Request as IssueRequest};
use farpool_identity::{Credentials, Files, Identity, Reason, Role, UnixTime};
use farpool_units::PAGE_BYTES;
use farpool_wire::{Address, PageNumber, Purpose, Request, Response, SegmentId, SuperpageNumber};

/// Longer than anything takes; a test that waits this long has failed.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) struct Rack {
    pub(crate) authority: Authority,
    _folder: tempfile::TempDir,
}

pub(crate) fn role_of(path: &str) -> Role {
    let identity: Identity = format!("spiffe://rack/{path}").parse().expect("an identity");
    identity.role
}

/// A time some seconds from now, before it if negative.
pub(crate) fn from_now(seconds: i64) -> UnixTime {
    let now = UnixTime::now().as_secs();
    UnixTime::since_unix_epoch(Duration::from_secs(now.saturating_add_signed(seconds)))
}

pub(crate) fn load(folder: &Path) -> Arc<Credentials> {
    Credentials::load(Files::in_folder(folder), UnixTime::now()).expect("credentials")
}

impl Rack {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let (pki, name) = (folder.path().join("pki"), "rack".parse().expect("a name"));
        // Certificates that end in a moment were issued a day ago.
        let authority = Authority::init(&pki, name, from_now(-100_000)).expect("made");
        Rack { authority, _folder: folder }
    }

    /// A certificate that begins now, or so many seconds from now.
    pub(crate) fn issue(&mut self, path: &str, from_s: i64, host: &str) -> std::path::PathBuf {
        let role = role_of(path);
        let hosts: Vec<Host> = match role.may_serve() {
            true => vec![host.parse().expect("a host")],
            false => Vec::new(),
        };
        let request = IssueRequest { role, hosts, days: 1 };
        self.authority.issue(request, from_now(from_s)).expect("issued").folder
    }

    pub(crate) fn credentials(&mut self, path: &str) -> Arc<Credentials> {
        load(&self.issue(path, 0, "127.0.0.1"))
    }

    pub(crate) fn revoke(&mut self, path: &str) {
        let serials = self.authority.register().serials(&role_of(path).label());
        let serials = serials.expect("it is known");
        self.authority.revoke(&serials, Reason::Unspecified, UnixTime::now()).expect("revoked");
    }

    pub(crate) fn renew(&mut self, path: &str) {
        self.authority.renew(&role_of(path), None, UnixTime::now()).expect("renewed");
    }

    /// A blade on loopback TCP with a node's certificate.
    pub(crate) fn blade(&mut self, node: &str) -> Serving {
        let credentials = self.credentials(node);
        blade_with(Some(credentials), BladeConfig::default()).expect("a blade")
    }
}

pub(crate) fn blade_with(
    credentials: Option<Arc<Credentials>>,
    config: BladeConfig,
) -> Result<Serving, ServeError> {
    let config = BladeConfig {
        memory_bytes: 8 << 24,
        threads: 2,
        lease: Duration::from_secs(5),
        credentials,
        ..config
    };
    Server::bind(&["tcp://127.0.0.1:0".parse().expect("an address")], config)?.serve()
}

/// A client's session, with a certificate or without.
pub(crate) fn session(
    address: &Address,
    id: u128,
    purpose: Purpose,
    credentials: Option<&Arc<Credentials>>,
) -> Session {
    let dialer = credentials.map(|it| Dialer::new(Arc::clone(it), |_| ()).expect("a dialer"));
    Session {
        address: address.clone(),
        client: ClientId(id),
        grant: None,
        limits: None,
        client_name: "test".into(),
        purpose,
        quota_bytes: 1 << 30,
        sharing_group: None,
        deadline: PATIENCE,
        spare: Spare::default(),
        allow_remote_tcp: false,
        secures_tcp: credentials.is_some(),
        asks: dialer.map(|it| it as _),
        time: Time::KERNEL,
        descriptors: Arc::new(DescriptorSet::default()),
        met: Met::default(),
    }
}

/// What a client with this certificate finds.
pub(crate) fn meets(
    blade: &Serving,
    id: u128,
    purpose: Purpose,
    credentials: Option<&Arc<Credentials>>,
) -> Result<Control, ConnectError> {
    let session = session(&blade.addresses()[0], id, purpose, credentials);
    Control::connect(Arc::new(session), 0)
}

/// Why a client with this certificate is refused.
#[track_caller]
pub(crate) fn refused(
    blade: &Serving,
    purpose: Purpose,
    credentials: Option<&Arc<Credentials>>,
) -> String {
    meets(blade, 1, purpose, credentials).map(drop).expect_err("it is refused").to_string()
}

/// A client with a segment, and a link to it.
pub(crate) struct Client {
    pub(crate) control: Control,
    pub(crate) link: StreamLink,
    segment: SegmentId,
    pages: Vec<Box<[u8; PAGE_BYTES]>>,
}

impl Client {
    pub(crate) fn new(session: Session) -> Self {
        let session = Arc::new(session);
        let mut control = Control::connect(Arc::clone(&session), 0).expect("a connection");
        let request = Request::CreateSegment { span_superpages: 2 };
        let answer = control.call(&request).expect("a segment");
        let Response::SegmentCreated { segment, .. } = answer.response else {
            panic!("no segment")
        };
        let first = SuperpageNumber(0);
        let request = Request::AllocateSuperpages { segment, first, count: 2 };
        control.call(&request).expect("memory");
        let link = StreamLink::connect(session, 1).expect("a link");
        let pages = (0..600).map(|_| Box::new([0; PAGE_BYTES])).collect();
        Client { control, link, segment, pages }
    }

    pub(crate) fn page(&mut self, at: usize) -> &mut [u8; PAGE_BYTES] {
        &mut self.pages[at]
    }

    fn lend(&mut self, count: usize) -> Vec<LinkPage> {
        let segment = self.segment;
        let page = |(at, memory): (u32, &mut Box<[u8; PAGE_BYTES]>)| LinkPage {
            segment,
            page: PageNumber(at),
            file: -1,
            file_page: 0,
            memory: memory.as_mut_ptr(),
            token: at.into(),
        };
        (0..).zip(&mut self.pages[..count]).map(page).collect()
    }

    /// Writes so many pages.
    pub(crate) fn write(&mut self, count: usize) -> Vec<PageDone> {
        let pages = self.lend(count);
        // SAFETY: the pages live as long as self, which waits for all of them.
        unsafe { self.link.write(&pages) };
        self.finish()
    }

    /// Reads so many pages, into memory that was cleared before.
    pub(crate) fn read(&mut self, count: usize) -> Vec<PageDone> {
        self.pages[..count].iter_mut().for_each(|page| page.fill(0xEE));
        let pages = self.lend(count);
        // SAFETY: as above.
        unsafe { self.link.read(&pages) };
        self.finish()
    }

    fn finish(&mut self) -> Vec<PageDone> {
        let mut done = Vec::new();
        while self.link.in_flight() > 0 {
            self.link.wait(&mut done);
            self.link.expire(Instant::now(), &mut done);
        }
        done
    }

    /// Writes pages of this seed and reads them back.
    #[track_caller]
    pub(crate) fn round(&mut self, seed: u64, count: usize) {
        for at in 0..count {
            let first = (seed << 32 | at as u64).to_le_bytes();
            self.page(at).copy_from_slice(&first.repeat(PAGE_BYTES / 8));
        }
        let written = self.write(count);
        assert!(written.iter().all(|it| it.result.is_ok()), "{:?}", self.link.loss());
        let read = self.read(count);
        assert!(read.iter().all(|it| it.result.is_ok()), "{:?}", self.link.loss());
        for at in 0..count {
            let first = (seed << 32 | at as u64).to_le_bytes();
            assert_eq!(self.page(at)[..], first.repeat(PAGE_BYTES / 8)[..], "page {at}");
        }
    }
}
