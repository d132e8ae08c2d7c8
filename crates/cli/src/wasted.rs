//! Compares the time that the saves of a run waste with that of the interval that wastes least.

use shardfast_telemetry::report::{Operation, RunReport, Wasted};
use shardfast_tools::interval::Costs;

use crate::text;

/// Adds to saves that follow another one what they waste, with failures each `mtbf_s` seconds on average. The cost of a
/// save is the time that the program waited for it; a slowdown of steps beside it, which `sf.optimal` measures, no
/// record has. A restart takes as long as the median load.
pub(crate) fn add(report: &mut RunReport, mtbf_s: f64) {
    let restart_s = median(report.loads.iter().filter_map(|load| load.ended_ms)).unwrap_or(0.0) / 1e3;
    let restarts: Vec<u64> = report.loads.iter().filter_map(|load| load.began_unix_ms).collect();
    let mut before: Option<(u64, u64)> = None;
    for save in report.saves.iter_mut().filter(|save| save.outcome == "committed") {
        let (Some(began_ms), Some(lag_ms)) = (save.began_unix_ms, save.ended_ms) else { continue };
        if let Some((step, ms)) = before.replace((save.step, began_ms))
            && step < save.step
            && ms < began_ms
            && !restarts.iter().any(|restart| (ms..=began_ms).contains(restart))
        {
            save.wasted = wasted(save, (began_ms - ms) as f64 / 1e3, lag_ms / 1e3, mtbf_s, restart_s);
        }
    }
}

fn wasted(save: &Operation, apart_s: f64, lag_s: f64, mtbf_s: f64, restart_s: f64) -> Option<Wasted> {
    let cost_s = save.stalled_ms.map_or(lag_s, |ms| ms / 1e3);
    let interval_s = apart_s - cost_s;
    let costs = Costs { step_s: 1.0, cost_s, lag_s, mtbf_s, restart_s };
    let best_interval_s = costs.optimum_s().max(costs.sustained_s());
    let (waste, best_waste) = (costs.waste(interval_s), costs.waste(best_interval_s));
    let is_known = interval_s > 0.0 && best_interval_s > 0.0 && waste.is_finite() && best_waste.is_finite();
    is_known.then_some(Wasted { interval_s, waste, best_interval_s, best_waste })
}

/// Returns a line with what the median save wastes; an empty one where no save's interval is known.
pub(crate) fn line(report: &RunReport) -> String {
    let all = || report.saves.iter().filter_map(|save| save.wasted);
    let of = |part: fn(Wasted) -> f64| median(all().map(part));
    let (Some(waste), Some(best), Some(every), Some(best_every)) =
        (of(|of| of.waste), of(|of| of.best_waste), of(|of| of.interval_s), of(|of| of.best_interval_s))
    else {
        return String::new();
    };
    let [waste, best] = [waste, best].map(|share| format!("{:.2}%", share * 100.0));
    let [every, best_every] = [every, best_every].map(text::duration);
    format!("time lost: {waste} with a save every {every}; the best would be {best}, with one every {best_every}\n")
}

fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len().saturating_sub(1) / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn save(step: u64, began_s: u64, stalled_ms: Option<f64>, ended_ms: f64) -> Operation {
        let mut save = Operation::unrecorded(step, "committed");
        (save.began_unix_ms, save.stalled_ms, save.ended_ms) = (Some(began_s * 1000), stalled_ms, Some(ended_ms));
        save
    }

    fn added(saves: Vec<Operation>, loads: Vec<Operation>) -> RunReport {
        let mut report = RunReport { saves, loads, ..RunReport::default() };
        add(&mut report, 6.0 * 3600.0);
        report
    }

    #[test]
    fn a_save_wastes_what_the_model_says_of_its_interval() {
        let report = added(vec![save(1, 1000, Some(200.0), 9e3), save(2, 1600, Some(200.0), 9e3)], Vec::new());
        assert!(report.saves[0].wasted.is_none(), "no save is before it");
        let found = report.saves[1].wasted.unwrap();
        let costs = Costs { step_s: 1.0, cost_s: 0.2, lag_s: 9.0, mtbf_s: 21_600.0, restart_s: 0.0 };
        assert_eq!((found.interval_s, found.waste), (599.8, costs.waste(599.8)));
        assert_eq!(found.best_interval_s, costs.optimum_s());
        assert!(found.best_waste < found.waste);
        let line = line(&report);
        assert!(line.starts_with("time lost: 1.4") && line.contains("the best would be"), "{line}");
    }

    #[test]
    fn a_save_that_the_program_waits_for_costs_all_of_its_time() {
        let report = added(vec![save(1, 1000, None, 60e3), save(2, 1600, None, 60e3)], Vec::new());
        assert_eq!(report.saves[1].wasted.unwrap().interval_s, 540.0);
    }

    #[test]
    fn intervals_that_are_none_are_left_out() {
        let load = |began_s| save(1, began_s, None, 5e3);
        let two = || vec![save(1, 1000, Some(1.0), 1e3), save(2, 1600, Some(1.0), 1e3)];
        assert!(added(two(), vec![load(1200)]).saves[1].wasted.is_none(), "a restart lies between");
        assert!(added(two(), vec![load(900)]).saves[1].wasted.is_some());
        let back = vec![save(1, 1000, Some(1.0), 1e3), save(2, 900, Some(1.0), 1e3)];
        assert!(added(back, Vec::new()).saves[1].wasted.is_none(), "clocks went back");
        let overlapping = vec![save(1, 1000, None, 1e3), save(2, 1001, None, 9e3)];
        assert!(added(overlapping, Vec::new()).saves[1].wasted.is_none(), "it began within the one before");
        assert_eq!(line(&added(Vec::new(), Vec::new())), "");
    }
}
