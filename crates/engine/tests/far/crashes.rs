//! The server is killed at moments that are spread over all requests of a save, and of a load.
//!
//! Mostly it is back at once, and the operation succeeds. Each fifth time it stays away for longer than the operation's
//! deadline.

use crate::campaign::Run;
use crate::proxy::{Fault, Moment, Seen};

/// Moments of a save, and of a load; a campaign sets more by the variable. Each fifth is one of long absence.
const MOMENTS: usize = 4;
const VARIABLE: &str = "SHARDFAST_TEST_CRASHES";

/// Seconds for which the server stays away.
const AWAY_SECONDS: u32 = 4;

/// Runs in which the server dies: at each request or at some, at one of its moments after the other.
pub(crate) fn deaths(requests: &[Seen]) -> Vec<Run> {
    use Moment::{Answered, Before, InAnswer, InBody, Sent};
    let all: Vec<(&Seen, Moment)> = requests
        .iter()
        .flat_map(|seen| [Before, InBody, Sent, InAnswer, Answered].map(|moment| (seen, moment)))
        .filter(|(seen, moment)| *moment != InBody || seen.has_body)
        .filter(|(seen, moment)| *moment != InAnswer || seen.answer_has_body)
        .collect();
    let wanted = std::env::var(VARIABLE).map_or(MOMENTS, |count| count.parse().unwrap());
    let run = |i: usize| {
        let (seen, moment) = all[i * all.len() / wanted];
        let seconds = if i % 5 == 3 { AWAY_SECONDS } else { 0 };
        Run::new(i, seen, Fault::ServerDies(moment, seconds), false)
    };
    (0..wanted).map(run).collect()
}
