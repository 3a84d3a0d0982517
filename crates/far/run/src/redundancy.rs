//! What a run stores beside what is far, and whether its blades are enough for that.

use std::collections::HashSet;

use farpool_board::Redundancy;
use farpool_seal::SealPolicy;
use farpool_wire::Address;

use crate::rack::redundancy_of_tenant;
use crate::say::say;
use crate::{RunError, RunOptions};

/// What the run stores, once [`with_redundancy`] has found it out.
pub(crate) fn redundancy(options: &RunOptions) -> Redundancy {
    options.redundancy.unwrap_or(Redundancy::NONE)
}

/// The options with what the rack's operator has set for the tenant, if they leave it to that.
///
/// # Errors
/// The rack cannot be asked: nothing runs with less than it should have.
pub(crate) fn with_redundancy(options: &RunOptions) -> Result<RunOptions, RunError> {
    let mut options = options.clone();
    if let (None, Some(rack)) = (options.redundancy, &options.rack) {
        options.redundancy = redundancy_of_tenant(rack)?;
        if let Some(redundancy) = options.redundancy.filter(|_| !options.quiet) {
            say!("farpool: --redundancy {redundancy}, as the rack has it for the tenant");
        }
    }
    Ok(options)
}

pub(crate) fn check_copies(options: &RunOptions) -> Result<(), RunError> {
    let redundancy = redundancy(options);
    if redundancy != Redundancy::NONE && options.seal == SealPolicy::Never {
        return Err(RunError::UnsealedCopies);
    }
    match &options.rack {
        // It is asked for memory on as many.
        Some(_) => Ok(()),
        None => check_domains(redundancy, &options.blades),
    }
}

/// Checks that the blades are on as many failure domains as there have to be.
///
/// # Errors
/// They are on fewer.
fn check_domains(redundancy: Redundancy, blades: &[String]) -> Result<(), RunError> {
    let addresses = blades.iter().filter_map(|blade| blade.parse::<Address>().ok());
    let domains: HashSet<_> = addresses.map(|address| address.failure_domain()).collect();
    let is_enough = domains.len() >= usize::from(redundancy.domains());
    match redundancy == Redundancy::NONE || is_enough {
        true => Ok(()),
        false => Err(RunError::TooFewDomains { redundancy, domains: domains.len() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_need_as_many_failure_domains_and_parity_five() {
        let blades = |texts: &[&str]| texts.iter().map(ToString::to_string).collect::<Vec<_>>();
        let one_host = blades(&["tcp://192.0.2.1:1", "tcp://192.0.2.1:2"]);
        let two = blades(&["tcp://192.0.2.1:1", "tcp://192.0.2.2:1"]);
        let here = blades(&["unix:///a", "tcp://127.0.0.1:1"]);
        assert!(check_domains(Redundancy::NONE, &[]).is_ok());
        assert!(check_domains(Redundancy::NONE, &one_host).is_ok());
        let error = check_domains(Redundancy::Copies(2), &one_host).expect_err("one domain");
        assert!(error.to_string().contains("1 failure domain"), "{error}");
        assert!(check_domains(Redundancy::Copies(2), &two).is_ok());
        assert!(check_domains(Redundancy::Copies(2), &here).is_ok());
        assert!(check_domains(Redundancy::Copies(3), &two).is_err());
        let hosts = |count| (1..=count).map(|it| format!("tcp://192.0.2.{it}:1")).collect();
        let (four, five): (Vec<_>, Vec<_>) = (hosts(4), hosts(5));
        let error = check_domains(Redundancy::Parity, &four).expect_err("four domains");
        assert!(error.to_string().contains("parity needs blades on 5 hosts"), "{error}");
        assert!(check_domains(Redundancy::Parity, &five).is_ok());
    }
}
