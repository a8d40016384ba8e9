//! The main job: the same traffic without and with the loop, side by side.

mod agent;
mod agents;
mod live;
mod options;
mod report;
mod traffic;

pub use agent::{AgentProcess, AgentRole};
pub use options::{Agent, Options, RunArgs};
pub use report::{DISTURBED, EndpointReport, FlowReport, Side, Summary};
pub use traffic::Pass;

use anyhow::Result;

/// Runs both passes; with [`Agent::None`] only the first.
///
/// # Errors
/// When the lab cannot be built, an agent fails, or a signal came.
pub fn run(options: &Options) -> Result<Summary> {
    let mut live = live::Live::new();
    live.note(&options.describe());
    let without = traffic::run_pass(options, Pass::Without, &mut live)?;
    let with = match options.agent {
        Agent::None => None,
        Agent::Program(_) => Some(traffic::run_pass(options, Pass::With, &mut live)?),
    };
    Ok(Summary {
        schema: 1,
        bottleneck_bps: options.link,
        payload_capacity_bps: options.payload_capacity() as u64,
        without,
        with,
    })
}
