//! What an episode of a flow means to an operator.

use roce_common::{
    abi::{FlowKey, Space},
    psn::{Cause, Episode, Location},
};

use super::{Code, Evidence, Findings};

/// The codes that [`note`] may give.
pub const CODES: &[Code] = &[
    Code::LossBeforeTap,
    Code::LossAfterTap,
    Code::LossUnexplained,
    Code::UcLoss,
    Code::TimeoutRetransmit,
    Code::SpuriousRetransmit,
    Code::ReadReasked,
    Code::ReorderingNaked,
];

/// Notes a finished episode of the flow `key`, and the packets that show it.
pub fn note(
    findings: &mut Findings,
    key: FlowKey,
    episode: &Episode,
    evidence: impl IntoIterator<Item = Evidence, IntoIter: Clone>,
) {
    let evidence = evidence.into_iter();
    let mut found = |code: Code, count: u32| {
        if count > 0 {
            findings.add(code, key, u64::from(count));
            for e in evidence.clone() {
                findings.show(code, key, e);
            }
        }
    };
    let lost = episode.lost + episode.lost_again;
    match (episode.cause, episode.location) {
        (Cause::UcLoss, _) => return found(Code::UcLoss, lost),
        (Cause::Unknown, Location::Unknown) => found(Code::LossUnexplained, lost),
        _ => found(Code::LossBeforeTap, lost),
    }
    match episode.cause {
        Cause::GoBackN | Cause::SelectiveRepeat | Cause::Unknown => {
            found(Code::LossAfterTap, u32::from(episode.location == Location::AfterTap));
        }
        // An answer had passed here: it was lost on its way to the sender, or the timer is too short.
        Cause::Timeout if lost == 0 && episode.evidence.answered.is_some() => found(Code::SpuriousRetransmit, 1),
        Cause::Timeout => {
            found(Code::TimeoutRetransmit, 1);
            // A NAK had told of it, and was not heard or not heeded.
            let named = episode.evidence.nak.is_some() && episode.location == Location::AfterTap;
            found(Code::LossAfterTap, u32::from(named));
        }
        // The repeated answers are a flow of their own, of which the requests tell.
        Cause::Reask if key.space() == Space::Request => {
            found(Code::ReadReasked, 1);
            // The answers had passed here.
            found(Code::LossAfterTap, u32::from(episode.location == Location::AfterTap));
        }
        Cause::Reask => {}
        Cause::Spurious => found(Code::SpuriousRetransmit, 1),
        Cause::ReorderingNaked => found(Code::ReorderingNaked, 1),
        Cause::RnrRepeat | Cause::UcLoss => {}
    }
}
