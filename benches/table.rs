//! Medians of rounds, compared with their goals and printed in tables.

pub fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Prints one line; returns whether a figure is within its goal.
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
    /// Prints the title and the names of the columns.
    pub fn begin(title: String, columns: &'static [&'static str]) -> Self {
        print!("\n{title:<20}");
        for name in columns {
            print!("{name:>width$}", width = Self::width(name));
        }
        println!();
        Self { title, columns }
    }

    /// Wide enough for "12345.678", and for a name after two spaces.
    fn width(name: &str) -> usize {
        (name.len() + 2).max(10)
    }

    /// Prints one row: times to the microsecond, small numbers to a tenth, large ones without a fraction.
    pub fn row(&self, clients: u32, figures: &[f64]) {
        let name = format!("  {clients:>2} clients");
        print!("{name:<width$}", width = self.title.len().max(20));
        for (column, figure) in self.columns.iter().zip(figures) {
            let width = Self::width(column);
            let digits = if column.contains("p50") || column.contains("p99") {
                3
            } else if *figure < 10.0 {
                1
            } else {
                0
            };
            print!("{figure:>width$.digits$}");
        }
        println!();
    }
}
