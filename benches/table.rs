//! Medians of rounds, judged and printed in tables.

pub fn middle(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Prints one line; answers whether a figure keeps its goal.
pub fn check(name: &str, figure: f64, goal: f64) -> bool {
    let met = figure <= goal;
    let verdict = if met { "goal met" } else { "over the goal" };
    println!("  {name}: {figure:.2}, goal: at most {goal}: {verdict}");
    met
}

/// Rows of figures below their names.
pub struct Table {
    title: String,
    columns: &'static [&'static str],
}

impl Table {
    /// Prints the names.
    pub fn begin(title: String, columns: &'static [&'static str]) -> Self {
        print!("\n{title:<20}");
        for name in columns {
            print!("{name:>width$}", width = Self::width(name));
        }
        println!();
        Self { title, columns }
    }

    /// Room for "12345.678", and two spaces before a name.
    fn width(name: &str) -> usize {
        (name.len() + 2).max(10)
    }

    /// Prints one row: times to the microsecond, what is small to a tenth, what is large without a fraction.
    pub fn row(&self, clients: u32, figures: &[f64]) {
        let name = format!("  {clients:>2} clients");
        print!("{name:<width$}", width = self.title.len().max(20));
        for (column, figure) in self.columns.iter().zip(figures) {
            let width = Self::width(column);
            let digits = match column.contains("p50") || column.contains("p99") {
                true => 3,
                false if *figure < 10.0 => 1,
                false => 0,
            };
            print!("{figure:>width$.digits$}");
        }
        println!();
    }
}
