//! The verdict to pool or not, with its reasons in numbers.

use serde::Serialize;

use super::{Question, Size};

/// A pool is large enough when it saves this share of the best size's saving; beyond that, a failed
/// blade only hits more machines.
const ENOUGH: f64 = 0.9;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    Pool,
    DoNotPool,
}

/// The recommendation.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Advice {
    pub verdict: Verdict,
    /// The smallest pool that saves nine tenths of the best one's saving, if a pool pays.
    pub right_vms: Option<usize>,
    /// The reasons, as sentences.
    pub reasons: Vec<String>,
}

pub(super) fn advise(sizes: &[Size], question: &Question) -> Advice {
    let asked = sizes.iter().find(|size| size.vms == question.group);
    let (Some(asked), Some(best)) = (asked, best(sizes)) else {
        let reasons = vec!["there is nothing to pool".into()];
        return Advice { verdict: Verdict::DoNotPool, right_vms: None, reasons };
    };
    let pays = |size: &Size| pays(size, question);
    let right = sizes
        .iter()
        .filter(|size| pays(size))
        .find(|size| saved_share(size) >= ENOUGH * saved_share(best));
    let verdict = if pays(asked) { Verdict::Pool } else { Verdict::DoNotPool };
    let mut reasons = vec![of_size(asked, verdict, question)];
    reasons.push(match right {
        Some(right) if right.vms == asked.vms => {
            format!("{} is the right size: {}", right.vms, most_of_the_saving(right, best))
        }
        Some(right) => {
            format!("the right size is {}: {}", right.vms, most_of_the_saving(right, best))
        }
        None => format!(
            "no size pays: the best, {} machines, saves {}",
            best.vms,
            percent(saved_share(best))
        ),
    });
    Advice { verdict, right_vms: right.map(|size| size.vms), reasons }
}

fn best(sizes: &[Size]) -> Option<&Size> {
    let pools = sizes.iter().filter(|size| size.vms > 1);
    pools.max_by(|a, b| saved_share(a).total_cmp(&saved_share(b)))
}

fn saved_share(size: &Size) -> f64 {
    1.0 - size.ratio_with_spare
}

/// True if the size saves enough and, if its cost is known, more than it costs.
fn pays(size: &Size, question: &Question) -> bool {
    size.vms > 1
        && saved_share(size) >= question.worth
        && size.net_per_member.is_none_or(|net| net > 0.0)
}

fn of_size(size: &Size, verdict: Verdict, question: &Question) -> String {
    let decision = match verdict {
        Verdict::Pool => "pool",
        Verdict::DoNotPool => "do not pool",
    };
    let spare = match question.blades {
        0 => String::new(),
        blades => format!(" with one of {blades} blades spare"),
    };
    let saved = saved_share(size);
    let saved_text = told_apart(saved, question.worth);
    let mut reason = match saved >= 0.0 {
        true => format!(
            "{decision}: {} machines together need {} of the sum of their peaks{spare}, which \
             saves {saved_text}",
            size.vms,
            percent(size.ratio_with_spare)
        ),
        false => format!(
            "{decision}: {} machines together need {} of the sum of their peaks{spare}: more than \
             apart",
            size.vms,
            percent(size.ratio_with_spare)
        ),
    };
    if saved < question.worth {
        let worth = told_apart(question.worth, saved);
        reason += &format!("; less than the {worth} that would be worth it");
    }
    match (size.net_per_member, size.break_even_member_cost) {
        (Some(net), _) if net > 0.0 => {
            let net = dollars(net);
            reason += &format!("; {net} a machine remain after what joining the pool costs");
        }
        (Some(net), _) => {
            let more = dollars(-net);
            reason += &format!("; joining the pool costs {more} a machine more than it saves");
        }
        (None, Some(most)) if most > 0.0 => {
            let most = dollars(most);
            reason += &format!(
                "; it breaks even when joining (port, switch, blade) costs {most} a machine"
            );
        }
        _ => {}
    }
    reason
}

