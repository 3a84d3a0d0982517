//! An authority in a folder of its own, and controllers and clients with its certificates.

use std::path::PathBuf;
use std::sync::Arc;

use farpool_api::{Access, Client};
use farpool_control::ControlOptions;
use farpool_identity::authority::{Authority, Host, Request};
use farpool_identity::{Credentials, Files, Identity, Reason, Role, UnixTime};

use super::Server;

pub(crate) struct Pki {
    pub authority: Authority,
    _folder: tempfile::TempDir,
}

impl Pki {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let rack = "rack".parse().unwrap();
        let authority = Authority::init(&folder.path().join("pki"), rack, UnixTime::now()).unwrap();
        Self { authority, _folder: folder }
    }

    pub(crate) fn role(path: &str) -> Role {
        let identity: Identity = format!("spiffe://rack/{path}").parse().unwrap();
        identity.role
    }

    /// Issues a certificate at a time, and returns its folder.
    pub(crate) fn issue_at(&mut self, path: &str, now: UnixTime) -> PathBuf {
        let role = Self::role(path);
        let hosts: Vec<Host> = match role.may_serve() {
            true => ["127.0.0.1", "localhost"].map(|it| it.parse().unwrap()).into(),
            false => Vec::new(),
        };
        self.authority.issue(Request { role, hosts, days: 1 }, now).unwrap().folder
    }

    /// Credentials of a new identity, such as `node/a`.
    pub(crate) fn credentials(&mut self, path: &str) -> Arc<Credentials> {
        let folder = self.issue_at(path, UnixTime::now());
        Credentials::load(Files::in_folder(&folder), UnixTime::now()).unwrap()
    }

    /// A client of a server that shows a new certificate.
    pub(crate) fn client(&mut self, server: &Server, path: &str) -> Client {
        with(server, &self.credentials(path))
    }

    pub(crate) fn renew(&mut self, path: &str) {
        self.authority.renew(&Self::role(path), None, UnixTime::now()).unwrap();
    }

    pub(crate) fn revoke(&mut self, path: &str) {
        let serial = self.authority.register().last(&Self::role(path)).unwrap().serial.clone();
        self.authority.revoke(&[serial], Reason::KeyCompromise, UnixTime::now()).unwrap();
    }

    /// A controller with a certificate.
    pub(crate) fn server(&mut self, change: impl FnOnce(&mut ControlOptions)) -> Server {
        let credentials = self.credentials("controller/c1");
        Server::fresh(|options| {
            options.protection.credentials = Some(credentials);
            change(options);
        })
    }
}

/// A client of a server that shows a certificate.
pub(crate) fn with(server: &Server, credentials: &Arc<Credentials>) -> Client {
    let credentials = Some(Arc::clone(credentials));
    Client::with(&server.url, &Access { credentials, ..Access::default() }).unwrap()
}
