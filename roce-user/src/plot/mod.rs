//! Diagrams as SVG text: panels one below the other, each with axes, a legend, and series of points.
//!
//! Only what the tools here draw: lines, steps, dots and crosses over linear or logarithmic axes. The output is one
//! self-contained SVG document without scripts, and the same input gives the same bytes.

mod axis;
mod svg;

use std::path::Path;

use anyhow::{Context as _, Result};

/// How the points of a series are shown.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Style {
    /// Joined by straight lines.
    Line,
    /// Joined by steps: a value holds until the next point.
    Steps,
    /// A dot each.
    Dots,
    /// A cross each, for what must not be missed.
    Crosses,
}

/// Points that belong together. Points that are not finite, and on a logarithmic axis those not above zero, are left out.
#[derive(Clone, Debug)]
pub struct Series {
    /// Name in the legend; empty: not in the legend.
    pub name: String,
    /// How the points are shown.
    pub style: Style,
    /// (x, y) in the units of the axes.
    pub points: Vec<(f64, f64)>,
}

impl Series {
    /// A series of `points`.
    pub fn new(name: impl Into<String>, style: Style, points: Vec<(f64, f64)>) -> Self {
        Self { name: name.into(), style, points }
    }
}

/// One axis.
#[derive(Clone, Debug, Default)]
pub struct Axis {
    /// Label, with the unit.
    pub label: String,
    /// Logarithmic to base ten.
    pub log: bool,
    /// The range; `None`: what the points need, and zero for a linear y axis whose points are all above it.
    pub range: Option<(f64, f64)>,
}

impl Axis {
    /// A linear axis that fits its points.
    pub fn linear(label: impl Into<String>) -> Self {
        Self { label: label.into(), ..Self::default() }
    }

    /// A logarithmic axis that fits its points.
    pub fn log(label: impl Into<String>) -> Self {
        Self { label: label.into(), log: true, range: None }
    }
}

/// One diagram.
#[derive(Clone, Debug, Default)]
pub struct Panel {
    /// Heading.
    pub title: String,
    /// The horizontal axis.
    pub x: Axis,
    /// The vertical axis.
    pub y: Axis,
    /// What is drawn, in this order.
    pub series: Vec<Series>,
    /// Horizontal lines, each with a name: thresholds.
    pub levels: Vec<(String, f64)>,
}

/// The SVG document with `panels` one below the other.
pub fn svg(panels: &[Panel]) -> String {
    svg::document(panels)
}

/// Writes [`svg`] of `panels` to the file at `path`.
///
/// # Errors
/// The file cannot be written; the error names it.
pub fn write(path: &Path, panels: &[Panel]) -> Result<()> {
    std::fs::write(path, svg(panels)).with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn panel() -> Panel {
        Panel {
            title: "queue <64 & \"more\">".into(),
            x: Axis::linear("time, ms"),
            y: Axis::log("bytes"),
            series: vec![
                Series::new("a", Style::Line, vec![(0.0, 10.0), (1.0, 100.0), (2.0, f64::NAN), (3.0, 0.0), (4.0, 1e4)]),
                Series::new("b", Style::Steps, vec![(0.0, 1_000.0), (4.0, 10.0)]),
                Series::new("", Style::Dots, vec![(2.0, 50.0)]),
                Series::new("lost", Style::Crosses, vec![(3.0, 500.0)]),
            ],
            levels: vec![("Kmin".into(), 300.0)],
        }
    }

    #[test]
    fn a_document_is_closed_escaped_and_the_same_each_time() {
        let text = svg(&[panel(), panel()]);
        assert_eq!(text, svg(&[panel(), panel()]));
        assert!(text.starts_with("<svg ") && text.ends_with("</svg>\n"));
        assert!(text.contains("queue &lt;64 &amp; &quot;more&quot;&gt;"));
        assert!(!text.contains("NaN") && !text.contains("inf"));
        let count = |what: &str| text.matches(what).count();
        assert_eq!(count("<g "), count("</g>"));
        // Two panels with a line (in two pieces: a point is left out) and steps, a dot, a cross, a level.
        assert_eq!((count("class=\"line\""), count("class=\"steps\"")), (2, 2));
        assert_eq!((count("<circle"), count("class=\"cross\"")), (2, 2));
    }

    #[test]
    fn nothing_and_absurd_points_draw_an_empty_panel() {
        for points in [vec![], vec![(f64::NAN, 1.0)], vec![(f64::INFINITY, f64::NEG_INFINITY)], vec![(1.0, 1.0)]] {
            let panel = Panel { series: vec![Series::new("x", Style::Line, points)], ..Panel::default() };
            let text = svg(&[panel]);
            assert!(text.ends_with("</svg>\n") && !text.contains("NaN") && !text.contains("inf"), "{text}");
        }
        assert!(svg(&[]).ends_with("</svg>\n"));
        let huge = Panel {
            series: vec![Series::new("x", Style::Dots, vec![(-1e308, 1e308), (1e308, -1e308)])],
            ..Panel::default()
        };
        assert!(!svg(&[huge]).contains("NaN"));
    }
}
