//! `docs/findings.md` describes every finding, with its severity, and nothing else.

use std::collections::BTreeSet;

use roce_user::findings::Code;

#[test]
fn every_code_is_described_with_its_severity_and_no_other() {
    let text = include_str!("../../docs/findings.md");
    let described: BTreeSet<String> =
        text.lines().filter_map(|line| line.strip_prefix("### ")).map(str::to_owned).collect();
    let known: BTreeSet<String> =
        Code::ALL.iter().map(|code| format!("`{}` ({})", code.name(), code.severity().name())).collect();
    assert_eq!(described, known);
}
