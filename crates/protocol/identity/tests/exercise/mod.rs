//! What comes from outside: certificates, lists, keys and names of any content. It is refused, or
//! means one thing only, and nothing panics.

use std::path::Path;
use std::sync::OnceLock;

use farpool_identity::authority::Host;
use farpool_identity::{
    Certificate, Credentials, Files, Identity, RevocationList, Serial, Side, Trust, pem,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, UnixTime};
use x509_parser::prelude::{FromDer, X509Certificate};

use crate::common::Rack;

/// Bytes of a change in what [`read_outside`] takes.
const CHANGE_BYTES: usize = 4;
/// Bytes of a text beyond which nothing new is found.
const TEXT_LIMIT_BYTES: usize = 4096;

/// A good certificate, its authority's, and a list, in DER form, and the files of all.
pub(crate) struct Good {
    pub(crate) trust: Trust,
    pub(crate) identity: Identity,
    pub(crate) leaf: Vec<u8>,
    pub(crate) authority: Vec<u8>,
    pub(crate) list: Vec<u8>,
    pub(crate) made_at: UnixTime,
    /// Certificate, key, authorities and list in PEM form.
    texts: [Vec<u8>; 4],
    _rack: Rack,
}

pub(crate) fn good() -> &'static Good {
    static GOOD: OnceLock<Good> = OnceLock::new();
    GOOD.get_or_init(|| {
        let made_at = UnixTime::now();
        let mut rack = Rack::at(made_at);
        let issued = rack.issue_at("node/a", made_at);
        let other = rack.issue_at("program/t/p", made_at).record.serial;
        let reason = farpool_identity::Reason::KeyCompromise;
        rack.authority.revoke(&[other], reason, made_at).expect("revoked");
        let files = Files::in_folder(&issued.folder);
        let first = |path| pem::certificates(path).expect("certificates")[0].to_vec();
        let list = CertificateRevocationListDer::from_pem_file(&files.revoked).expect("a list");
        let text = |path: &Path| std::fs::read(path).expect("a file");
        Good {
            trust: Trust::read(&files).expect("trust"),
            identity: "spiffe://rack/node/a".parse().expect("an identity"),
            leaf: first(&files.certificate),
            authority: first(&files.authorities),
            list: list.to_vec(),
            made_at,
            texts: [&files.certificate, &files.key, &files.authorities, &files.revoked]
                .map(|path| text(path)),
            _rack: rack,
        }
    })
}

/// A few bytes changed, added or removed.
pub(crate) fn spoiled(good: &[u8], changes: &[(usize, u8, u8)]) -> Vec<u8> {
    let mut bytes = good.to_vec();
    for &(at, byte, how) in changes {
        let at = at % bytes.len().max(1);
        match how % 4 {
            0 => bytes.insert(at, byte),
            1 if !bytes.is_empty() => drop(bytes.remove(at)),
            2 => bytes.truncate(at),
            _ => bytes.get_mut(at).into_iter().for_each(|it| *it = byte),
        }
    }
    bytes
}

/// Reads anything as everything that is read from outside: the first byte says whether the rest is
/// taken as it is, or as changes to what is good.
pub(crate) fn read_outside(input: &[u8]) {
    let Some((&how, rest)) = input.split_first() else { return };
    let good = good();
    let changes: Vec<_> = rest
        .chunks_exact(CHANGE_BYTES)
        .map(|it| (usize::from(u16::from_le_bytes([it[0], it[1]])), it[2], it[3]))
        .collect();
    match how % 8 {
        0 => read_text(rest),
        1 => read_text(&spoiled(good.identity.to_string().as_bytes(), &changes)),
        2 => read_certificate(rest),
        3 => read_certificate(&spoiled(&good.leaf, &changes)),
        4 => read_list(rest),
        5 => read_list(&spoiled(&good.list, &changes)),
        6 => load(usize::from(how / 8) % 4, rest),
        _ => {
            let which = usize::from(how / 8) % 4;
            load(which, &spoiled(&good.texts[which], &changes));
        }
    }
}

/// No second spelling: what is read is written the same.
pub(crate) fn read_text(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(&bytes[..bytes.len().min(TEXT_LIMIT_BYTES)]) else { return };
    if let Ok(identity) = text.parse::<Identity>() {
        assert_eq!(identity.to_string(), text);
    }
    if let Ok(serial) = text.parse::<Serial>() {
        assert_eq!(serial.to_string().parse(), Ok(serial));
    }
    let _ = text.parse::<Host>();
    let uris: Vec<&str> = text.split('\n').collect();
    if let Ok(identity) = Identity::among(uris.iter().copied()) {
        assert_eq!(uris, [identity.to_string()]);
    }
}

/// Every byte of a certificate counts: it is signed.
pub(crate) fn read_certificate(bytes: &[u8]) {
    let good = good();
    let _ = Certificate::read(bytes);
    let verified = good.trust.verify(&CertificateDer::from(bytes), &[], Side::Server, good.made_at);
    assert_eq!(verified.is_ok(), bytes == good.leaf);
}

pub(crate) fn read_list(bytes: &[u8]) {
    let good = good();
    let (_, authority) = X509Certificate::from_der(&good.authority).expect("an authority");
    assert!(RevocationList::read(bytes, &[]).is_err());
    let read = RevocationList::read(bytes, &[authority]);
    assert_eq!(read.is_ok(), bytes == good.list);
}

/// Credentials of four files, one of which has this content: if they can be used, they are those
/// that were issued.
pub(crate) fn load(which: usize, content: &[u8]) {
    let good = good();
    let folder = tempfile::tempdir().expect("a folder");
    let files = Files::in_folder(folder.path());
    let paths = [&files.certificate, &files.key, &files.authorities, &files.revoked];
    for (at, (path, text)) in paths.into_iter().zip(&good.texts).enumerate() {
        let content = if at == which { content } else { text };
        std::fs::write(path, content).expect("a file");
    }
    if let Ok(credentials) = Credentials::load(files, good.made_at) {
        assert_eq!(credentials.identity(), good.identity);
        let lists = credentials.trust();
        // None, or the issued one: nothing else is signed.
        assert!(lists.lists().len() <= 1);
    }
}
