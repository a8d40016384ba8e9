//! `--csv`: a row per flow. The header is a contract: columns may be added at its end.

use std::io::{Result, Write};

use crate::export::CaptureReport;

const HEADER: &str = "file,tap,src,dst,dest_qp,space,service,packets,bytes,first_psn,last_psn,cnp,not_ect,ect0,ect1,ce,\
missing_psns,lost,lost_again,open,reordered,duplicates,retransmitted,discontinuities,lost_after_tap,reasked,\
nak_psn_sequence,nak_invalid_request,nak_remote_access,nak_remote_operational,nak_other,rnr_nak";

/// Writes the names of the columns.
pub(super) fn header(out: &mut impl Write) -> Result<()> {
    writeln!(out, "{HEADER}")
}

/// Writes the flows of a report.
pub(super) fn write(out: &mut impl Write, report: &CaptureReport) -> Result<()> {
    for f in &report.flows {
        let (e, c) = (&f.ecn, &f.counters);
        write!(out, "{},{},{},{},", quoted(&report.file), quoted(&f.tap), f.src, f.dst)?;
        write!(out, "{},{},{}", f.dest_qp, f.space, f.service)?;
        for n in [
            f.packets,
            f.bytes,
            f.first_psn.into(),
            f.last_psn.into(),
            f.cnp,
            e.not_ect,
            e.ect0,
            e.ect1,
            e.ce,
            c.missing_psns,
            c.lost,
            c.lost_again,
            c.open,
            c.reordered,
            c.duplicates,
            c.retransmitted,
            c.discontinuities,
            c.lost_after_tap,
            c.reasked,
            c.nak.psn_sequence,
            c.nak.invalid_request,
            c.nak.remote_access,
            c.nak.remote_operational,
            c.nak.other,
            c.rnr_nak,
        ] {
            write!(out, ",{n}")?;
        }
        writeln!(out)?;
    }
    Ok(())
}

/// A cell by RFC 4180.
fn quoted(text: &str) -> String {
    if text.contains([',', '"', '\n', '\r']) { format!("\"{}\"", text.replace('"', "\"\"")) } else { text.to_owned() }
}
