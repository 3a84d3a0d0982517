//! etcd as the store of several controllers, over its HTTP/JSON gateway.
//!
//! The gateway is used rather than gRPC because it needs no generated code and no second HTTP
//! stack. It has been in every etcd since 3.3; `/v3` since 3.4.
//!
//! One key, `farpool/leader`, bound to a lease, says who leads. Every write is a transaction that
//! compares that key's create revision with the one this leader made, so a leader that was stopped
//! beyond its lease cannot write: the key is gone or is another one. Reads are refused by time: a
//! leader answers only as long as its lease must still run.

mod journal;

use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use super::{Store, StoreError, StoreOp};

/// Length of the leader's lease in seconds: a leader that is gone is replaced after this long.
const LEASE_TTL_S: u64 = 5;
/// How often the leader renews its lease: two renewals may be lost.
pub(crate) const KEEP_ALIVE_EVERY: Duration = Duration::from_millis(LEASE_TTL_S * 1000 / 4);
/// How long one request may take; then the next endpoint is asked.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);
/// Keys of one page when loading.
const PAGE_KEYS: u64 = 1_000;
const LEADER_KEY: &str = "farpool/leader";
const DATA_PREFIX: &str = "farpool/data/";
/// The first key after all that begin with the prefix.
const DATA_END: &str = "farpool/data0";

/// The endpoints of one etcd cluster.
#[derive(Clone, Debug)]
pub(crate) struct Etcd {
    agent: ureq::Agent,
    endpoints: Vec<String>,
}

/// A leadership, which lasts as long as its lease runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Leadership {
    lease: i64,
    create_revision: i64,
    /// No other controller leads before this.
    pub valid_until: Instant,
}

/// Reads a number: the gateway writes 64-bit numbers as strings and leaves zeros out.
fn number(value: &Value) -> i64 {
    match value {
        Value::String(text) => text.parse().unwrap_or(0),
        other => other.as_i64().unwrap_or(0),
    }
}

fn encode(text: impl AsRef<[u8]>) -> String {
    STANDARD.encode(text)
}

fn decode(value: &Value) -> Result<Vec<u8>, StoreError> {
    // An empty value is left out.
    let text = value.as_str().unwrap_or_default();
    STANDARD.decode(text).map_err(|error| StoreError::Unreachable(error.to_string()))
}

impl Etcd {
    pub(crate) fn new(endpoints: Vec<String>) -> Self {
        let config = ureq::Agent::config_builder()
            .timeout_global(Some(REQUEST_TIMEOUT))
            .http_status_as_error(false)
            .proxy(None)
            .build();
        Self { agent: config.into(), endpoints }
    }

    fn call(&self, path: &str, body: &Value) -> Result<Value, StoreError> {
        let mut last = "no endpoint was given".to_owned();
        for endpoint in &self.endpoints {
            match self.ask(endpoint, path, body) {
                Ok(answer) => return Ok(answer),
                Err(reason) => last = format!("{endpoint}: {reason}"),
            }
        }
        Err(StoreError::Unreachable(last))
    }

    fn ask(&self, endpoint: &str, path: &str, body: &Value) -> Result<Value, String> {
        let url = format!("{}{path}", endpoint.trim_end_matches('/'));
        let sent = self.agent.post(&url).send(body.to_string().as_bytes());
        let mut response = sent.map_err(|error| error.to_string())?;
        let text = response.body_mut().with_config().limit(256 << 20).read_to_string();
        let text = text.map_err(|error| error.to_string())?;
        if !response.status().is_success() {
            return Err(format!("status {}: {text}", response.status()));
        }
        serde_json::from_str(&text).map_err(|error| error.to_string())
    }

