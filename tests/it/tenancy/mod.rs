//! No tenant ever sees anything of another: by the catalog, by raw SQL, and over HTTP.

mod bridges;
mod conversations;
mod isolation;
mod people;
mod turns;
