//! Users and their identities: resolving, erasing, and requests that race.

mod erased_answers;
mod erased_summaries;
mod erasure_races;
mod names;
mod people_erasure;
mod people_races;
mod person_tables;
mod resolve;
