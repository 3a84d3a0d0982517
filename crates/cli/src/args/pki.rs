//! `farpool pki`: the rack's own authority.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use farpool_identity::authority::{DEFAULT_DAYS, Host};
use farpool_identity::{Name, RackName, Reason};

#[derive(Debug, Args)]
#[command(after_help = "\
Example: a rack of a controller, two nodes and a tenant\n  \
farpool pki init --name rack1\n  \
farpool pki issue --role controller --name c1 --host c1.example --ip 192.0.2.1\n  \
farpool pki issue --role node --name a --ip 192.0.2.2\n  \
farpool pki issue --role node --name b --ip 192.0.2.3\n  \
farpool pki issue --role program --tenant payroll\n  \
farpool pki show\n\n\
Each certificate gets a folder of its own, such as node-a, with all that its host needs: tls.crt, \
tls.key, ca.crt and revoked.crl. Copy it there by a way that nobody else can read.")]
pub struct PkiArgs {
    #[command(subcommand)]
    pub action: PkiAction,
}

/// Where the authority is.
#[derive(Clone, Debug, Args)]
pub struct PkiDir {
    /// Folder of the authority; keep it on a host that few may enter
    #[arg(long, value_name = "DIR", default_value = "pki")]
    #[arg(env = "FARPOOL_PKI_DIR", hide_env_values = true)]
    pub dir: PathBuf,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Subcommand)]
pub enum PkiAction {
    /// Make the rack's authority: the key that signs certificates; overwrites nothing
    Init {
        #[command(flatten)]
        at: PkiDir,
        /// Name of the rack, which every certificate has: small letters, digits, `-`, `_` and `.`
        #[arg(long, value_name = "RACK", default_value = "farpool")]
        name: RackName,
    },
    /// Issue a certificate with a new key to a controller, a node, a program or a person
    Issue(IssueArgs),
    /// Issue the next certificates, with new keys; the old ones stay valid until their end
    Renew {
        #[command(flatten)]
        at: PkiDir,
        /// Whose: a name that `farpool pki show` lists, such as node-a
        #[arg(value_name = "NAME", required_unless_present = "due")]
        names: Vec<String>,
        /// Renew all of which less than a third of their life is left; for a daily job
        #[arg(long, conflicts_with = "names")]
        due: bool,
        /// New life in days [default: the life of the last one]
        #[arg(long, value_name = "N")]
        days: Option<u64>,
    },
    /// Revoke certificates, and write the list of all revoked ones to every folder
    Revoke {
        #[command(flatten)]
        at: PkiDir,
        /// A serial number, or a name for all its certificates, such as node-a
        #[arg(value_name = "SERIAL|NAME", required = true)]
        names: Vec<String>,
        /// Why, for the list
        #[arg(long, value_enum, value_name = "REASON", default_value = "unspecified")]
        reason: PkiReason,
    },
    /// List what was issued, until when it is valid, and what was revoked
    Show {
        #[command(flatten)]
        at: PkiDir,
        /// List all certificates, also those that were renewed or have ended
        #[arg(long)]
        all: bool,
    },
}

#[derive(Debug, Args)]
pub struct IssueArgs {
    #[command(flatten)]
    pub at: PkiDir,
    /// What its owner may do
    #[arg(long, value_enum, value_name = "ROLE")]
    pub role: PkiRole,
    /// Name of the controller, node, viewer or operator; of a program only to tell several apart
    #[arg(long, value_name = "NAME", required_unless_present = "tenant")]
    pub name: Option<Name>,
    /// Tenant of a program
    #[arg(long, value_name = "TENANT", required_if_eq("role", "program"))]
    pub tenant: Option<Name>,
    /// Name of the host of a controller or node, as clients dial it; may be repeated
    #[arg(long, value_name = "HOST", value_parser = host_name)]
    pub host: Vec<Host>,
    /// Address of the host of a controller or node; may be repeated
    #[arg(long, value_name = "IP")]
    pub ip: Vec<std::net::IpAddr>,
    /// Life in days
    #[arg(long, value_name = "N", default_value_t = DEFAULT_DAYS)]
    pub days: u64,
}

/// What the owner of a certificate may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PkiRole {
    /// Read the rack's state
    Viewer,
    /// Change the rack
    Operator,
    /// Be the rack's controller
    Controller,
    /// Lend memory, and speak for this node only
    Node,
    /// Use far memory, and speak for its tenant only
    Program,
}

/// Why a certificate is revoked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PkiReason {
    /// None is given
    Unspecified,
    /// Others may have the key
    KeyCompromise,
    /// Another certificate takes its place
    Superseded,
    /// Its owner is gone
    Cessation,
    /// Its owner may no longer do what it says
    PrivilegeWithdrawn,
}

impl From<PkiReason> for Reason {
    fn from(reason: PkiReason) -> Self {
        match reason {
            PkiReason::Unspecified => Self::Unspecified,
            PkiReason::KeyCompromise => Self::KeyCompromise,
            PkiReason::Superseded => Self::Superseded,
            PkiReason::Cessation => Self::CessationOfOperation,
            PkiReason::PrivilegeWithdrawn => Self::PrivilegeWithdrawn,
        }
    }
}

fn host_name(text: &str) -> Result<Host, String> {
    match text.parse() {
        Ok(Host::Address(_)) => Err(format!("{text} is an address; give it with --ip")),
        Ok(host) => Ok(host),
        Err(error) => Err(error.to_string()),
    }
}