    /// Tries to lead, and publishes `address`. If another controller leads, returns the inner
    /// error: its address, which is empty if not known.
    pub(crate) fn campaign(&self, address: &str) -> Result<Result<Leadership, String>, StoreError> {
        let leader = self.call("/v3/kv/range", &json!({ "key": encode(LEADER_KEY) }))?;
        if let Some(held) = leader["kvs"].get(0) {
            return Ok(Err(String::from_utf8_lossy(&decode(&held["value"])?).into_owned()));
        }
        let before = Instant::now();
        let granted = self.call("/v3/lease/grant", &json!({ "TTL": LEASE_TTL_S }))?;
        let lease = number(&granted["ID"]);
        let put = json!({
            "key": encode(LEADER_KEY), "value": encode(address), "lease": lease.to_string()
        });
        let free = json!({
            "key": encode(LEADER_KEY), "target": "CREATE", "result": "EQUAL", "create_revision": "0"
        });
        let answer = self.call(
            "/v3/kv/txn",
            &json!({ "compare": [free], "success": [{ "request_put": put }] }),
        )?;
        if answer["succeeded"] != json!(true) {
            self.call("/v3/lease/revoke", &json!({ "ID": lease.to_string() }))?;
            return Ok(Err(String::new()));
        }
        let create_revision = number(&answer["header"]["revision"]);
        let valid_until = before + Duration::from_secs(LEASE_TTL_S);
        Ok(Ok(Leadership { lease, create_revision, valid_until }))
    }

    /// Renews the lease. Returns the time until which no other controller leads.
    pub(crate) fn keep_alive(&self, leadership: &Leadership) -> Result<Instant, StoreError> {
        let before = Instant::now();
        let body = json!({ "ID": leadership.lease.to_string() });
        let answer = self.call("/v3/lease/keepalive", &body)?;
        match number(&answer["result"]["TTL"]) {
            ttl if ttl > 0 => Ok(before + Duration::from_secs(ttl.unsigned_abs())),
            _ => Err(StoreError::Fenced),
        }
    }

    /// Lets another controller lead at once.
    pub(crate) fn resign(&self, leadership: &Leadership) {
        // If etcd is not reached, the lease runs out by itself.
        let _ = self.call("/v3/lease/revoke", &json!({ "ID": leadership.lease.to_string() }));
    }
}

/// The store as the leader sees it.
#[derive(Debug)]
pub(crate) struct EtcdStore {
    pub etcd: Etcd,
    pub leadership: Leadership,
}

impl EtcdStore {
    fn fence(&self) -> Value {
        json!({
            "key": encode(LEADER_KEY), "target": "CREATE", "result": "EQUAL",
            "create_revision": self.leadership.create_revision.to_string()
        })
    }
}

impl Store for EtcdStore {
    fn load(&mut self) -> Result<Vec<(String, Vec<u8>)>, StoreError> {
        self.finish_journal()?;
        let mut all = Vec::new();
        let mut from = DATA_PREFIX.as_bytes().to_vec();
        let mut revision = 0;
        loop {
            let answer = self.etcd.call(
                "/v3/kv/range",
                &json!({
                    "key": encode(&from), "range_end": encode(DATA_END),
                    "limit": PAGE_KEYS.to_string(), "revision": revision.to_string()
                }),
            )?;
            revision = number(&answer["header"]["revision"]);
            for pair in answer["kvs"].as_array().into_iter().flatten() {
                from = decode(&pair["key"])?;
                let key = String::from_utf8_lossy(&from).into_owned();
                let key = key.strip_prefix(DATA_PREFIX).unwrap_or(&key).to_owned();
                all.push((key, decode(&pair["value"])?));
            }
            from.push(0);
            if answer["more"] != json!(true) {
                return Ok(all);
            }
        }
    }

    fn commit(&mut self, ops: &[StoreOp]) -> Result<(), StoreError> {
        self.carry_out(ops)
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};

    use farpool_e2e::ports::free_address;

    use super::*;

    struct Ended(Child);

    impl Drop for Ended {
        fn drop(&mut self) {
            drop(self.0.kill());
            drop(self.0.wait());
        }
    }

