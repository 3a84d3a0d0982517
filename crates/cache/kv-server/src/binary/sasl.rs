//! `-Y` for clients of the binary protocol: SASL with the mechanism PLAIN (RFC 4616).

use crate::clients::connection::{Client, Phase};
use crate::worker::Worker;
use farpool_kv_protocol::binary::{Head, SaslStep, Status, push_refusal, push_value};

/// The one mechanism. Names and passwords travel as they are: see the operator's page for TLS.
const MECHANISM: &[u8] = b"PLAIN";

/// The name and password in a message of PLAIN: `[authorize as] NUL name NUL password`. None if it
/// is malformed, or asks to act as somebody else.
fn name_and_password(message: &[u8]) -> Option<(&[u8], &[u8])> {
    let mut parts = message.split(|&byte| byte == 0);
    let (acts_as, name, password) = (parts.next()?, parts.next()?, parts.next()?);
    let is_own = acts_as.is_empty() || acts_as == name;
    (parts.next().is_none() && is_own && !name.is_empty()).then_some((name, password))
}

impl Worker {
    pub(super) fn list_mechanisms(&mut self, client: &mut Client, head: Head) {
        // As in memcached, each of these requests begins anew.
        client.is_authenticated = false;
        push_value(&mut self.clients.out, head, Status::Success, 0, MECHANISM);
    }

    /// Takes a step of authentication. A failure leaves the client unauthenticated and connected.
    pub(super) fn authenticate_binary(
        &mut self,
        client: &mut Client,
        head: Head,
        step: SaslStep<'_>,
    ) {
        client.is_authenticated = false;
        let is_expected = if step.begins {
            step.mechanism.eq_ignore_ascii_case(MECHANISM)
        } else {
            client.sasl_has_begun
        };
        client.sasl_has_begun = is_expected && step.begins && step.message.is_empty();
        let out = &mut self.clients.out;
        if client.sasl_has_begun {
            return push_value(out, head, Status::AuthContinue, 0, b"");
        }
        let credentials = self.me.shared.settings.credentials.as_ref();
        let given = name_and_password(step.message).filter(|_| is_expected);
        client.is_authenticated = credentials
            .zip(given)
            .is_some_and(|(known, (name, password))| known.accept(name, password));
        self.me.counts.auth_commands += 1;
        if client.is_authenticated {
            push_value(out, head, Status::Success, 0, b"Authenticated");
        } else {
            self.me.counts.auth_errors += 1;
            push_refusal(out, head, Status::AuthError);
        }
        debug_assert!(client.phase == Phase::Requests, "a failure may be tried again");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_of_plain_has_three_parts() {
        let given = Some((&b"foo"[..], &b"bar"[..]));
        assert_eq!(name_and_password(b"\0foo\0bar"), given);
        assert_eq!(name_and_password(b"foo\0foo\0bar"), given);
        for wrong in [&b""[..], b"foo", b"foo\0bar", b"root\0foo\0bar", b"\0foo\0bar\0", b"\0\0bar"]
        {
            assert_eq!(name_and_password(wrong), None, "{}", wrong.escape_ascii());
        }
    }
}
