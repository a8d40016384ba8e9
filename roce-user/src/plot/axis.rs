//! From values to pixels, and where the ticks are.

use super::{Axis, Panel};

/// An axis with its range settled and mapped to pixels.
pub(super) struct Scale {
    log: bool,
    from: f64,
    to: f64,
    start: f64,
    end: f64,
}

impl Scale {
    /// The scale of `axis` for `values`, from pixel `start` to pixel `end`; `zero`: a linear range begins at zero when no
    /// value lies below.
    pub(super) fn new(axis: &Axis, values: impl Iterator<Item = f64>, zero: bool, start: f64, end: f64) -> Self {
        let usable = |v: f64| v.is_finite() && (!axis.log || v > 0.0);
        let (mut from, mut to) = (f64::INFINITY, f64::NEG_INFINITY);
        match axis.range {
            Some((a, b)) if usable(a) && usable(b) => (from, to) = (a.min(b), a.max(b)),
            _ => {
                for v in values.filter(|v| usable(*v)) {
                    from = from.min(v);
                    to = to.max(v);
                }
                if zero && !axis.log && from > 0.0 && from.is_finite() {
                    from = 0.0;
                }
            }
        }
        if from > to {
            (from, to) = if axis.log { (1.0, 10.0) } else { (0.0, 1.0) };
        }
        if axis.log {
            (from, to) = (from.log10(), to.log10());
        }
        // One value alone, or a range beyond what numbers can hold.
        if to - from < f64::EPSILON * to.abs().max(1.0) {
            (from, to) = (from - 0.5, to + 0.5);
        }
        if !(to - from).is_finite() {
            (from, to) = (from / 4.0, to / 4.0);
        }
        Self { log: axis.log, from, to, start, end }
    }

    /// The pixel of `value`, when it can be shown; outside the range, the nearest edge.
    pub(super) fn pixel(&self, value: f64) -> Option<f64> {
        if !value.is_finite() || (self.log && value <= 0.0) {
            return None;
        }
        let v = if self.log { value.log10() } else { value };
        let share = ((v - self.from) / (self.to - self.from)).clamp(0.0, 1.0);
        Some(self.start + share * (self.end - self.start))
    }

    /// Values worth a tick: 1, 2 or 5 times a power of ten, five or so of them; on a logarithmic axis powers of ten.
    pub(super) fn ticks(&self) -> Vec<f64> {
        if self.log {
            let (first, last) = (self.from.ceil() as i32, self.to.floor() as i32);
            let step = ((last - first) / 6).max(0) + 1;
            let ticks: Vec<f64> = (first..=last).step_by(step as usize).map(|e| 10f64.powi(e)).collect();
            if ticks.len() >= 2 {
                return ticks;
            }
            return vec![10f64.powf(self.from), 10f64.powf(self.to)];
        }
        let rough = (self.to - self.from) / 5.0;
        let power = 10f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].map(|m| m * power).into_iter().find(|s| *s >= rough).unwrap_or(rough);
        let first = (self.from / step).ceil();
        (0..12).map(|i| (first + f64::from(i)) * step).take_while(|t| *t <= self.to + step * 1e-9).collect()
    }
}

/// The scales of `panel` for a plot area of these pixels: left, right, top, bottom.
pub(super) fn scales(panel: &Panel, area: (f64, f64, f64, f64)) -> (Scale, Scale) {
    let xs = panel.series.iter().flat_map(|s| s.points.iter().map(|p| p.0));
    let ys = panel.series.iter().flat_map(|s| s.points.iter().map(|p| p.1)).chain(panel.levels.iter().map(|l| l.1));
    (Scale::new(&panel.x, xs, false, area.0, area.1), Scale::new(&panel.y, ys, true, area.3, area.2))
}

/// A tick's label: short, with a suffix for thousands and above.
pub(super) fn label(value: f64) -> String {
    let magnitude = value.abs();
    let (scaled, suffix) = match magnitude {
        m if m >= 1e15 => return format!("{value:.0e}"),
        m if m >= 1e12 => (value / 1e12, "T"),
        m if m >= 1e9 => (value / 1e9, "G"),
        m if m >= 1e6 => (value / 1e6, "M"),
        m if m >= 1e4 => (value / 1e3, "k"),
        m if m > 0.0 && m < 1e-3 => return format!("{value:.0e}"),
        _ => (value, ""),
    };
    let text = format!("{scaled:.3}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    format!("{}{suffix}", if text == "-0" { "0" } else { text })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_within_the_range() {
        let scale = |from, to| {
            Scale::new(&Axis { range: Some((from, to)), ..Axis::default() }, std::iter::empty(), true, 0.0, 100.0)
        };
        assert_eq!(scale(0.0, 10.0).ticks(), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
        assert_eq!(scale(-1.0, 1.0).ticks(), [-1.0, -0.5, 0.0, 0.5, 1.0]);
        assert_eq!(scale(0.0, 10.0).pixel(2.5), Some(25.0));
        assert_eq!(scale(0.0, 10.0).pixel(11.0), Some(100.0), "the edge");
        let log = Scale::new(&Axis::log(""), [1.0, 1_000.0, -5.0].into_iter(), true, 0.0, 300.0);
        assert_eq!(log.ticks(), [1.0, 10.0, 100.0, 1_000.0]);
        assert_eq!((log.pixel(10.0), log.pixel(0.0)), (Some(100.0), None));
    }

    #[test]
    fn labels_are_short() {
        for (value, text) in
            [(0.0, "0"), (0.25, "0.25"), (9_999.0, "9999"), (15_000.0, "15k"), (2e9, "2G"), (1e-5, "1e-5")]
        {
            assert_eq!(label(value), text);
        }
    }
}