    fn leader(etcd: &Etcd) -> EtcdStore {
        let until = Instant::now() + Duration::from_secs(60);
        loop {
            match etcd.campaign("http://me") {
                Ok(Ok(leadership)) => return EtcdStore { etcd: etcd.clone(), leadership },
                other => assert!(Instant::now() < until, "nobody may lead: {other:?}"),
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    #[test]
    fn who_has_lost_the_lead_cannot_write() {
        if Command::new("etcd").arg("--version").output().is_err() {
            farpool_testkit::skip("etcd is not installed (apt-get install etcd-server)");
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let url = || format!("http://{}", free_address());
        let (url, peer) = (url(), url());
        let child = Command::new("etcd")
            .arg("--data-dir")
            .arg(folder.path().join("data"))
            .args(["--listen-client-urls", &url, "--advertise-client-urls", &url])
            .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
            .args(["--initial-cluster", &format!("default={peer}")])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        let _ended = Ended(child.unwrap());
        let etcd = Etcd::new(vec![url]);
        let put = |key: &str, value: &str| StoreOp::Put(key.into(), value.into());
        let mut first = leader(&etcd);
        assert_eq!(etcd.campaign("http://other").unwrap(), Err("http://me".to_owned()));
        // More than a page of keys and more than a transaction takes, one key several times.
        let many: Vec<_> = (0..1_500).map(|n| put(&format!("k{n:04}"), "1")).collect();
        first.commit(&many).unwrap();
        first
            .commit(&[put("k0000", "2"), StoreOp::Delete("k0001".into()), put("k0000", "3")])
            .unwrap();
        etcd.keep_alive(&first.leadership).unwrap();

        etcd.resign(&first.leadership);
        assert!(matches!(first.commit(&[put("k0002", "stale")]), Err(StoreError::Fenced)));
        let mut second = leader(&etcd);
        assert!(matches!(first.commit(&[put("k0002", "stale")]), Err(StoreError::Fenced)));
        assert!(matches!(etcd.keep_alive(&first.leadership), Err(StoreError::Fenced)));
        let all = second.load().unwrap();
        assert_eq!(all.len(), 1_499);
        assert_eq!(all[0], ("k0000".to_owned(), b"3".to_vec()));
        assert_eq!(all[1], ("k0002".to_owned(), b"1".to_vec()));
        second.commit(&[put("k0002", "4")]).unwrap();
        a_batch_takes_effect_as_a_whole(&etcd, second);
    }

    /// Leaders that are gone after every transaction of a long batch.
    fn a_batch_takes_effect_as_a_whole(etcd: &Etcd, mut leads: EtcdStore) {
        // Three pieces, so that the mark is the fourth transaction.
        const MARKED: usize = 4;
        let all = |value: &str| -> Vec<StoreOp> {
            (0..250).map(|n| StoreOp::Put(format!("b{n:03}"), value.into())).collect()
        };
        let mut is_all = false;
        for count in 0.. {
            leads.commit(&all("old")).unwrap();
            is_all = journal::tests::leave(&mut leads, &all("new"), count);
            etcd.resign(&leads.leadership);
            leads = leader(etcd);
            let expected = if count < MARKED { b"old" } else { b"new" };
            let found = leads.load().unwrap();
            let batch = found.iter().filter(|(key, _)| key.starts_with('b'));
            let values: Vec<_> = batch.map(|(_, value)| value.as_slice()).collect();
            assert_eq!(values, vec![expected; 250], "after {count} transactions");
            if is_all {
                break;
            }
        }
        assert!(is_all);
        // Nothing of a journal is left to a later leader.
        let all = json!({ "key": encode("farpool/j"), "range_end": encode("farpool/k") });
        let left = etcd.call("/v3/kv/range", &all).unwrap();
        assert!(left["kvs"].is_null(), "{left}");
    }
}