fn most_of_the_saving(right: &Size, best: &Size) -> String {
    match right.vms == best.vms {
        true => format!("it saves most, {}", percent(saved_share(right))),
        false => format!(
            "it saves {} where the best, {} machines, saves {}; a failed blade hits {} machines",
            percent(saved_share(right)),
            best.vms,
            percent(saved_share(best)),
            right.vms_at_risk
        ),
    }
}

fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

/// Returns a share with as many digits as tell it from `other`, one to six.
fn told_apart(share: f64, other: f64) -> String {
    let text = |share: f64, digits: usize| format!("{:.digits$} %", share * 100.0);
    let differ = |digits: &usize| text(share, *digits) != text(other, *digits);
    text(share, if share == other { 1 } else { (1..6).find(differ).unwrap_or(6) })
}

/// An amount of money, with two significant digits below a cent.
fn dollars(amount: f64) -> String {
    match amount {
        a if a >= 0.01 || a <= 0.0 => format!("${amount:.2}"),
        a if a >= 1e-6 => {
            let digits = (2..8).find(|digits| a * 10_f64.powi(*digits) >= 10.0).unwrap_or(8);
            format!("${amount:.*}", farpool_units::exactly::<usize, _>(digits))
        }
        _ => "less than $0.000001".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size(vms: usize, ratio: f64) -> Size {
        Size {
            vms,
            pools: 1,
            ratio,
            ratio_low: ratio,
            ratio_high: ratio,
            ratio_with_spare: ratio,
            saved: 0.0,
            saved_gib: None,
            break_even_member_cost: None,
            net_per_member: None,
            vms_at_risk: vms,
        }
    }

    #[test]
    fn what_saves_little_is_not_pooled_and_says_what_it_would_save() {
        let sizes = [size(1, 1.0), size(16, 0.93), size(128, 0.91)];
        let advice = advise(&sizes, &Question { group: 16, ..Question::default() });
        assert_eq!((advice.verdict, advice.right_vms), (Verdict::DoNotPool, None));
        assert!(advice.reasons[0].starts_with("do not pool"), "{:?}", advice.reasons);
        assert!(advice.reasons[0].contains("saves 7.0 %"), "{:?}", advice.reasons);
        assert!(advice.reasons[1].contains("128 machines, saves 9.0 %"), "{:?}", advice.reasons);
    }

    #[test]
    fn figures_that_differ_look_different() {
        let sizes = [size(1, 1.0), size(16, 0.900_04)];
        let advice = advise(&sizes, &Question { group: 16, ..Question::default() });
        assert!(advice.reasons[0].contains("saves 9.996 %; less than the 10.000 %"), "{advice:?}");
        assert_eq!(dollars(0.000_34), "$0.00034");
        assert_eq!((dollars(7.0), dollars(0.014)), ("$7.00".to_owned(), "$0.01".to_owned()));
        assert_eq!(dollars(1e-9), "less than $0.000001");
    }

    #[test]
    fn the_right_size_is_the_smallest_that_saves_most_of_it() {
        let sizes = [size(1, 1.0), size(16, 0.6), size(32, 0.53), size(64, 0.5)];
        let advice = advise(&sizes, &Question { group: 16, ..Question::default() });
        assert_eq!((advice.verdict, advice.right_vms), (Verdict::Pool, Some(32)));
    }

    #[test]
    fn a_saving_that_its_cost_eats_up_is_none() {
        let dear = Size { net_per_member: Some(-2.0), ..size(16, 0.5) };
        let advice = advise(&[size(1, 1.0), dear], &Question { group: 16, ..Question::default() });
        assert_eq!(advice.verdict, Verdict::DoNotPool);
        assert!(advice.reasons[0].contains("$2.00 a machine more"), "{:?}", advice.reasons);
    }
}
